"""The folders of a run's steps: which there are, and which count."""

import re
from pathlib import Path

from mpitrain.checkpoint.record import COMMIT, read_commit
from mpitrain.errors import CheckpointError

_STEP_NAME = re.compile(r"step-(\d+)")
_ASIDE_NAME = re.compile(r"aside-(\d+)")


def step_folder(root: Path, step: int) -> Path:
    """Name the folder of a step."""
    return root / f"step-{step:08d}"


def step_number(folder: Path) -> int | None:
    """Read the step off the name of its folder; None for other names."""
    match = _STEP_NAME.fullmatch(folder.name)
    return int(match[1]) if match else None


def step_folders(root: Path) -> dict[int, Path]:
    """List the folders of steps by number, complete or not; other names do not count."""
    found = [(step_number(path), path) for path in root.glob("step-*")] if root.is_dir() else []
    return dict(sorted((step, path) for step, path in found if step is not None and path.is_dir()))


def marked_steps(root: Path) -> dict[int, Path]:
    """List the steps that were completed, the oldest first: those with a commit record, whole or damaged since."""
    return {step: path for step, path in step_folders(root).items() if (path / COMMIT).is_file()}


def committed_steps(root: Path) -> dict[int, Path]:
    """List the steps whose commit record is whole, the oldest first, with their folders."""
    return {step: path for step, path in marked_steps(root).items() if _is_whole(path, step)}


def _is_whole(folder: Path, step: int) -> bool:
    try:
        return read_commit(folder).step == step
    except CheckpointError:
        return False


def asides(root: Path) -> dict[int, Path]:
    """List the folders of steps that were set aside, by number."""
    found = [(_ASIDE_NAME.fullmatch(path.name), path) for path in root.glob("aside-*")] if root.is_dir() else []
    return dict(sorted((int(match[1]), path) for match, path in found if match))


def aside_folder(root: Path, number: int) -> Path:
    """Name a folder for steps that are set aside."""
    return root / f"aside-{number}"
