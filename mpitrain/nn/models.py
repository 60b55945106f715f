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
from mpitrain.nn.layer import AnyLayer, Chain, Recomputed, keep_freed_memory
from mpitrain.nn.linear import Linear, row_linear
from mpitrain.nn.norm import LayerNorm
from mpitrain.nn.pooling import Flatten, LastStep, MeanOverTime
from mpitrain.nn.split import WHOLE, TensorSplit, as_one
from mpitrain.partition import split_widths, tensor_refusal

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
    split : TensorSplit
        Cuts every other width, from the first hidden one on: linear layers are column- and row-parallel in turn, and a
        last one without a partner is whole on all ranks.

    Raises
    ------
    ConfigError
        The ranks of ``split`` do not divide a width that it cuts.
    """

    def __init__(
        self,
        *,
        inputs: int,
        hidden: tuple[int, ...],
        outputs: int,
        activation: Literal["relu", "gelu"] = "relu",
        dropout: float = 0.0,
        split: TensorSplit = WHOLE,
    ) -> None:
        _check_split(split_widths(hidden), split)
        layers: list[AnyLayer] = [Flatten()]
        widths = (inputs, *hidden, outputs)
        for index in range(len(hidden)):
            name, held = f"hidden.{index}", split.bounds(widths[index + 1]) if index % 2 == 0 else (0, 0)
            layers += [
                _mlp_linear(name, index, widths, split, std=math.sqrt(2 / widths[index])),
                Relu() if activation == "relu" else Gelu(),
                Dropout(f"{name}.dropout", dropout, held[0]),
            ]
        layers.append(_mlp_linear("head", len(hidden), widths, split, std=math.sqrt(1 / widths[-2])))
        super().__init__(layers)
        keep_freed_memory()


def _mlp_linear(name: str, index: int, widths: tuple[int, ...], split: TensorSplit, *, std: float) -> AnyLayer:
    """Build a linear map of an MLP: column-parallel, the row-parallel map that follows one, or a whole last one."""
    before, after, first = widths[index], widths[index + 1], index == 0
    if index % 2:
        return as_one(row_linear(name, before, after, std=std, split=split))
    if index + 2 == len(widths):
        return Linear(name, before, after, std=std, first=first)
    column = Linear(name, before, after, std=std, first=first, parallel="column", split=split)
    return column if first else as_one([*split.enter(), column])  # nobody needs the gradient by a model's input


class Transformer(Chain):
    """Pre-norm Transformer, encoder or causal.

    Input is floats (B, T, F), projected, or tokens (B, T), embedded. Output is (B, K) from the mean over time
    ("classify") or from the last step ("forecast"), or (B, T, K) for each step ("lm").
    Weights start as in GPT-2: deviation 0.02, those that end a residual branch divided by √(2·blocks). The input map
    starts with deviation 1/√F, so that standardized features keep unit variance and are not drowned by the positions.

    Between its layers, whatever the split, all ranks of a tensor axis hold the same; with ``split.sequence``, between
    the blocks, each its slice of the time steps.

    Parameters
    ----------
    task : "classify", "forecast" or "lm"
        The head. "lm" is always causal.
    time : int
        The longest sequence; the only length where ``split.sequence``.
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
    split : TensorSplit
        Cuts attention by heads, the mlps by their inner width, the embedding by tokens, and the head of "lm" by
        outputs: its output is then (B, T, this rank's part of K), for `mpitrain.parallel.loss`.
    tied : bool
        Whether the weight of the head of "lm" is that of the embedding (Press and Wolf, 2017).
    recompute : bool
        Whether a block keeps only its input for the backward pass.

    Raises
    ------
    ConfigError
        Both or none of ``features`` and ``vocabulary`` are given; ``heads`` does not divide ``d_model``, or the ranks
        of ``split`` not ``heads`` and ``d_ff``; ``tied`` without an embedding of as many tokens as outputs.
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
        split: TensorSplit = WHOLE,
        tied: bool = False,
        recompute: bool = False,
    ) -> None:
        _check_split({"model.heads": heads, "model.d_ff": d_ff}, split)
        if tied and (task != "lm" or vocabulary != outputs):
            raise ConfigError(
                f'model: tied = true needs task = "lm" with as many outputs as tokens, got task = "{task}", '
                f"{outputs} outputs and vocabulary = {vocabulary}; set tied = false"
            )
        chains = [
            Block(
                f"blocks.{i}",
                d_model,
                heads=heads,
                hidden=d_ff,
                causal=causal or task == "lm",
                dropout=dropout,
                out_std=0.02 / math.sqrt(2 * blocks),
                split=split,
                time=time if split.sequence else None,
            )
            for i in range(blocks)
        ]
        super().__init__(
            [
                _input_layer(features, vocabulary, d_model, split),
                Positions("positions", time, d_model),
                as_one([Dropout("positions.dropout", dropout), *split.split_time(time)]),
                *([Recomputed([block]) for block in chains] if recompute else chains),
                as_one([*split.gather_time(time), LayerNorm("norm", d_model)]),
                *_pooling(task),
                _head(task, d_model, outputs, split, tied=tied),
            ]
        )
        keep_freed_memory()


def _check_split(sizes: dict[str, int], split: TensorSplit) -> None:
    if reason := tensor_refusal(sizes, split.size):
        raise ConfigError(reason)


def _input_layer(features: int | None, vocabulary: int | None, d_model: int, split: TensorSplit) -> AnyLayer:
    if (features is None) == (vocabulary is None):
        raise ConfigError(
            f"model: expected either features or a vocabulary, got features = {features} and "
            f"vocabulary = {vocabulary}; give exactly one"
        )
    if features is not None:
        return Linear("input", features, d_model, std=1 / math.sqrt(features), first=True)
    return as_one([Embedding("embedding", vocabulary or 0, d_model, split), *split.leave()])


def _pooling(task: Task) -> list[AnyLayer]:
    if task == "classify":
        return [MeanOverTime()]
    return [LastStep()] if task == "forecast" else []


def _head(task: Task, d_model: int, outputs: int, split: TensorSplit, *, tied: bool) -> AnyLayer:
    if task != "lm":
        return Linear("head", d_model, outputs)
    weight = "embedding.weight" if tied else ""
    return as_one([*split.enter(), Linear("head", d_model, outputs, parallel="column", split=split, tied=weight)])
