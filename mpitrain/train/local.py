"""Local steps: replicas train alone for a while, then their weights come together (DiLoCo, Douillard 2023)."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isfinite

import numpy as np

from mpitrain.arrays import Floats
from mpitrain.codecs.memory import DoubleBuffer
from mpitrain.collectives.base import Traffic
from mpitrain.kernels.reduce import count_not_finite
from mpitrain.params import Params
from mpitrain.train.exchange import Exchange, Outcome
from mpitrain.train.fragments import Rounds
from mpitrain.train.outer import GlobalWeights
from mpitrain.train.weights import Weights


class LocalExchange(Exchange):
    """Take steps on this replica's own gradients; have every fragment of the weights meet once a round.

    Parameters
    ----------
    weights : Weights
        Of this replica. A gradient that is not finite costs this replica its step, and no other.
    common : GlobalWeights
        The model; built on ``weights.params``.
    rounds : Rounds
        When fragments are sent and applied.
    steps : int
        Length of the run; the round that ends with it may be short.

    Notes
    -----
    Rounds end with the multiples of ``rounds.h``: then nothing is under way, all replicas have the same global weights,
    and, where there is one fragment that replaces the local weights, these too.
    """

    def __init__(self, weights: Weights, common: GlobalWeights, rounds: Rounds, *, steps: int) -> None:
        super().__init__(weights)
        self._common = common
        self._rounds = rounds
        self._steps = steps
        self._first = self._step = 0
        self._used = self._due = 0
        self._rejected: list[str] = []
        self._new = True
        self._numbers = np.zeros(1 + 2 * rounds.fragments)

    def open_round(self, step: int) -> None:
        """Begin a round that ends with the next multiple of ``h``, or with the run."""
        h = self._rounds.h
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
        met, more = self._meet()
        return Outcome(norm if met else None, lr, traffic + more)

    def _meet(self) -> tuple[bool, Traffic]:
        """Send and apply what is due after this step; return whether all was accepted."""
        turn, length = self._step - self._first + 1, self.last - self._first + 1
        for fragment in self._rounds.sends(turn, length):
            self._common.send(fragment, self._step)
        accepted, traffic = True, Traffic()
        for fragment in self._rounds.applies(turn, length):
            taken, more = self._common.apply(fragment)
            traffic += more
            if not taken:
                accepted = False
                self._rejected = self._common.not_finite()
        return accepted, traffic

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
        """Account for the optimizer and the memories, and for the global weights, their momentum and their changes."""
        common = self._common
        buffers = (common.params, common.momentum, common.changes)
        return super().array_bytes() | {"outer_bytes": sum(buffer.flat.nbytes for buffer in buffers)}

    def _bad_gradients(self) -> list[str]:
        grads = self.weights.grads
        return [s.spec.name for s in grads.layout.segments.values() if count_not_finite(grads.flat[s.start : s.stop])]

    def not_finite(self) -> list[str]:
        """Name the tensors whose gradients, or changes, were not finite here."""
        return self._rejected
