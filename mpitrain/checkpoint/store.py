"""Saving and loading by all ranks together.

A step exists once its commit record does, and the record is written after every rank has read its shard back. So a
kill at any moment leaves the previous step as it was. An older step goes only after a newer one exists.
"""

import errno
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import msgspec

from mpitrain.arrays import Floats
from mpitrain.checkpoint import files
from mpitrain.checkpoint.claims import Claim, assign_pieces, claims_of
from mpitrain.checkpoint.loading import Loader
from mpitrain.checkpoint.record import COMMIT, Commit, write_commit
from mpitrain.checkpoint.snapshot import Meta, Snapshot
from mpitrain.checkpoint.steps import aside_folder, asides, committed_steps, marked_steps, step_folder, step_folders
from mpitrain.checkpoint.tensor_record import TensorRecord
from mpitrain.checkpoint.verdict import refuse
from mpitrain.comm.agreement import agree, gather
from mpitrain.comm.fault import FaultHook, kill_self
from mpitrain.comm.grid import Axis
from mpitrain.errors import CheckpointError
from mpitrain.partition import ShardSpec


def _tell(text: str) -> None:
    print(f"mpitrain: {text}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class CheckpointStore:
    """The checkpoints of one run.

    Attributes
    ----------
    root : Path
        Folder of the steps; on hosts without a common disk each has its own.
    axis : Axis
        All ranks that save together.
    keep : int
        Newest steps that stay.
    faults : FaultHook
        For tests.
    timeout_s : float
        Patience with the disk of the slowest rank.
    """

    root: Path
    axis: Axis
    keep: int
    faults: FaultHook
    timeout_s: float = 600.0

    def save(self, snapshot: Snapshot) -> None:
        """Write a step. Collective over the axis.

        A complete step of this number or a later one, left there by a run that went on from an older step, is set
        aside first: it is never overwritten.

        Raises
        ------
        CheckpointError
            On all ranks, if any could not write or read back; the older steps are still there.
        """
        self.set_aside_after(snapshot.step - 1)
        folder = step_folder(self.root, snapshot.step)
        tensors = self._assign(snapshot)
        mine = self._mine(tensors, snapshot)
        digest = agree(self.axis, lambda: self._write(folder, mine, snapshot), timeout_s=self.timeout_s)
        digests = gather(self.axis, digest, timeout_s=self.timeout_s)
        agree(self.axis, lambda: self._commit(folder, snapshot, tensors, digests), timeout_s=self.timeout_s)
        replaced = cast(list[str], gather(self.axis, self._replaced(snapshot.step), timeout_s=self.timeout_s)[0])
        if replaced:
            # The records first, so that a kill leaves no step that counts and lacks shards.
            agree(self.axis, lambda: self._uncommit(replaced), timeout_s=self.timeout_s)
            agree(self.axis, lambda: self._remove(replaced), timeout_s=self.timeout_s)

    def _assign(self, snapshot: Snapshot) -> dict[str, TensorRecord]:
        """Choose on all ranks alike who writes what."""
        mine = msgspec.to_builtins(claims_of("tensors", snapshot.tensors, snapshot.shards))
        claims = msgspec.convert(gather(self.axis, mine, timeout_s=self.timeout_s), list[list[Claim]])
        try:
            tensors = assign_pieces(claims)
            files.check_names(tensors)
        except CheckpointError as error:
            refuse(str(error))
        return tensors

    def _mine(self, tensors: dict[str, TensorRecord], snapshot: Snapshot) -> dict[str, Floats]:
        """Select what this rank writes: of a tensor the whole part that it holds, or nothing."""
        rank = self.axis.rank
        ranks = {name: {piece.rank for piece in tensor.pieces} for name, tensor in tensors.items()}
        return {name: values for name, values in snapshot.tensors.items() if rank in ranks[name]}

    def _write(self, folder: Path, mine: dict[str, Floats], snapshot: Snapshot) -> str:
        files.check_names(snapshot.local)
        path = folder / files.shard_name(self.axis.rank)
        self.faults.slow_save(snapshot.step)
        files.write_shard(path, mine, snapshot.local, snapshot.shards)
        if self.faults.find("kill_save", snapshot.step):
            kill_self()
        if self.faults.find("corrupt_save", snapshot.step):
            files.flip_data_byte(path)
        files.verify_shard(path, mine, snapshot.local)
        return files.checksum(path)

    def _commit(
        self, folder: Path, snapshot: Snapshot, tensors: dict[str, TensorRecord], digests: list[object]
    ) -> None:
        if self.axis.rank:
            return
        files.write_index(folder / files.INDEX, tensors, snapshot.meta)
        record = Commit(
            step=snapshot.step,
            ranks=self.axis.size,
            layout=snapshot.layout,
            shards={files.shard_name(rank): cast(str, digest) for rank, digest in enumerate(digests)},
            index=files.checksum(folder / files.INDEX),
            tensors=tensors,
            fixed=snapshot.fixed,
        )
        write_commit(folder, record)

    def _replaced(self, newest: int) -> list[str]:
        """List the folders that ``newest`` replaces: steps beyond ``keep``, and what an earlier kill left half-written.

        The list of rank 0 counts: on private disks the others see no commit records.
        """
        stay = list(committed_steps(self.root))[-self.keep :]
        return [folder.name for step, folder in step_folders(self.root).items() if step <= newest and step not in stay]

    def _uncommit(self, names: list[str]) -> None:
        for name in names if self.axis.rank == 0 else []:
            _unlink(self.root / name / COMMIT)

    def _remove(self, names: list[str]) -> None:
        """Remove folders of steps: every rank all shards that it finds, since more ranks may have written."""
        for name in names:
            _remove(self.root / name, self.axis.rank)

    def set_aside_after(self, step: int) -> list[str]:
        """Move the complete steps after ``step`` into a folder ``aside-N``, on every disk. Collective over the axis.

        For a run that goes on from an older step: what it leaves behind is neither deleted nor overwritten.

        Returns
        -------
        list of str
            Where they are now, below ``root``: ``aside-1/step-00000200``.

        Raises
        ------
        CheckpointError
            On all ranks, if a folder cannot be moved.
        """
        mine = [path.name for number, path in marked_steps(self.root).items() if number > step]
        found = gather(self.axis, [mine, max(asides(self.root), default=0)], timeout_s=self.timeout_s)
        views = cast(list[tuple[list[str], int]], found)
        names, number = views[0][0], 1 + max(last for _, last in views)
        if names:
            target = aside_folder(self.root, number)
            agree(self.axis, lambda: self._move(names, target), timeout_s=self.timeout_s)
        return [f"{aside_folder(self.root, number).name}/{name}" for name in names]

    def _move(self, names: list[str], target: Path) -> None:
        """Move folders of steps; of the ranks that share a disk the first one does it."""
        for name in names:
            try:
                if (self.root / name).exists():
                    target.mkdir(exist_ok=True)
                    os.rename(self.root / name, target / name)
            except FileNotFoundError:
                pass
            except OSError as error:
                raise CheckpointError(
                    f"checkpoint: cannot move {self.root / name} to {target}: {error.strerror}"
                ) from None

    def newest(self) -> int | None:
        """Return the newest step that was completed, None where there is none. Collective over the axis.

        Its files may have been damaged since; ``load`` finds out.

        Raises
        ------
        CheckpointError
            On all ranks, if one of them knows a step that rank 0 does not: private disks in another order.
        """
        return max(self._loader.steps(), default=None)

    def load(
        self,
        snapshot: Snapshot,
        *,
        step: int | None = None,
        fallback: bool = False,
        warn: Callable[[str], None] = _tell,
    ) -> Meta:
        """Fill the arrays of ``snapshot`` from one step, the same on all ranks. Collective over the axis.

        Any number of ranks in any layout may have saved it. A shard must lie on the disk of some rank.

        Parameters
        ----------
        snapshot : Snapshot
            Its ``fixed`` settings must be those of the step. Its arrays are written to, its ``step`` and ``meta`` set;
            after an error the arrays hold anything. ``local`` comes back where as many ranks in the same ``layout``
            saved it, and is left as it is elsewhere.
        step : int, optional
            This step and no other; the newest where left out.
        fallback : bool
            Where the newest step is damaged on any rank, take the newest one that is sound on all; not with ``step``.
        warn : callable
            Told on rank 0, once for every file that made a step unusable, and where ``local`` does not come back.

        Returns
        -------
        dict
            The small facts that were saved with it.

        Raises
        ------
        CheckpointError
            On all ranks: nothing to load, no such step, damaged files with no sound step to fall back to; other
            settings, or another model, for which there is no fallback.
        """
        return self._loader.load(snapshot, step=step, fallback=fallback, warn=warn)

    def load_tensors(
        self,
        tensors: Mapping[str, Floats],
        *,
        shards: Mapping[str, ShardSpec] = files.WHOLE,
        step: int | None = None,
        all_of: str | None = None,
    ) -> Meta:
        """Fill tensors by name from a step of any number of ranks in any layout. Collective over the axis.

        Shards that hold nothing of them are not read.

        Parameters
        ----------
        tensors : dict
            Names as in `Snapshot.tensors`, some of them, which may differ by rank; written to.
        shards : dict
            As in `Snapshot.shards`.
        step : int, optional
            This step and no other; the newest where left out.
        all_of : str, optional
            The ranks together must ask for every tensor whose name begins like this, or it is another model.

        Returns
        -------
        dict
            The small facts that were saved with it, and its ``step`` and ``ranks``.

        Raises
        ------
        CheckpointError
            On all ranks: no such step, a damaged or absent shard, or another model.
        """
        return self._loader.load_tensors(tensors, shards, step=step, all_of=all_of)

    @property
    def _loader(self) -> Loader:
        return Loader(self.root, self.axis, self.timeout_s)


def _remove(folder: Path, rank: int) -> None:
    try:
        paths = files.shard_paths(folder)
        if rank == 0:
            names = (COMMIT, files.INDEX)
            paths += [path for name in names for path in (folder / name, files.temporary_of(folder / name))]
        for path in paths:
            _unlink(path)
        if not any(folder.iterdir()):
            folder.rmdir()
    except FileNotFoundError:
        pass  # another rank was faster
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:  # another rank is about to remove the rest
            raise CheckpointError(f"checkpoint: cannot remove {folder}: {error.strerror}") from None


def _unlink(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise CheckpointError(f"checkpoint: cannot remove {path}: {error.strerror}") from None
