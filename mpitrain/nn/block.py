"""The pre-norm Transformer block (Xiong et al., 2020)."""

from mpitrain.nn.activation import Gelu
from mpitrain.nn.attention import MultiHeadAttention
from mpitrain.nn.dropout import Dropout
from mpitrain.nn.layer import Chain, Residual
from mpitrain.nn.linear import Linear
from mpitrain.nn.norm import LayerNorm


class Block(Chain):
    """``x + dropout(attention(norm(x)))``, then ``x + dropout(mlp(norm(x)))``: (B, T, C) to (B, T, C).

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
    """

    def __init__(
        self, name: str, width: int, *, heads: int, hidden: int, causal: bool, dropout: float, out_std: float = 0.02
    ) -> None:
        attention = Residual(
            [
                LayerNorm(f"{name}.norm1", width),
                MultiHeadAttention(f"{name}.attention", width, heads, causal=causal, out_std=out_std),
                Dropout(f"{name}.attention.dropout", dropout),
            ]
        )
        mlp = Residual(
            [
                LayerNorm(f"{name}.norm2", width),
                Linear(f"{name}.mlp.hidden", width, hidden),
                Gelu(),
                Linear(f"{name}.mlp.out", hidden, width, std=out_std),
                Dropout(f"{name}.mlp.dropout", dropout),
            ]
        )
        super().__init__([attention, mlp])
