"""Loading by all ranks together: one choice of the step, one verdict on its files.

Rank 0 alone reads the commit record, since on private disks it alone has one, and tells it to everyone. Every file is
held against the checksum in that one record, so no rank can come back with another step than its peers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import msgspec

from mpitrain.arrays import Floats
from mpitrain.checkpoint import files
from mpitrain.checkpoint.reading import StepReader, Wanted
from mpitrain.checkpoint.record import COMMIT, Commit, read_commit
from mpitrain.checkpoint.snapshot import Meta, Snapshot
from mpitrain.checkpoint.steps import marked_steps, step_folder
from mpitrain.checkpoint.verdict import judge, refuse
from mpitrain.comm.agreement import agree, gather
from mpitrain.comm.grid import Axis
from mpitrain.errors import CheckpointError, DamageError, count
from mpitrain.partition import ShardSpec

SHOWN_STEPS = 8


@dataclass(frozen=True)
class Loader:
    """Reads the checkpoints of one run; all methods are collective over the axis.

    Attributes
    ----------
    root : Path
        Folder of the steps; on hosts without a common disk each has its own.
    axis : Axis
        All ranks that load together.
    timeout_s : float
        Patience with the disk of the slowest rank.
    """

    root: Path
    axis: Axis
    timeout_s: float

    def steps(self) -> list[int]:
        """List the steps that were completed, the oldest first.

        Raises
        ------
        CheckpointError
            Some rank has one that rank 0 has not: on private disks the ranks have changed places.
        """
        seen = cast(list[list[int]], gather(self.axis, list(marked_steps(self.root)), timeout_s=self.timeout_s))
        for rank, others in enumerate(seen):
            if more := sorted(set(others) - set(seen[0])):
                refuse(
                    f"checkpoint: rank {rank} finds step {more[-1]} in {self.root}, but rank 0 does not; start the "
                    "ranks on the hosts that wrote it, in the same order"
                )
        return seen[0]

    def load(self, snapshot: Snapshot, *, step: int | None, fallback: bool, warn: Callable[[str], None]) -> Meta:
        """Fill ``snapshot``; see `CheckpointStore.load`."""
        if fallback and step is not None:
            raise ValueError("an explicit step has no fallback")
        steps = self._choices(step)
        for candidate in reversed(steps) if fallback else [self._pick(steps, step)]:
            meta, damage = self._attempt(candidate, snapshot, warn)
            if meta is not None:
                return meta
            if not fallback:
                refuse(f"{_first(damage)}; {_remedy(steps, candidate)}")
            if self.axis.rank == 0:
                for text in damage:
                    warn(f"{text}; step {candidate} is left out")
        refuse(
            f"checkpoint: none of the steps in {self.root} is sound ({_listed(steps)}); mend the files that were "
            "named, or start again with --overwrite"
        )

    def load_tensors(
        self, tensors: Mapping[str, Floats], shards: Mapping[str, ShardSpec], *, step: int | None, all_of: str | None
    ) -> Meta:
        """Fill tensors by name; see `CheckpointStore.load_tensors`."""
        steps = self._choices(step)
        chosen = self._pick(steps, step)
        record, meta, damage = self._open(chosen)
        if record is not None:
            damage = self._reader(record).read(Wanted(tensors, None, shards), all_of=all_of)
        if record is None or damage:
            refuse(f"{_first(damage)}; {_other_steps(steps, chosen)}")
        return {**meta, "step": record.step, "ranks": record.ranks}

    def _choices(self, step: int | None) -> list[int]:
        """List the steps; refuse where there is none, or not the one that was asked for."""
        steps = self.steps()
        if not steps:
            refuse(f"checkpoint: no complete step in {self.root}; train without --resume first, or name another folder")
        if step is not None and step not in steps:
            refuse(f"checkpoint: no complete step {step} in {self.root}; there are {_listed(steps)}")
        return steps

    @staticmethod
    def _pick(steps: list[int], step: int | None) -> int:
        return steps[-1] if step is None else step

    def _attempt(self, step: int, snapshot: Snapshot, warn: Callable[[str], None]) -> tuple[Meta | None, list[str]]:
        """Load a step, or say what of it is damaged."""
        record, meta, damage = self._open(step)
        if record is None:
            return None, damage
        folder = step_folder(self.root, step)
        agree(self.axis, lambda: _check_fixed(folder, record.fixed, snapshot.fixed), timeout_s=self.timeout_s)
        same = (record.ranks, record.layout) == (self.axis.size, snapshot.layout)
        wanted = Wanted(snapshot.tensors, snapshot.local if same else None, snapshot.shards)
        if damage := self._reader(record).read(wanted, all_of=""):
            return None, damage
        snapshot.step, snapshot.meta, snapshot.complete = record.step, meta, same
        if not same and any(gather(self.axis, len(snapshot.local), timeout_s=self.timeout_s)) and self.axis.rank == 0:
            now, then = _grid(self.axis.size, snapshot.layout), _grid(record.ranks, record.layout)
            warn(f"resumed on another grid ({now} instead of {then}): codec memories start anew")
        return meta, []

    def _reader(self, record: Commit) -> StepReader:
        return StepReader(self.axis, step_folder(self.root, record.step), record, self.timeout_s)

    def _open(self, step: int) -> tuple[Commit | None, Meta, list[str]]:
        """Tell everyone the commit record and the small facts that rank 0 reads, or what is damaged."""
        read = [] if self.axis.rank else [partial(_read_facts, step_folder(self.root, step), step)]
        opened, damage = judge(self.axis, read, timeout_s=self.timeout_s)
        if damage:
            return None, {}, damage
        facts = gather(self.axis, opened, timeout_s=self.timeout_s)[0]
        ((record, meta),) = cast(list[tuple[object, Meta]], facts)
        return msgspec.convert(record, Commit), meta, []


def _grid(ranks: int, layout: str) -> str:
    return layout or count(ranks, "rank")


def _first(damage: list[str]) -> str:
    return damage[0] + (f" (and {count(len(damage) - 1, 'other file')} of the step)" if len(damage) > 1 else "")


def _other_steps(steps: list[int], damaged: int) -> str:
    others = [step for step in steps if step != damaged]
    return f"score one of {_listed(others)} with --step" if others else "there is no other step"


def _remedy(steps: list[int], damaged: int) -> str:
    others = [step for step in steps if step != damaged]
    if not others:
        return "there is no other step; start again with --overwrite"
    return f"go on from the newest sound step with --resume auto, or from one of {_listed(others)} with --resume STEP"


def _listed(steps: list[int]) -> str:
    """Write a list of steps, the last ones of a long one."""
    shown = ", ".join(str(step) for step in steps[-SHOWN_STEPS:])
    return shown if len(steps) <= SHOWN_STEPS else f"… {shown}"


def _read_facts(folder: Path, step: int) -> tuple[object, Meta]:
    record = read_commit(folder)
    if record.step != step:
        raise DamageError(f"checkpoint: {folder / COMMIT} is damaged (it is of step {record.step})")
    files.check_digest(folder / files.INDEX, record.index)
    return msgspec.to_builtins(record), files.read_meta(folder / files.INDEX)


def _check_fixed(folder: Path, saved: list[str], now: list[str]) -> None:
    was, here = _by_key(saved), _by_key(now)
    differ = [key for key in {**here, **was} if was.get(key) != here.get(key)]
    if differ:
        key = differ[0]
        raise CheckpointError(
            f"checkpoint: {folder} was written with {was.get(key, f'no {key}')}, but now it is "
            f"{here.get(key, 'left out')}; resume with the configuration that wrote it"
        )


def _by_key(settings: list[str]) -> dict[str, str]:
    return {setting.partition(" = ")[0]: setting for setting in settings}
