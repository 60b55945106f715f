"""What the MPI library and mpi4py say of themselves.

As a program it prints them as one line of JSON: asked in a process of its own, since a library that does not fit its
machine may end or freeze the one that loads it.
"""

import json
from pathlib import Path

import mpi4py

from mpitrain.comm.runtime import THREAD_LEVELS, library_name  # before MPI is loaded, which would start by itself

# isort: split
from mpi4py import MPI

Facts = dict[str, str]


def library_facts() -> Facts:
    """Name the linked library, its file, and mpi4py with the family it was built for."""
    family, version = MPI.get_vendor()
    return {
        "library": " ".join(library_name().split()),
        "file": _loaded_file(),
        "mpi4py": mpi4py.__version__,
        "built_for": f"{family} {'.'.join(str(number) for number in version)}",
    }


def running_facts() -> Facts:
    """Say what the library grants once it has started."""
    return {"thread_level": THREAD_LEVELS[MPI.Query_thread()], "fault_tolerance": "yes" if _knows_failures() else ""}


def _knows_failures() -> bool:
    """Tell whether the library has the calls of user-level failure mitigation (ULFM)."""
    try:
        MPI.COMM_WORLD.Is_revoked()
    except (AttributeError, NotImplementedError, MPI.Exception):
        return False
    return True


def _loaded_file() -> str:
    """Find the shared library that was loaded, in this process's own map."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    files = (line.split(maxsplit=5)[5] for line in lines if "/libmpi" in line)
    return next(files, "")


if __name__ == "__main__":
    print(json.dumps(library_facts()))
