"""What lies in a folder of checkpoints: steps, complete or not, those that were set aside, and the rest."""

import os
from dataclasses import dataclass
from pathlib import Path

from mpitrain.checkpoint.record import COMMIT
from mpitrain.checkpoint.steps import asides, committed_steps, marked_steps, step_folders, step_number
from mpitrain.errors import CheckpointError

COMPLETE, INCOMPLETE, DAMAGED, ASIDE = "complete", "incomplete", "record damaged", "set aside"


@dataclass(frozen=True)
class StepEntry:
    """A step in a folder; its files were not looked into.

    Attributes
    ----------
    name : str
        Below the folder of checkpoints.
    state : str
        ``complete``, ``incomplete``, ``record damaged`` or ``set aside``.
    nbytes : int
        Of its files.
    """

    name: str
    step: int
    state: str
    nbytes: int


@dataclass(frozen=True)
class Survey:
    """The chosen step, and what else lies around it (nothing where a single step was given)."""

    folder: Path
    steps: list[StepEntry]
    leftovers: list[str]


def survey(path: Path, checkpoints: str) -> Survey:
    """Find the step that a path means: itself, or the newest complete one of a folder of checkpoints or of a run.

    Parameters
    ----------
    path : Path
        A step, a folder of checkpoints, or a run folder.
    checkpoints : str
        Name of the folder of checkpoints in a run folder.

    Raises
    ------
    CheckpointError
        There is no such folder, or no complete step in it.
    """
    if not path.is_dir():
        what = "is not a folder" if path.exists() else "does not exist"
        raise CheckpointError(f"checkpoint: {path} {what}; give a run folder, its checkpoints, or one step")
    if (path / COMMIT).exists() or step_number(Path(os.path.realpath(path))) is not None:
        return Survey(path, [], [])
    root = path / checkpoints if (path / checkpoints).is_dir() else path
    marked = marked_steps(root)
    if not marked:
        others = ", ".join(folder.name for folder in step_folders(root).values())
        raise CheckpointError(f"checkpoint: no complete step in {root}" + (f"; incomplete: {others}" if others else ""))
    steps = [
        StepEntry(str(folder.relative_to(root)), step, state, _nbytes(folder)) for step, folder, state in _states(root)
    ]
    known = {entry.name.partition("/")[0] for entry in steps}
    leftovers = sorted(entry.name for entry in root.iterdir() if entry.name not in known)
    return Survey(marked[max(marked)], steps, leftovers)


def _states(root: Path) -> list[tuple[int, Path, str]]:
    marked, committed = marked_steps(root), committed_steps(root)
    found = [
        (step, folder, COMPLETE if step in committed else DAMAGED if step in marked else INCOMPLETE)
        for step, folder in step_folders(root).items()
    ]
    return found + [
        (step, folder, ASIDE) for aside in asides(root).values() for step, folder in step_folders(aside).items()
    ]


def _nbytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
