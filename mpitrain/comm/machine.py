"""What a machine offers to the ranks: cores, memory, shared memory, open files. Files and counters, no MPI.

Every check is a function that returns findings, one line each: what was found, and what to do about it. Folders of
the kernel are read below ``root``, so that tests can show any machine.
"""

import os
import resource
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from mpitrain.errors import count

MB = 10**6
ROOT = Path("/")

SEGMENT_BYTES = 2**24
"""Shared memory that Open MPI maps for each rank of a host (``btl_sm_segment_size``, whose default this is)."""

SESSION_BYTES, SESSION_BYTES_A_RANK = 2 * MB, MB // 4
"""Room for the session folder of a launcher; 0.4 MB were used by four ranks of Open MPI 5.0."""

RANK_BYTES = 250 * MB
"""Memory of a rank without its model and data: Python, numpy, numba and MPI; 180 MB were used where it compiled."""

OPEN_FILES, OPEN_FILES_A_RANK = 64, 8
"""Of the launcher: pipes, a socket and an event channel for each rank."""


class Level(StrEnum):
    """How bad a finding is."""

    OK = "OK"
    WARN = "WARN"
    FAIL = "FAIL"


@dataclass(frozen=True)
class Finding:
    """One line of a report.

    Attributes
    ----------
    level : Level
        FAIL: training will not work; WARN: it may not, or not well.
    what : str
        What was found.
    remedy : str
        What to do about it; empty where nothing is wrong.
    """

    level: Level
    what: str
    remedy: str = ""

    def __str__(self) -> str:
        return "; ".join(part for part in (self.what, self.remedy) if part)


def shared_memory_findings(
    ranks: int,
    statvfs: Callable[[str], os.statvfs_result] = os.statvfs,
    environment: Mapping[str, str] = os.environ,
) -> list[Finding]:
    """Compare the shared memory and the temporary folder with what the ranks of this host will map.

    Too small a ``/dev/shm`` does not fail when it is mapped but when it is touched: as a bus error, anywhere
    (open-mpi/ompi issue 4553).

    Parameters
    ----------
    ranks : int
        Ranks on this host.
    statvfs : callable
        Status of the file system of a path, as ``os.statvfs`` gives it.
    environment : mapping
        Where ``TMPDIR`` and Open MPI's settings are looked up.
    """
    temporary = next((environment[name] for name in ("TMPDIR", "TEMP", "TMP") if environment.get(name)), "/tmp")
    needs = {temporary: (SESSION_BYTES + ranks * SESSION_BYTES_A_RANK, "set TMPDIR to a folder with more room")}
    if "sm" in environment.get("OMPI_MCA_btl", "sm").split(","):
        shared, needed = environment.get("OMPI_MCA_btl_sm_backing_directory", "/dev/shm"), ranks * SEGMENT_BYTES
        remedy = (
            f"enlarge it (containers: --shm-size={-(-needed // MB)}m), remove sm_segment.* files of jobs that are "
            "gone, or do without: export OMPI_MCA_btl=self,tcp"
        )
        needs = {shared: (needed, remedy)} | needs
    return [
        _room(path, needed, f"{ranks} ranks need" if ranks > 1 else "1 rank needs", remedy, statvfs)
        for path, (needed, remedy) in needs.items()
    ]


def _room(
    path: str, needed: int, users: str, remedy: str, statvfs: Callable[[str], os.statvfs_result] = os.statvfs
) -> Finding:
    try:
        status = statvfs(path)
    except OSError as error:
        return Finding(Level.WARN, f"{path} cannot be used: {error.strerror}; {users} {amount(needed)}", remedy)
    free = status.f_bavail * status.f_frsize
    what = f"{path} has {amount(free)} free, {users} {amount(needed)}"
    return Finding(Level.OK, what) if free >= needed else Finding(Level.WARN, what, remedy)


def amount(nbytes: float) -> str:
    """Render a number of bytes in units of a thousand."""
    return f"{nbytes / 1e9:,.1f} GB" if nbytes >= 1e9 else f"{nbytes / MB:,.1f} MB"


def core_findings(ranks: int, affinity: Collection[int], *, threads: int = 1, root: Path = ROOT) -> list[Finding]:
    """Compare the cores that this process may use with the ranks and their BLAS threads.

    Parameters
    ----------
    affinity : collection of int
        Processors of this process, as ``os.sched_getaffinity`` gives them.
    threads : int
        BLAS threads a rank.
    root : Path
        Folder that holds ``proc`` and ``sys``.
    """
    cores, quota = physical_cores(affinity, root), cpu_quota(root)
    limit = f", of whose time {quota:g} cores' are granted" if quota is not None else ""
    what = f"{count(cores, 'core')} for {count(ranks, 'rank')} (affinity: {len(affinity)} processors{limit})"
    usable = cores if quota is None else min(cores, max(1, int(quota)))
    found = [Finding(Level.OK, what)]
    if ranks > usable:
        found = [Finding(Level.WARN, what, "seconds will be those of a crowded machine")]
    if threads > 1 and ranks * threads > usable:
        what = f"{threads} BLAS threads a rank make {ranks * threads} on {count(usable, 'core')}"
        found.append(Finding(Level.WARN, what, "set OMP_NUM_THREADS=1"))
    return found


def physical_cores(affinity: Collection[int], root: Path = ROOT) -> int:
    """Count the cores behind some processors: the slots that Open MPI sees; hyper-threads share one."""
    siblings = (root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list" for cpu in affinity)
    return len({read_or_empty(path) or str(path) for path in siblings})


def cpu_quota(root: Path = ROOT) -> float | None:
    """Return the cores whose time the control groups of this process grant; None without a limit."""
    pairs = [text.split() for text in _group_values("cpu", "cpu.max", root)]
    old = zip(
        _group_values("cpu", "cpu.cfs_quota_us", root), _group_values("cpu", "cpu.cfs_period_us", root), strict=True
    )
    limits = [int(pair[0]) / int(pair[1]) for pair in [*pairs, *old] if pair[0].isdecimal() and int(pair[1])]
    return min(limits, default=None)


def memory_findings(ranks: int, root: Path = ROOT) -> list[Finding]:
    """Compare the memory that is left, and the limits on it, with what the ranks take before they hold a model."""
    needed = ranks * RANK_BYTES
    lines = dict(line.split(":", 1) for line in read_or_empty(root / "proc/meminfo").splitlines() if ":" in line)
    available = int(lines["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in lines else None
    texts = [*_group_values("memory", "memory.max", root), *_group_values("memory", "memory.limit_in_bytes", root)]
    group = min((int(text) for text in texts if text.isdecimal()), default=None)
    limits = {"available": available, "granted by the control group": group}
    least, name = min(((value, name) for name, value in limits.items() if value is not None), default=(None, ""))
    if least is None:
        return []
    what = f"{amount(least)} of memory {name}, {count(ranks, 'rank')} take {amount(needed)} before model and data"
    return [Finding(Level.OK, what) if least >= needed else Finding(Level.WARN, what, "start fewer ranks here")]


def limit_findings(ranks: int, limit: Callable[[int], tuple[int, int]] = resource.getrlimit) -> list[Finding]:
    """Compare the limits of a process with what a launcher and a rank need."""
    files, _ = limit(resource.RLIMIT_NOFILE)
    needed = OPEN_FILES + ranks * OPEN_FILES_A_RANK
    what = f"{files} files may be open (ulimit -n), a launcher of {count(ranks, 'rank')} needs {needed}"
    unlimited = files == resource.RLIM_INFINITY
    found = [Finding(Level.OK, "files may be open without limit (ulimit -n)" if unlimited else what)]
    if not unlimited and files < needed:
        found = [Finding(Level.WARN, what, f"ulimit -n {needed}")]
    space, _ = limit(resource.RLIMIT_AS)
    if space != resource.RLIM_INFINITY:
        what = f"address space is limited to {amount(space)} (ulimit -v), which counts what is mapped and never touched"
        found.append(Finding(Level.WARN, what, "ulimit -v unlimited"))
    return found


def _group_values(controller: str, name: str, root: Path) -> list[str]:
    """Read a file of this process's control group and of those above it, in either version of the hierarchy."""
    found: list[str] = []
    for line in read_or_empty(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / controllers
        folder = top / path.lstrip("/")
        found += [read_or_empty(parent / name) for parent in (folder, *folder.parents) if parent.is_relative_to(top)]
    return [text for text in found if text]


def read_or_empty(path: Path) -> str:
    """Read a small text file of the kernel; empty where there is none."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
