"""The models: chains of layers.

Shape suffixes: B batch, T time, C channels (model width), F features, K classes or outputs, V vocabulary.
"""

import math
from typing import Literal

from mpitrain.errors import ConfigError
from mpitrain.nn.activation import Gelu, Relu
from mpitrain.nn.block import Block
from mpitrain.nn.dropout import Dropout
from mpitrain.nn.embedding import Embedding, Positions
from mpitrain.nn.layer import AnyLayer, Chain, keep_freed_memory
from mpitrain.nn.linear import Linear
from mpitrain.nn.norm import LayerNorm
from mpitrain.nn.pooling import Flatten, LastStep, MeanOverTime

Task = Literal["classify", "forecast", "lm"]


class Mlp(Chain):
    """Fully connected layers on flattened input: (B, T, C) or (B, F) to (B, K).

    Parameters
    ----------
    inputs : int
        F, or T·C.
    hidden : tuple of int
        Widths of the hidden layers; may be empty (a linear model).
    outputs : int
        K.
    activation : "relu" or "gelu"
        Between the layers. Initial weights are normal with variance 2/inputs (He et al., 2015), the last 1/inputs.
    dropout : float
        Rate after each activation.
    """

    def __init__(
        self,
        *,
        inputs: int,
        hidden: tuple[int, ...],
        outputs: int,
        activation: Literal["relu", "gelu"] = "relu",
        dropout: float = 0.0,
    ) -> None:
        layers: list[AnyLayer] = [Flatten()]
        widths = (inputs, *hidden)
        for index, (before, after) in enumerate(zip(widths, hidden, strict=False)):
            layers += [
                Linear(f"hidden.{index}", before, after, std=math.sqrt(2 / before), first=index == 0),
                Relu() if activation == "relu" else Gelu(),
                Dropout(f"hidden.{index}.dropout", dropout),
            ]
        layers.append(Linear("head", widths[-1], outputs, std=math.sqrt(1 / widths[-1]), first=not hidden))
        super().__init__(layers)
        keep_freed_memory()


class Transformer(Chain):
    """Pre-norm Transformer, encoder or causal.

    Input is floats (B, T, F), projected, or tokens (B, T), embedded. Output is (B, K) from the mean over time
    ("classify") or from the last step ("forecast"), or (B, T, K) for each step ("lm").
    Weights start as in GPT-2: deviation 0.02, those that end a residual branch divided by √(2·blocks). The input map
    starts with deviation 1/√F, so that standardized features keep unit variance and are not drowned by the positions.

    Parameters
    ----------
    task : "classify", "forecast" or "lm"
        The head. "lm" is always causal.
    time : int
        The longest sequence.
    d_model, blocks, heads, d_ff : int
        C, number of blocks, attention heads, inner width of each block's mlp.
    outputs : int
        K: classes, forecast values, or the vocabulary.
    features, vocabulary : int, optional
        F or V; exactly one of them is given.
    causal : bool
        Whether a time step attends only to itself and the past.
    dropout : float
        Rate after the positions and on each residual branch.

    Raises
    ------
    ConfigError
        Both or none of ``features`` and ``vocabulary`` are given, or ``heads`` does not divide ``d_model``.
    """

    def __init__(
        self,
        *,
        task: Task,
        time: int,
        d_model: int,
        blocks: int,
        heads: int,
        d_ff: int,
        outputs: int,
        features: int | None = None,
        vocabulary: int | None = None,
        causal: bool = False,
        dropout: float = 0.0,
    ) -> None:
        out_std = 0.02 / math.sqrt(2 * max(blocks, 1))
        causal = causal or task == "lm"
        super().__init__(
            [
                _input_layer(features, vocabulary, d_model),
                Positions("positions", time, d_model),
                Dropout("positions.dropout", dropout),
                *(
                    Block(
                        f"blocks.{i}",
                        d_model,
                        heads=heads,
                        hidden=d_ff,
                        causal=causal,
                        dropout=dropout,
                        out_std=out_std,
                    )
                    for i in range(blocks)
                ),
                LayerNorm("norm", d_model),
                *_pooling(task),
                Linear("head", d_model, outputs),
            ]
        )
        keep_freed_memory()


def _input_layer(features: int | None, vocabulary: int | None, d_model: int) -> AnyLayer:
    if (features is None) == (vocabulary is None):
        raise ConfigError(
            f"model: expected either features or a vocabulary, got features = {features} and "
            f"vocabulary = {vocabulary}; give exactly one"
        )
    if features is not None:
        return Linear("input", features, d_model, std=1 / math.sqrt(features), first=True)
    return Embedding("embedding", vocabulary or 0, d_model)


def _pooling(task: Task) -> list[AnyLayer]:
    if task == "classify":
        return [MeanOverTime()]
    return [LastStep()] if task == "forecast" else []
