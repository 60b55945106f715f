"""The linear map: one matrix product over the flattened leading dims.

Shape suffixes: N leading dims flattened, I inputs, O outputs; of a split map, those that this rank holds.
"""

from dataclasses import dataclass
from math import prod
from typing import Literal

from mpitrain.arrays import Floats
from mpitrain.nn.layer import AnyLayer, Context, Layer, Tensors, add_to, column_sums, no_gradient
from mpitrain.nn.split import WHOLE, TensorSplit
from mpitrain.params import ParamSpec


@dataclass(frozen=True)
class LinearCache:
    """The input, as given."""

    x: Floats


@dataclass(frozen=True)
class Linear(Layer[Floats, LinearCache]):
    """``y = x·weightᵀ + bias`` over the last dim.

    Attributes
    ----------
    name : str
        Prefix of the parameters ``weight`` (O, I) and ``bias`` (O,).
    inputs, outputs : int
        I and O of the whole map.
    bias : bool
        Whether there is a bias.
    std : float
        Standard deviation of the initial weights.
    first : bool
        Whether this is the first layer of a model, so that nobody needs the gradient by its input.
    parallel : "none", "column" or "row"
        What ``split`` cuts: nothing; the outputs, with their biases; the inputs, so that the outputs are this rank's
        addend to a sum, and a bias must come behind it (`row_linear`).
    split : TensorSplit
    tied : str
        Name of the parameter that serves as ``weight``, of another layer; empty: its own.
    """

    name: str
    inputs: int
    outputs: int
    bias: bool = True
    std: float = 0.02
    first: bool = False
    parallel: Literal["none", "column", "row"] = "none"
    split: TensorSplit = WHOLE
    tied: str = ""

    @property
    def weight(self) -> str:
        """Name the parameter that serves as weight."""
        return self.tied or f"{self.name}.weight"

    def specs(self) -> list[ParamSpec]:
        """Declare ``weight`` and ``bias``."""
        specs = [ParamSpec(self.weight, (self.outputs, self.inputs), std=self.std, decay=True)]
        if self.bias:
            specs.append(ParamSpec(f"{self.name}.bias", (self.outputs,)))
        if self.parallel == "none":
            return specs
        return [self.split.shard(spec, 0 if self.parallel == "column" else 1) for spec in specs]

    def forward(self, params: Tensors, x: Floats, context: Context) -> tuple[Floats, LinearCache]:
        """Map (..., I) to (..., O)."""
        y_NO: Floats = _rows(x) @ params[self.weight].T
        if self.bias:
            y_NO += params[f"{self.name}.bias"]
        return y_NO.reshape(*x.shape[:-1], y_NO.shape[-1]), LinearCache(x)

    def backward(self, params: Tensors, cache: LinearCache, dy: Floats, grads: Tensors) -> Floats:
        """Map (..., O) back to (..., I)."""
        dy_NO = _rows(dy)
        add_to(grads, self.weight, dy_NO.T @ _rows(cache.x))
        if self.bias:
            add_to(grads, f"{self.name}.bias", column_sums(dy_NO))
        if self.first:
            return no_gradient(dy)
        dx_NI: Floats = dy_NO @ params[self.weight]
        return dx_NI.reshape(cache.x.shape)


@dataclass(frozen=True)
class BiasCache:
    """Nothing to remember."""


@dataclass(frozen=True)
class Bias(Layer[Floats, BiasCache]):
    """Add ``bias`` (C,) to the last dim, once: behind the sum that a row-parallel map ends with.

    Attributes
    ----------
    name : str
        Prefix of the parameter ``bias``.
    width : int
        C.
    partial : bool
        Whether each rank of the tensor axis sees its time slice only.
    """

    name: str
    width: int
    partial: bool = False

    def specs(self) -> list[ParamSpec]:
        """Declare ``bias``."""
        return [ParamSpec(f"{self.name}.bias", (self.width,), partial=self.partial)]

    def forward(self, params: Tensors, x: Floats, context: Context) -> tuple[Floats, BiasCache]:
        """Add it to (..., C)."""
        return x + params[f"{self.name}.bias"], BiasCache()

    def backward(self, params: Tensors, cache: BiasCache, dy: Floats, grads: Tensors) -> Floats:
        """Add the gradient summed over the leading dims; it passes on unchanged."""
        add_to(grads, f"{self.name}.bias", column_sums(_rows(dy)))
        return dy


def row_linear(
    name: str, inputs: int, outputs: int, *, std: float, split: TensorSplit, time: int | None = None
) -> list[AnyLayer]:
    """Build a linear map whose inputs are split: this rank's addend, the sum over the ranks, the bias.

    Parameters
    ----------
    name, inputs, outputs, std
        As of `Linear`.
    time : int, optional
        As of `TensorSplit.leave`.
    """
    if split.size == 1:
        return [Linear(name, inputs, outputs, std=std)]
    return [
        Linear(name, inputs, outputs, bias=False, std=std, parallel="row", split=split),
        *split.leave(time),
        Bias(name, outputs, partial=time is not None),
    ]


def _rows(x: Floats) -> Floats:
    return x.reshape(prod(x.shape[:-1]), x.shape[-1])
