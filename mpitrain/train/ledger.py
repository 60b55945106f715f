"""What servers have done with the pushes of every worker, for metrics, summary and checkpoint."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from mpitrain.server.record import Record, Taken, Update

Numbers = dict[str, float | None]


@dataclass
class Account:
    """Of one worker: its pushes, what became of them, and how stale they were (updates in between, how often)."""

    pushed: int = 0
    applied: int = 0
    dropped: int = 0
    rejected: int = 0
    staleness: Counter[int] = field(default_factory=Counter)

    def add(self, taken: Taken, *, dropped: bool = False) -> None:
        """Count a push: applied, dropped for being late, or rejected for not being finite or being too stale."""
        self.pushed += 1
        self.dropped += dropped
        self.applied += taken.counted
        self.rejected += not (dropped or taken.counted)
        if taken.counted:
            self.staleness[taken.staleness] += 1

    def document(self) -> dict[str, object]:
        """Write it so that JSON can carry it."""
        histogram = {str(stale): number for stale, number in sorted(self.staleness.items())}
        return {
            "pushed": self.pushed,
            "applied": self.applied,
            "dropped": self.dropped,
            "rejected": self.rejected,
            "staleness": histogram,
        }

    @classmethod
    def read(cls, document: Mapping[str, object]) -> "Account":
        """Read what `document` wrote."""
        histogram = cast(Mapping[str, int], document["staleness"])
        counts = {name: cast(int, document[name]) for name in ("pushed", "applied", "dropped", "rejected")}
        return cls(**counts, staleness=Counter({int(stale): number for stale, number in histogram.items()}))


def summary_of(accounts: Sequence[Account]) -> dict[str, object]:
    """Sum up how stale applied gradients were."""
    every = sum((account.staleness for account in accounts), Counter[int]())
    return {
        "mean": every.total() and sum(stale * number for stale, number in every.items()) / every.total(),
        "max": max(every, default=0),
    }


@dataclass
class _Step:
    """What became of the pushes of one clock."""

    rates: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)

    def numbers(self) -> Numbers:
        return {
            "lr": _mean(self.rates),
            "grad_norm": _mean(self.norms),
            "staleness": _mean(self.staleness),
            "staleness_max": max(self.staleness, default=None),
        }


class Ledger:
    """The accounts of all workers, and the steps since somebody last looked.

    Parameters
    ----------
    workers : int
        Rows of the grid that train.
    """

    def __init__(self, workers: int) -> None:
        self.accounts = [Account() for _ in range(workers)]
        self._steps: dict[int, _Step] = {}

    def add(self, record: Record) -> None:
        """Count what a server has done."""
        for update in record.updates:
            self._add(update)
        for taken in record.dropped:
            self.accounts[taken.worker].add(taken, dropped=True)

    def _add(self, update: Update) -> None:
        for taken in update.taken:
            self.accounts[taken.worker].add(taken)
            if taken.counted:
                self._step(taken.clock).staleness.append(taken.staleness)
        newest = self._step(max(taken.clock for taken in update.taken))
        if any(taken.counted for taken in update.taken):
            newest.rates.append(update.lr)
        if update.norm is not None:
            newest.norms.append(update.norm)

    def _step(self, clock: int) -> _Step:
        return self._steps.setdefault(clock, _Step())

    def take(self, first: int, last: int) -> list[Numbers]:
        """Return the numbers of some steps, and forget all."""
        numbers = [self._steps.get(step, _Step()).numbers() for step in range(first, last + 1)]
        self._steps = {}
        return numbers


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
