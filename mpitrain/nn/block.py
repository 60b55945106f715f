"""The pre-norm Transformer block (Xiong et al., 2020)."""

from mpitrain.nn.activation import Gelu
from mpitrain.nn.attention import MultiHeadAttention
from mpitrain.nn.dropout import Dropout
from mpitrain.nn.layer import Chain, Residual
from mpitrain.nn.linear import Linear, row_linear
from mpitrain.nn.norm import LayerNorm
from mpitrain.nn.split import WHOLE, TensorSplit


class Block(Chain):
    """``x + dropout(attention(norm(x)))``, then ``x + dropout(mlp(norm(x)))``: (B, T, C) to (B, T, C).

    A tensor axis splits attention by heads and the mlp by its inner width. Norms, dropout and what is added to are the
    same on all its ranks, or split too, over time steps.

    Parameters
    ----------
    name : str
        Prefix of the parameters of ``norm1``, ``attention``, ``norm2`` and ``mlp``.
    width, heads, hidden : int
        C, attention heads, and the inner width of the mlp.
    causal : bool
        Whether a time step attends only to itself and the past.
    dropout : float
        Rate on both branches.
    out_std : float
        Standard deviation of the initial weights that end a branch.
    split : TensorSplit
        Its ranks must divide ``heads``; checked by the model.
    time : int, optional
        T, where the block maps this rank's slice of it; None: it maps all.
    """

    def __init__(
        self,
        name: str,
        width: int,
        *,
        heads: int,
        hidden: int,
        causal: bool,
        dropout: float,
        out_std: float = 0.02,
        split: TensorSplit = WHOLE,
        time: int | None = None,
    ) -> None:
        sliced = time is not None
        first = split.bounds(time)[0] * width if time is not None else 0
        attention = Residual(
            [
                LayerNorm(f"{name}.norm1", width, partial=sliced),
                MultiHeadAttention(
                    f"{name}.attention", width, heads, causal=causal, out_std=out_std, split=split, time=time
                ),
                Dropout(f"{name}.attention.dropout", dropout, first),
            ]
        )
        mlp = Residual(
            [
                LayerNorm(f"{name}.norm2", width, partial=sliced),
                *split.enter(time),
                Linear(f"{name}.mlp.hidden", width, hidden, parallel="column", split=split),
                Gelu(),
                *row_linear(f"{name}.mlp.out", hidden, width, std=out_std, split=split, time=time),
                Dropout(f"{name}.mlp.dropout", dropout, first),
            ]
        )
        super().__init__([attention, mlp])
