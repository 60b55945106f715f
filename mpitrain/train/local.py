"""Local steps: replicas train alone for a while, then their weights come together (DiLoCo, Douillard 2023)."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isfinite

import numpy as np

from mpitrain.arrays import Floats
from mpitrain.codecs.memory import DoubleBuffer
from mpitrain.collectives.base import Traffic
from mpitrain.errors import DivergedError
from mpitrain.kernels.reduce import count_not_finite
from mpitrain.params import Params
from mpitrain.train.exchange import Exchange, Outcome
from mpitrain.train.outer import OUTER_BUFFERS, GlobalWeights
from mpitrain.train.weights import Weights


class LocalExchange(Exchange):
    """Take steps on this replica's own gradients; have every fragment of the weights meet once a round.

    Parameters
    ----------
    weights : Weights
        Of this replica. A gradient that is not finite costs this replica its step, and no other.
    common : GlobalWeights
        The model; built on ``weights.params``.
    steps : int
        Length of the run; the round that ends with it may be short.
    max_rejected : int
        Exchanges in a row that may be rejected before the run counts as diverged.

    Notes
    -----
    Rounds end with the multiples of h, whoever would like to meet earlier: then nothing is under way and all replicas
    have the same global weights; where there is one fragment, which replaces the local weights, also the same of these.
    """

    def __init__(self, weights: Weights, common: GlobalWeights, steps: int, *, max_rejected: int) -> None:
        super().__init__(weights)
        self._common = common
        self._steps = steps
        self._max_rejected = max_rejected
        self._in_a_row = 0
        self._first = self._step = 0
        self._opened = 0.0
        self._used = self._due = 0
        self._rejected: list[str] = []
        self._new = True
        self._numbers = np.zeros(1 + 2 * common.rounds.fragments)

    def open_round(self, step: int) -> None:
        """Begin a round that ends with the next multiple of ``h``, or with the run."""
        h = self._common.rounds.h
        self._opened = time.perf_counter()
        self._first, self.last = step, min(-(-step // h) * h, self._steps)
        if self._new:
            self._common.begin()
            self._new = False

    def total(self, everywhere: int, here: int) -> int:
        """Divide by the samples of this replica."""
        self._due, self._used = everywhere, here
        return max(here, 1)

    def begin(self, step: int) -> None:
        """Note the step."""
        self._step = step
        for sums in self._common.sums:
            sums.reducer.events = self.events

    def finished(self, names: Sequence[str]) -> None:
        """Advance what is under way."""
        self._common.poll()

    def complete(self) -> Outcome:
        """Take the step, then send and apply the fragments that are due."""
        lr = self.weights.schedule(self._step - 1)
        norm, traffic = self.waited(self.weights.start_norm(finite=True), Traffic())
        begin = time.perf_counter()
        if norm is None or not isfinite(norm):
            norm, used = None, 0
            self._rejected = self._bad_gradients()
        else:
            used = self._used
            if used:  # else the moments would decay
                self.weights.move(lr, norm)
        self._common.count(used, self._due)
        self.note("update", begin)
        turn, length = self._step - self._first + 1, self.last - self._first + 1
        self._common.allow(time.perf_counter() - self._opened)
        accepted, more = self._common.meet(self._step, turn, length)
        if not all(accepted):
            norm, self._rejected = None, self._common.not_finite()
        self._count(accepted)
        return Outcome(norm, lr, traffic + more)

    def _count(self, accepted: Sequence[bool]) -> None:
        """End a run whose changes are rejected again and again; all ranks count alike."""
        for each in accepted:
            self._in_a_row = 0 if each else self._in_a_row + 1
        if self._in_a_row > self._max_rejected:
            error = DivergedError(
                f"step {self._step}: {self._in_a_row} exchanges in a row had changes of weights that are not finite, "
                "or none at all; lower optim.lr, lengthen optim.warmup_steps, or set train.clip_norm"
            )
            error.agreed = True
            raise error

    @contextmanager
    def model(self) -> Iterator[None]:
        """Put the global weights in the place of the local ones, at the end of a round."""
        params, kept = self.weights.params.flat, self._common.changes.flat
        if self._new:
            self._common.begin()
        kept[:] = params
        params[:] = self._common.params.flat
        try:
            yield
        finally:
            params[:] = kept

    def tensors(self) -> dict[str, Params]:
        """Name the momentum of the outer steps; moments of the inner optimizer are each replica's own."""
        return {"outer": self._common.momentum}

    def local(self) -> dict[str, Floats]:
        """Name memories, inner moments and, where they are others than the global ones, weights (within ``model``)."""
        state, samples = self.weights.state, self._common.samples
        self._numbers[:] = [state.step, *(one.used for one in samples), *(one.due for one in samples)]
        kept = super().local() | {f"inner.{name}": buffer.flat for name, buffer in state.buffers.items()}
        if self._common.differ:
            kept["inner.weights"] = self._common.changes.flat
        return kept | {"inner.numbers": self._numbers}

    def facts(self) -> dict[str, object]:
        """Nothing: replicas that had to reject a step have taken fewer."""
        return {}

    def loaded(self, facts: Mapping[str, object], *, local: bool) -> None:
        """Go on with what was loaded; on another grid all replicas begin with the global weights and no moments."""
        common, state = self._common, self.weights.state
        self._new = False
        common.begin()
        if not local:
            for buffer in state.buffers.values():
                buffer.flat[:] = 0
            return
        if common.differ:
            self.weights.params.flat[:] = common.changes.flat
        state.step = int(self._numbers[0])
        for samples, used, due in zip(common.samples, *np.split(self._numbers[1:], 2), strict=True):
            samples.used, samples.due = float(used), float(due)

    def sizes(self) -> list[int]:
        """List the elements of each bucket, fragment by fragment."""
        return [size for sums in self._common.sums for size in sums.sizes()]

    def tensors_by_codec(self) -> dict[str, list[str]]:
        """Name the tensors that each codec serves."""
        return self._common.sums[0].tensors_by_codec()

    def state(self) -> dict[str, DoubleBuffer]:
        """Name the memories of the sums."""
        return self._common.state()

    def array_bytes(self) -> dict[str, int]:
        """Account for optimizer and memories, and for global weights, their momentum and changes."""
        return super().array_bytes() | {"outer_bytes": OUTER_BUFFERS * self.weights.params.flat.nbytes}

    def _bad_gradients(self) -> list[str]:
        grads = self.weights.grads
        return [s.spec.name for s in grads.layout.segments.values() if count_not_finite(grads.flat[s.start : s.stop])]

    def not_finite(self) -> list[str]:
        """Name the tensors whose gradients, or changes, were not finite here."""
        return self._rejected
