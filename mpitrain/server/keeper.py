"""The weights on a server, and what moves them: decoded pushes are added up, corrected, clipped and applied."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np
import numpy.typing as npt

from mpitrain.arrays import Floats, aligned_empty
from mpitrain.kernels.reduce import add, count_not_finite
from mpitrain.optim.clip import clip_factor, scale, sum_of_squares
from mpitrain.optim.compensation import Compensation
from mpitrain.optim.optimizer import Optimizer, OptimizerState
from mpitrain.params import Layout, Params
from mpitrain.server.setting import Piece
from mpitrain.server.stream import Incoming


@dataclass(frozen=True)
class Policy:
    """How a gradient becomes an update.

    Attributes
    ----------
    rate : callable
        The learning rate of an update, from the clocks that lie before it in the run and the staleness of its gradient.
    clip_norm : float
        Bound of the norm of the whole model's gradient; 0: none.
    compensation : Compensation or None
        How gradients of older weights are corrected.
    counts : callable
        Tells whether a tensor counts here in sums over all servers; the others know it from another one.
    """

    rate: Callable[[float, float], float]
    clip_norm: float = 0.0
    compensation: Compensation | None = None
    counts: Callable[[str], bool] = lambda name: True


def layout_of(pieces: Sequence[Piece]) -> Layout:
    """Lay out the tensors of some buckets as workers do within each bucket."""
    group = {segment.spec.name: f"bucket {piece.index}" for piece in pieces for segment in piece.segments}
    return Layout([segment.spec for piece in pieces for segment in piece.segments], lambda spec: group[spec.name])


class Keeper:
    """Weights and optimizer of one server.

    Parameters
    ----------
    pieces : list of Piece
        The buckets that the server owns.
    params, grads : Params
        Of the layout `layout_of` the pieces.
    optimizer, state
        What moves them.
    policy : Policy
        The same on all servers.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        params: Params,
        grads: Params,
        optimizer: Optimizer,
        state: OptimizerState,
        policy: Policy,
    ) -> None:
        self.pieces, self.params, self.state, self.policy = pieces, params, state, policy
        self._optimizer = optimizer
        self._grads = grads
        groups = params.layout.groups
        self.ranges = [groups[f"bucket {piece.index}"] for piece in pieces]
        self._counted = [self._counted_ranges(piece) for piece in pieces]
        self._scratch: Floats = aligned_empty(max((piece.size for piece in pieces), default=0), params.flat.dtype)
        if policy.compensation is not None:
            for name, buffer in policy.compensation.init(params).items():
                state.buffers.setdefault(name, buffer)

    def _counted_ranges(self, piece: Piece) -> list[tuple[int, int]]:
        segments = [self.params.layout.segments[segment.spec.name] for segment in piece.segments]
        counted = [(s.start, s.stop) for s in segments if self.policy.counts(s.spec.name)]
        return [(segments[0].start, segments[-1].stop)] if len(counted) == len(segments) else counted

    def weights(self, number: int) -> Floats:
        """Return the weights of one of the pieces, a view."""
        start, stop = self.ranges[number]
        return self.params.flat[start:stop]

    def clear(self) -> None:
        """Begin a sum of pushes."""
        self._grads.flat[:] = 0

    def take(self, pushes: Sequence[Incoming], factor: float, backups: Sequence[Floats] | None) -> None:
        """Add the oldest push of a worker to the sum.

        Parameters
        ----------
        pushes : list of Incoming
            One for every piece.
        factor : float
            By which it counts.
        backups : list of arrays or None
            The weights that it was computed on, of every piece, to correct it by.
        """
        for number, ((start, stop), push) in enumerate(zip(self.ranges, pushes, strict=True)):
            total = self._grads.flat[start:stop]
            if factor == 1 and backups is None:
                push.take(total, add=True)
                continue
            part = self._scratch[: stop - start]
            push.take(part)
            part *= part.dtype.type(factor)
            if backups is not None:
                self._correct(part, number, backups[number])
            add(part, total)

    def _correct(self, part: Floats, number: int, backup: Floats) -> None:
        compensation, (start, stop) = self.policy.compensation, self.ranges[number]
        if compensation is not None:
            squares = self.state.buffers.get("mean_square")
            mean_square = None if squares is None else squares.flat[start:stop]
            compensation.correct(part, self.params.flat[start:stop], backup, mean_square)

    def forget(self, pushes: Sequence[Incoming]) -> None:
        """Decode the oldest push of a worker for nothing: its memory goes on."""
        for (start, stop), push in zip(self.ranges, pushes, strict=True):
            push.take(self._scratch[: stop - start])

    def squares(self, width: int) -> npt.NDArray[np.float64]:
        """Sum up the squares of the gradient bucket by bucket, and count the buckets that are not finite.

        The sum over all servers, bucket by bucket and then over the buckets, does not depend on who owns which.

        Parameters
        ----------
        width : int
            Buckets of the whole column.

        Returns
        -------
        numbers : (width + 1,) float64
        """
        numbers = np.zeros(width + 1)
        for (start, stop), counted, piece in zip(self.ranges, self._counted, self.pieces, strict=True):
            numbers[piece.index] = sum(sum_of_squares(self._grads.flat[a:b]) for a, b in counted)
            numbers[width] += count_not_finite(self._grads.flat[start:stop]) > 0
        return numbers

    def update(self, sums: Sequence[float], lr: float) -> float | None:
        """Clip the sum and take a step; return the norm before, or None where the step was rejected.

        Parameters
        ----------
        sums : (width + 1,) floats
            `squares` of all servers.
        """
        *squares, not_finite = sums
        if not_finite:
            return None
        norm = sqrt(sum(squares))
        if self.policy.clip_norm and (factor := clip_factor(norm, self.policy.clip_norm)) < 1:
            scale(self._grads, factor)
        # A correction's own buffer is no moment of the optimizer's.
        own = {name: buffer for name, buffer in self.state.buffers.items() if name != "mean_square"}
        moments = OptimizerState(own, self.state.step)
        self._optimizer.step(self.params, self._grads, moments, lr)
        self.state.step = moments.step
        return norm
