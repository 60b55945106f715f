"""The Exchange: when gradients leave this rank, and what becomes of the weights.

The loop knows only this. It reports gradients as they become final; the exchange answers with the outcome of the step.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from mpitrain.arrays import Floats
from mpitrain.codecs.memory import DoubleBuffer
from mpitrain.collectives.base import Event, Traffic
from mpitrain.comm.agreement import NumberGather
from mpitrain.params import Params
from mpitrain.train.buckets import BucketSums
from mpitrain.train.lowrank import LowRankSums
from mpitrain.train.runfolder import Row
from mpitrain.train.signal import Signal
from mpitrain.train.weights import Weights


@dataclass(frozen=True)
class Outcome:
    """What became of a step.

    Attributes
    ----------
    norm : float or None
        Of the gradient before clipping; None where the step was rejected, since something in it was not finite.
    lr : float
        Learning rate of the update.
    traffic : Traffic
        What the exchange has cost this rank, waiting for other ranks included.
    """

    norm: float | None
    lr: float
    traffic: Traffic


class Exchange(ABC):
    """When gradients leave, and what the weights become.

    A *round* goes from one point at which all ranks meet to the next: ``open_round``, then for every step ``begin``,
    ``finished`` as backward goes on, and ``complete``, until the step is ``last``.

    Parameters
    ----------
    weights : Weights
        What this rank trains.

    Attributes
    ----------
    overlap : bool
        Whether gradients may be reported before all are final.
    unanimous : bool
        Whether all ranks of the world reject a step if one does.
    replicates : bool
        Whether between two steps all replicas hold the same weights, and the same state of the optimizer.
    last : int
        Step with which the round ends; it may become a lower one during the round, never below the step at hand.
    loses : callable
        Set by the loop: whether the answer to a step is lost, on purpose.
    wants_meeting : bool
        Set by the loop: this rank wishes that all meet soon. Exchanges with long rounds may end one early for it.
    ends_early : bool
        Whether a wish to meet can shorten a round.
    dead : int
        1 + the number of a worker that has died in the round, which the others have ended; 0 while all live.
    events : list of Event or None
        Where to note what was done when; None to note nothing.
    """

    overlap = True
    unanimous = False
    replicates = False
    ends_early = False

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.last = 0
        self.wants_meeting = False
        self.dead = 0
        self.loses: Callable[[int], bool] = lambda step: False
        self.events: list[Event] | None = None

    def open_round(self, step: int) -> None:
        """Begin a round with a step (1, 2, …). Collective over the world."""
        self.last = step

    def total(self, everywhere: int, here: int) -> int:
        """Choose by what the loss of a step is divided: the samples of all replicas, or those of this one."""
        return everywhere

    @abstractmethod
    def begin(self, step: int) -> None:
        """Expect the gradients of a step."""

    @abstractmethod
    def finished(self, names: Sequence[str]) -> None:
        """Take note that the gradients of these tensors are final."""

    @abstractmethod
    def complete(self) -> Outcome:
        """Do what is left of the step: the weights are then those of the next one.

        Raises
        ------
        PeerLostError, ProtocolError, CodecError
        """

    @contextmanager
    def model(self) -> Iterator[None]:
        """Have ``weights.params`` be the model, the same on all ranks, for as long as nothing is trained."""
        yield

    @abstractmethod
    def not_finite(self) -> list[str]:
        """Name the tensors whose gradients on this rank are not finite, after a rejected step."""

    @abstractmethod
    def state(self) -> dict[str, DoubleBuffer]:
        """Name every memory of this rank."""

    def references(self) -> list[DoubleBuffer]:
        """List what else this rank remembers, but no checkpoint needs."""
        return []

    def tensors(self) -> dict[str, Params]:
        """Name what a checkpoint keeps beside the parameters, the same for all that hold a tensor."""
        return {f"optimizer/{name}": buffer for name, buffer in self.weights.state.buffers.items()}

    def local(self) -> dict[str, Floats]:
        """Name what a checkpoint keeps of this rank alone: the current halves of the memories."""
        return {name: state.current for name, state in self.state().items()}

    def facts(self) -> dict[str, object]:
        """Collect the small facts that a checkpoint keeps, the same on all ranks. Only where a round has ended."""
        return {"optimizer_step": self.weights.state.step}

    def loaded(self, facts: Mapping[str, object], *, local: bool) -> None:
        """Go on from what was loaded into the buffers; ``local``: whether those of this rank were among them."""
        self.weights.state.step = int(str(facts["optimizer_step"]))

    def report(self, rows: list[Row]) -> None:
        """Complete the rows of a round by what other ranks know of it. Collective over the world."""
        return

    def summary(self) -> dict[str, object]:
        """Collect what summary.json says of the exchange alone. Collective over the world."""
        return {}

    @abstractmethod
    def sizes(self) -> list[int]:
        """List the elements of each bucket."""

    @abstractmethod
    def tensors_by_codec(self) -> dict[str, list[str]]:
        """Name the tensors that each codec serves."""

    def array_bytes(self) -> dict[str, int]:
        """Account for the arrays that the exchange and the optimizer keep, in bytes."""
        states = [*self.state().values(), *self.references()]
        memories = [half for state in states for half in (state.current, state.next)]
        return {
            "optimizer_bytes": sum(buffer.flat.nbytes for buffer in self.weights.state.buffers.values()),
            "memories_bytes": sum(half.nbytes for half in memories),
        }

    def waited(self, numbers: NumberGather, traffic: Traffic) -> tuple[float | None, Traffic]:
        """Wait for the norm, and note how long: who is done early waits here for the others of its replica."""
        begin = time.perf_counter()
        norm = self.weights.norm_of(numbers)
        self.note("wait", begin)
        return norm, replace(traffic, wait_s=traffic.wait_s + time.perf_counter() - begin)

    def note(self, what: str, begin: float) -> None:
        """Note an event that ends now."""
        if self.events is not None:
            self.events.append((what, begin, time.perf_counter()))


class SyncExchange(Exchange):
    """Sum every gradient over the data axis at every step.

    Parameters
    ----------
    weights : Weights
        Their gradients are replaced by the sums.
    sums : BucketSums or LowRankSums
        Of these gradients.
    signal : Signal
        What travels in their place.
    overlap : bool
        Whether buckets leave as soon as they are full.
    """

    unanimous = True
    replicates = True

    def __init__(self, weights: Weights, sums: BucketSums | LowRankSums, signal: Signal, *, overlap: bool) -> None:
        super().__init__(weights)
        self.overlap = overlap
        self._sums = sums
        self._signal = signal
        self._step = 0

    def begin(self, step: int) -> None:
        """Expect the gradients of a step."""
        self._step = step
        self._signal.begin(step)
        self._sums.reducer.events = self.events
        self._sums.begin(step)

    def finished(self, names: Sequence[str]) -> None:
        """Start the buckets that are full now."""
        self._signal.replace(names)
        self._sums.finished(names)

    def complete(self) -> Outcome:
        """Wait for the sums; move the weights, or reject the step on all ranks."""
        summed = self._sums.finish()
        self._signal.restore()
        lr = self.weights.schedule(self._step - 1)
        # The ranks of a data axis know the same flags already: with those of the replica, all ranks of the world agree.
        norm, traffic = self.waited(self.weights.start_norm(finite=summed.finite), summed.traffic)
        begin = time.perf_counter()
        if norm is None:
            self._sums.rollback()
            self._signal.rollback()
        else:
            self._sums.commit()
            self._signal.commit()
            self.weights.move(lr, norm)
        self.note("update", begin)
        return Outcome(norm, lr, traffic)

    def not_finite(self) -> list[str]:
        """Name the tensors whose gradients are not finite here."""
        return self._sums.not_finite()

    def state(self) -> dict[str, DoubleBuffer]:
        """Name the memories of the sums, and of what travels."""
        return self._sums.state() | self._signal.state()

    def loaded(self, facts: Mapping[str, object], *, local: bool) -> None:
        """Go on from what was loaded; what travels begins anew where this rank's past was not saved."""
        super().loaded(facts, local=local)
        if not local:
            self._signal.renew()

    def references(self) -> list[DoubleBuffer]:
        """List what the sums remember beside their memories."""
        return self._sums.references()

    def sizes(self) -> list[int]:
        """List the elements of each bucket."""
        return self._sums.sizes()

    def tensors_by_codec(self) -> dict[str, list[str]]:
        """Name the tensors that each codec serves."""
        return self._sums.tensors_by_codec()
