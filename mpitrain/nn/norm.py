"""Layer normalization (Ba, Kiros and Hinton, 2016).

Shape suffixes: N leading dims flattened, C channels.
"""

from dataclasses import dataclass
from math import prod

import numpy as np

from mpitrain.arrays import Floats
from mpitrain.nn.layer import Context, Layer, Tensors, add_to, column_sums, row_sums
from mpitrain.params import ParamSpec


@dataclass(frozen=True)
class LayerNormCache:
    """The normalized input (N, C), and the reciprocal deviation of each row (N, 1)."""

    unit: Floats
    rstd: Floats


@dataclass(frozen=True)
class LayerNorm(Layer[Floats, LayerNormCache]):
    """Normalize the last dim to mean 0 and variance 1, then scale and shift.

    Attributes
    ----------
    name : str
        Prefix of the parameters ``gain`` (C,) and ``bias`` (C,).
    width : int
        C.
    eps : float
        Added to the variance.
    partial : bool
        Whether each rank of the tensor axis sees its time slice only.
    """

    name: str
    width: int
    eps: float = 1e-5
    partial: bool = False

    def specs(self) -> list[ParamSpec]:
        """Declare ``gain`` and ``bias``."""
        return [
            ParamSpec(f"{self.name}.gain", (self.width,), mean=1.0, partial=self.partial),
            ParamSpec(f"{self.name}.bias", (self.width,), partial=self.partial),
        ]

    def forward(self, params: Tensors, x: Floats, context: Context) -> tuple[Floats, LayerNormCache]:
        """Normalize (..., C)."""
        x_NC = x.reshape(prod(x.shape[:-1]), self.width)
        unit_NC = x_NC - self._row_means(x_NC)
        rstd_N1 = self._row_means_of_products(unit_NC, unit_NC)
        rstd_N1 += self.eps
        np.sqrt(rstd_N1, out=rstd_N1)
        np.reciprocal(rstd_N1, out=rstd_N1)
        unit_NC *= rstd_N1
        y_NC = unit_NC * params[f"{self.name}.gain"]
        y_NC += params[f"{self.name}.bias"]
        return y_NC.reshape(x.shape), LayerNormCache(unit_NC, rstd_N1)

    def backward(self, params: Tensors, cache: LayerNormCache, dy: Floats, grads: Tensors) -> Floats:
        """Go back: ``dx = rstd·(g − mean(g) − unit·mean(g·unit))`` with ``g = dy·gain``."""
        dy_NC = dy.reshape(cache.unit.shape)
        work_NC = dy_NC * cache.unit
        add_to(grads, f"{self.name}.gain", column_sums(work_NC))
        add_to(grads, f"{self.name}.bias", column_sums(dy_NC))
        dx_NC = dy_NC * params[f"{self.name}.gain"]
        projection_N1 = self._row_means_of_products(dx_NC, cache.unit)
        dx_NC -= self._row_means(dx_NC)
        dx_NC -= np.multiply(cache.unit, projection_N1, out=work_NC)
        dx_NC *= cache.rstd
        return dx_NC.reshape(dy.shape)

    def _row_means(self, x_NC: Floats) -> Floats:
        return row_sums(x_NC) * (1 / self.width)

    def _row_means_of_products(self, a_NC: Floats, b_NC: Floats) -> Floats:
        sums_N: Floats = np.einsum("nc,nc->n", a_NC, b_NC)
        sums_N *= 1 / self.width
        return sums_N[:, None]
