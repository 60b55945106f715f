"""Whether a folder can hold a run: it can be written, locked, has room, and is on a disk of this machine or not."""

import fcntl
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

from mpitrain.comm.machine import ROOT, Finding, Level, amount, read_or_empty

ROOMY_BYTES = 10**9
"""Less than this is soon filled by the checkpoints and metrics of a run."""

NETWORK_FILE_SYSTEMS = {
    "9p", "afs", "beegfs", "ceph", "cifs", "fuse.ceph", "fuse.glusterfs", "fuse.sshfs", "glusterfs", "gpfs", "lustre",
    "ncpfs", "nfs", "nfs4", "orangefs", "smb3", "smbfs", "virtiofs",
}  # fmt: skip


def run_folder_findings(
    folder: Path,
    *,
    named: bool,
    shared: bool = True,
    lock: Callable[[IO[bytes], int], None] = fcntl.flock,
    root: Path = ROOT,
) -> list[Finding]:
    """Try what training does in a run folder, and leave nothing behind.

    Parameters
    ----------
    folder : Path
        Run folder; need not exist.
    named : bool
        A configuration names it, so training will fail where it cannot be written.
    shared : bool
        The run takes it for a folder that all hosts see (``run.shared_fs``).
    lock : callable
        Lock of an open file.
    root : Path
        Folder that holds ``proc``.
    """
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    kind, point = file_system(existing, root)
    place = f"run folder {folder} ({kind} at {point})"
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            found = [_lock_finding(file, place, lock)]
    except OSError as error:
        what = f"{place} cannot be written: {error.strerror}"
        return [Finding(Level.FAIL if named else Level.WARN, what, "set run.folder to one that can")]
    status = os.statvfs(existing)
    free = status.f_bavail * status.f_frsize
    what = f"{place} can be written and has {amount(free)} free"
    enough = Finding(Level.OK, what) if free >= ROOMY_BYTES else Finding(Level.WARN, what, "set run.folder")
    return [enough, *found, *_network_findings(place, kind, shared=shared)]


def _lock_finding(file: IO[bytes], place: str, lock: Callable[[IO[bytes], int], None]) -> Finding:
    """Lock as HDF5 does when it opens a file."""
    try:
        lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        what = f"{place} does not lock files: {error.strerror}"
        return Finding(Level.WARN, what, "export HDF5_USE_FILE_LOCKING=FALSE, or set run.folder")
    return Finding(Level.OK, "files in the run folder can be locked")


def _network_findings(place: str, kind: str, *, shared: bool) -> list[Finding]:
    if kind in NETWORK_FILE_SYSTEMS:
        remedy = "see that every host mounts it at this path, or keep runs on local disks: run.shared_fs = false"
        return [Finding(Level.WARN, f"{place} is on a network file system", remedy)]
    if shared:
        return [Finding(Level.OK, "the run folder is on a local disk: several hosts need run.shared_fs = false")]
    return []


def file_system(path: Path, root: Path = ROOT) -> tuple[str, str]:
    """Name the type and the mount point of a path's file system; "unknown" and "/" where the kernel does not tell."""
    best = ("unknown", "/")
    for line in read_or_empty(root / "proc/mounts").splitlines():
        _, point, kind, *_ = line.split(" ")
        point = point.replace(r"\040", " ")
        if path.resolve().is_relative_to(point) and len(point) >= len(best[1]):  # a later mount hides an earlier one
            best = kind, point
    return best
