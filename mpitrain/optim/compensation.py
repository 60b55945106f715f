"""Delay compensation of stale gradients on a parameter server (DC-ASGD; Zheng et al., 2017)."""

from dataclasses import dataclass

from mpitrain.arrays import Floats
from mpitrain.kernels import compensate as kernels
from mpitrain.params import Params

EPSILON = 1e-7
"""Added to the mean square before its root, as in the paper."""


@dataclass(frozen=True, kw_only=True)
class Compensation:
    """The constants of a correction; what changes is in the buffers that ``init`` returns.

    Attributes
    ----------
    strength : float
        lambda, or lambda_0 where it is adaptive.
    decay : float or None
        Share of the old mean square that is kept, m; None for a fixed lambda.
    """

    strength: float
    decay: float | None = None

    def init(self, params: Params) -> dict[str, Params]:
        """Allocate "mean_square" where lambda is adaptive; layout and type of the parameters, saved by name."""
        return {} if self.decay is None else {"mean_square": params.zeros_like()}

    def correct(self, grad: Floats, param: Floats, backup: Floats, mean_square: Floats | None = None) -> None:
        """Correct a decoded gradient, or a slice of one, in place: g + lambda·g·g·(param − backup).

        A correction is never longer than the gradient, element by element (see `mpitrain.kernels.compensate`).

        Parameters
        ----------
        grad : (size,) array
            Overwritten.
        param, backup : (size,) arrays
            The weights now, and those on which the gradient was computed. Not changed.
        mean_square : (size,) array or None
            The same slice of the buffer, updated; needed where lambda is adaptive and only there. One for all
            workers.

        Raises
        ------
        ValueError
            Arrays of different sizes or types, or a mean square that is missing or not wanted.
        """
        others = [param, backup] if mean_square is None else [param, backup, mean_square]
        if any(other.size != grad.size or other.dtype != grad.dtype for other in others):
            got = ", ".join(f"{x.dtype}[{x.size}]" for x in (grad, *others))
            raise ValueError(f"compensation: expected arrays of one size and type, got {got}")
        if (mean_square is None) != (self.decay is None):
            got = "none" if mean_square is None else "one"
            raise ValueError(f"compensation: expected a mean square where decay is set, got decay {self.decay}, {got}")
        scalar = grad.dtype.type
        strength, one = scalar(self.strength), scalar(1)
        if self.decay is None or mean_square is None:
            kernels.fixed(grad, param, backup, strength, one)
        else:
            decays = scalar(self.decay), scalar(1 - self.decay)
            kernels.adaptive(grad, param, backup, mean_square, strength, *decays, scalar(EPSILON), one)
