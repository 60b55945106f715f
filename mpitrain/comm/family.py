"""Which MPI: the family and the version that libraries and launchers tell of themselves."""

import re
from typing import NamedTuple

OPEN_MPI, MPICH = "Open MPI", "MPICH"

FAMILIES = {
    "Open MPI": OPEN_MPI,
    "OpenRTE": OPEN_MPI,
    "Intel": "Intel MPI",
    "MVAPICH": "MVAPICH",
    "HYDRA": MPICH,
    "MPICH": MPICH,
    "slurm": "Slurm",
}
"""Words by which libraries and launchers name the MPI that they belong to."""


def identify(text: str) -> tuple[str, str]:
    """Find the family and the version in what a library or a launcher says of itself; empty where it says neither."""
    family = next((name for word, name in FAMILIES.items() if word in text), "")
    version = re.search(r"\d+\.\d+[\w.]*", text)
    return family, version[0] if version else ""


class Library(NamedTuple):
    """An MPI library; ``name`` is what it calls itself."""

    family: str
    version: tuple[int, ...]
    name: str

    @property
    def open_mpi(self) -> bool:
        """Whether it is started by Open MPI's launcher; all others have MPICH's (Hydra), or one that is like it."""
        return self.family == OPEN_MPI


def library(text: str) -> Library:
    """Read what a library says of itself."""
    family, version = identify(text)
    return Library(family, tuple(int(number) for number in re.findall(r"\d+", version)[:3]), text)
