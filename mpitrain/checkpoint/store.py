"""Saving and loading by all ranks together.

A step exists once its commit record does, and the record is written after every rank has read its shard back. So a
kill at any moment leaves the previous step as it was. An older step goes only after a newer one exists.
"""

import errno
import re
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from mpitrain.arrays import Floats
from mpitrain.checkpoint import files
from mpitrain.checkpoint.snapshot import Meta, Snapshot, assign_owners
from mpitrain.comm.agreement import agree, broadcast, gather
from mpitrain.comm.fault import FaultHook, kill_self
from mpitrain.comm.frame import MAX_MESSAGE_BYTES
from mpitrain.comm.grid import Axis
from mpitrain.errors import CheckpointError

_STEP_NAME = re.compile(r"step-(\d+)")


def step_folder(root: Path, step: int) -> Path:
    """Name the folder of a step."""
    return root / f"step-{step:08d}"


def step_folders(root: Path) -> dict[int, Path]:
    """List the folders of steps by number, complete or not; other names do not count."""
    found = [(_STEP_NAME.fullmatch(path.name), path) for path in root.glob("step-*")] if root.is_dir() else []
    return dict(sorted((int(match[1]), path) for match, path in found if match))


def committed_steps(root: Path) -> dict[int, Path]:
    """List the steps that exist, the oldest first, with their folders."""
    return {step: path for step, path in step_folders(root).items() if files.read_commit(path)}


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

        Raises
        ------
        CheckpointError
            On all ranks, if any could not write or read back; the older steps are still there.
        """
        folder = step_folder(self.root, snapshot.step)
        owners = assign_owners(snapshot.tensors, self.axis.size)
        mine = {name: values for name, values in snapshot.tensors.items() if owners[name] == self.axis.rank}
        digest = agree(self.axis, lambda: self._write(folder, mine, snapshot), timeout_s=self.timeout_s)
        digests = gather(self.axis, digest, timeout_s=self.timeout_s)
        agree(self.axis, lambda: self._commit(folder, snapshot, owners, digests), timeout_s=self.timeout_s)
        replaced = gather(self.axis, self._replaced(snapshot.step), timeout_s=self.timeout_s)[0]
        agree(self.axis, lambda: self._remove(cast(list[str], replaced)), timeout_s=self.timeout_s)

    def _write(self, folder: Path, mine: dict[str, Floats], snapshot: Snapshot) -> str:
        path = folder / files.shard_name(self.axis.rank)
        self.faults.slow_save(snapshot.step)
        files.write_shard(path, mine, snapshot.local)
        if self.faults.find("kill_save", snapshot.step):
            kill_self()
        if self.faults.find("corrupt_save", snapshot.step):
            _flip_last_byte(path)
        files.verify_shard(path, mine, snapshot.local)
        return files.checksum(path)

    def _commit(self, folder: Path, snapshot: Snapshot, owners: dict[str, int], digests: list[object]) -> None:
        if self.axis.rank:
            return
        files.write_index(folder / files.INDEX, snapshot.tensors, owners, snapshot.meta)
        record: Meta = {
            "step": snapshot.step,
            "ranks": self.axis.size,
            "shards": {files.shard_name(rank): digest for rank, digest in enumerate(digests)},
            "index": files.checksum(folder / files.INDEX),
            "owners": owners,
            "fixed": snapshot.fixed,
        }
        files.write_commit(folder, record)

    def _replaced(self, newest: int) -> list[str]:
        """List the folders that ``newest`` replaces: steps beyond ``keep``, and what an earlier kill left half-written.

        The list of rank 0 counts: on private disks the others see no commit records.
        """
        stay = list(committed_steps(self.root))[-self.keep :]
        return [folder.name for step, folder in step_folders(self.root).items() if step <= newest and step not in stay]

    def _remove(self, names: list[str]) -> None:
        """Remove folders of steps: every rank its own shard, so that it works on private disks too."""
        for name in names:
            _remove(self.root / name, self.axis.rank)

    def load(self, snapshot: Snapshot) -> Meta:
        """Fill the arrays of ``snapshot`` from the newest step, and set its ``step``. Collective over the axis.

        Returns
        -------
        dict
            The small facts that were saved with it.

        Raises
        ------
        CheckpointError
            On all ranks: nothing to resume from, another number of ranks, a damaged shard, or another model.
        """
        name, record, meta = self._choose()
        folder = self.root / name
        owners = cast(dict[str, int], record["owners"])
        agree(self.axis, lambda: self._read(folder, record, owners, snapshot), timeout_s=self.timeout_s)
        for name, owner in sorted(owners.items()):
            broadcast(
                self.axis,
                snapshot.tensors[name],
                root=owner,
                timeout_s=self.timeout_s,
                piece_bytes=MAX_MESSAGE_BYTES,
            )
        snapshot.step = cast(int, record["step"])
        snapshot.meta = meta
        return meta

    def _choose(self) -> tuple[str, Meta, Meta]:
        """Let rank 0 pick the newest step, and tell everyone its folder, commit record and small facts."""

        def pick() -> tuple[str, Meta, Meta] | None:
            if self.axis.rank:
                return None
            steps = committed_steps(self.root)
            if not steps:
                raise CheckpointError(
                    f"checkpoint: no complete step in {self.root}; start without --resume, or set run.folder"
                )
            folder = steps[max(steps)]
            record = cast(Meta, files.read_commit(folder))
            if missing := sorted(files.RECORD - record.keys()):
                raise CheckpointError(
                    f"checkpoint: {folder / files.COMMIT} lacks {missing[0]}; resume from another step"
                )
            if record["index"] != files.checksum(folder / files.INDEX):
                raise CheckpointError(f"checkpoint: {folder / files.INDEX} is damaged (its checksum differs)")
            return folder.name, record, files.read_meta(folder / files.INDEX)

        chosen = gather(self.axis, agree(self.axis, pick, timeout_s=self.timeout_s), timeout_s=self.timeout_s)
        name, record, meta = cast(tuple[str, Meta, Meta], chosen[0])
        return name, record, meta

    def _read(self, folder: Path, record: Meta, owners: dict[str, int], snapshot: Snapshot) -> None:
        if record["ranks"] != self.axis.size:
            raise CheckpointError(
                f"checkpoint: {folder} was written by {record['ranks']} ranks, but {self.axis.size} run; "
                f"start {record['ranks']} ranks"
            )
        _check_fixed(folder, cast(list[str], record["fixed"]), snapshot.fixed)
        _check_names(folder, owners, snapshot)
        path = folder / files.shard_name(self.axis.rank)
        if files.checksum(path) != cast(dict[str, str], record["shards"])[path.name]:
            raise CheckpointError(f"checkpoint: {path} is damaged (its checksum differs from the commit record)")
        with files.open_shard(path) as file:
            saved = set(file.get("local", {}))
            if saved != set(snapshot.local):
                raise CheckpointError(
                    f"checkpoint: {path} holds {len(saved)} codec memories, but this configuration has "
                    f"{len(snapshot.local)}; resume with the exchange section that wrote it"
                )
            for name, out in snapshot.local.items():
                files.read_into(file, f"local/{name}", out)
            for name, owner in owners.items():
                if owner == self.axis.rank:
                    files.read_into(file, f"tensors/{name}", snapshot.tensors[name])


def _check_fixed(folder: Path, saved: list[str], now: list[str]) -> None:
    differ = [(a, b) for a, b in zip(saved, now, strict=False) if a != b]
    if differ or len(saved) != len(now):
        was, here = differ[0] if differ else (f"{len(saved)} settings", f"{len(now)}")
        raise CheckpointError(
            f"checkpoint: {folder} was written with {was}, but now it is {here}; resume with the configuration that "
            "wrote it"
        )


def _check_names(folder: Path, owners: dict[str, int], snapshot: Snapshot) -> None:
    unknown, missing = sorted(set(owners) - set(snapshot.tensors)), sorted(set(snapshot.tensors) - set(owners))
    if unknown or missing:
        shown = f"it holds {unknown[0]}" if unknown else f"it lacks {missing[0]}"
        raise CheckpointError(
            f"checkpoint: {folder} is of another model: {shown} ({len(unknown)} unknown, {len(missing)} missing); "
            "resume with the configuration that wrote it"
        )


def _remove(folder: Path, rank: int) -> None:
    names = [files.shard_name(rank), f".{files.shard_name(rank)}.tmp"]
    if rank == 0:
        names = [files.COMMIT, files.INDEX, *names]
    try:
        for name in names:
            (folder / name).unlink(missing_ok=True)
        if not any(folder.iterdir()):
            folder.rmdir()
    except FileNotFoundError:
        pass
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:  # another rank is still about to remove its shard
            raise CheckpointError(f"checkpoint: cannot remove {folder}: {error.strerror}") from None


def _flip_last_byte(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)[0]
        file.seek(-1, 2)
        file.write(bytes([last ^ 1]))
