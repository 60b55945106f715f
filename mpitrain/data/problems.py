"""What is wrong with a file, told in one form: file, array or column, place, expected, got, remedy."""

import difflib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mpitrain.errors import DataError

Array = npt.NDArray[np.generic]
"""As a file holds it: of any type."""

_SHOWN = 20


def problem(path: object, where: str, what: str, remedy: str) -> DataError:
    """Build the exception for something wrong with a file; ``where`` is a part of it, or empty."""
    place = f", {where}" if where else ""
    return DataError(f'data: "{path}"{place}: {what}; {remedy}')


def stamp_of(path: Path) -> tuple[int, int]:
    """Note the size and the time of a file; raises DataError where it is none (a folder, a pipe) or may not be read."""
    try:
        if path.is_file():
            with path.open("rb"):
                status = path.stat()
            return status.st_size, status.st_mtime_ns
    except OSError as error:
        raise DataError(
            f'data.path: "{path}" cannot be read ({error.strerror}); make it readable for the ranks\' user'
        ) from None
    raise DataError(
        f'data.path: there is no file "{path}" (looked from {Path.cwd()}); '
        "set data.path to a file that this machine can see"
    )


def shown(names: Sequence[str]) -> str:
    """List names, the first of them where there are many."""
    extra = [] if len(names) <= _SHOWN else [f"… {len(names) - _SHOWN} more"]
    return str([*names[:_SHOWN], *extra])


def repeated(names: Sequence[str]) -> str | None:
    """Find the first name that occurs again, if any does."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None


def nearest(name: str, names: Sequence[str]) -> str | None:
    """Find the most alike name, if any is alike."""
    near = difflib.get_close_matches(name, names, 1)
    return near[0] if near else None


def position_of(name: str, names: Sequence[str], key: str, path: str) -> int:
    """Find a name, or refuse it with the list and the nearest one."""
    if name in names:
        return names.index(name)
    near = nearest(name, names)
    hint = f'did you mean "{near}"?' if near else "use one of these names"
    raise DataError(f'data: "{path}": data.{key}: there is no "{name}" among {shown(names)}; {hint}')
