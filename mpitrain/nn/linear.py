"""The linear map: one matrix product over the flattened leading dims.

Shape suffixes: N leading dims flattened, I inputs, O outputs.
"""

from dataclasses import dataclass
from math import prod

from mpitrain.arrays import Floats
from mpitrain.nn.layer import Context, Layer, Tensors, add_to, column_sums, no_gradient
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
        I and O.
    bias : bool
        Whether there is a bias.
    std : float
        Standard deviation of the initial weights.
    first : bool
        Whether this is the first layer of a model, so that nobody needs the gradient by its input.
    """

    name: str
    inputs: int
    outputs: int
    bias: bool = True
    std: float = 0.02
    first: bool = False

    def specs(self) -> list[ParamSpec]:
        """Declare ``weight`` and ``bias``."""
        weight = ParamSpec(f"{self.name}.weight", (self.outputs, self.inputs), std=self.std, decay=True)
        return [weight, ParamSpec(f"{self.name}.bias", (self.outputs,))] if self.bias else [weight]

    def forward(self, params: Tensors, x: Floats, context: Context) -> tuple[Floats, LinearCache]:
        """Map (..., I) to (..., O)."""
        y_NO: Floats = _rows(x) @ params[f"{self.name}.weight"].T
        if self.bias:
            y_NO += params[f"{self.name}.bias"]
        return y_NO.reshape(*x.shape[:-1], self.outputs), LinearCache(x)

    def backward(self, params: Tensors, cache: LinearCache, dy: Floats, grads: Tensors) -> Floats:
        """Map (..., O) back to (..., I)."""
        dy_NO = _rows(dy)
        add_to(grads, f"{self.name}.weight", dy_NO.T @ _rows(cache.x))
        if self.bias:
            add_to(grads, f"{self.name}.bias", column_sums(dy_NO))
        if self.first:
            return no_gradient(dy)
        dx_NI: Floats = dy_NO @ params[f"{self.name}.weight"]
        return dx_NI.reshape(cache.x.shape)


def _rows(x: Floats) -> Floats:
    return x.reshape(prod(x.shape[:-1]), x.shape[-1])
