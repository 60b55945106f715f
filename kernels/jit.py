"""The one way kernels are compiled, and where their machine code is cached.

Machine code is cached on disk so that only the first start of an installation compiles. The folder is chosen at
import: ``NUMBA_CACHE_DIR`` where the user has set it and nobody else owns it, else the first of the package's own
folder, the user's cache folder and the temporary folder that can be written; where none can, kernels are compiled anew
in every process. Each host has its own subfolder: machine code depends on the processor, and folders on a network disk
are not written by two hosts at once.
"""

import contextlib
import os
import platform
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
from numba.core.caching import FunctionCache

F = TypeVar("F", bound=Callable[..., Any])


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _private(folder: Path) -> bool:
    """Whether nobody else could have planted machine code here (numba unpickles what it finds)."""
    statuses = [folder.stat(), folder.parent.stat()]  # who may write the parent may replace the folder
    return all(status.st_uid == os.geteuid() and not status.st_mode & 0o022 for status in statuses)


def _trusted(status: os.stat_result) -> bool:
    """Whether a folder that the user has named is not one that somebody else has put there, as in ``/tmp``."""
    return status.st_uid in (os.geteuid(), 0) and not status.st_mode & 0o002


def _choose_folder() -> Path | None:
    wanted = os.environ.get("NUMBA_CACHE_DIR")
    if wanted and _writable(Path(wanted)) and _trusted(Path(wanted).stat()):
        return Path(wanted)
    roots = [Path(__file__).resolve().parent / "__pycache__"]
    if "HOME" in os.environ or "XDG_CACHE_HOME" in os.environ:
        roots.append(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mpitrain")
    with contextlib.suppress(OSError):  # there may be no temporary folder either
        roots.append(Path(tempfile.gettempdir()) / f"mpitrain-{os.geteuid()}")
    hosts = (root / (platform.node() or "host") for root in roots)
    return next((folder for folder in hosts if _writable(folder) and _private(folder)), None)


cache_folder: Path | None = _choose_folder()
"""Where machine code is kept; None when every process compiles for itself."""

_numba_config: Any = numba.config
_numba_config.CACHE_DIR = str(cache_folder or "")


class _ForgivingCache(FunctionCache):
    """Numba's cache, except that a damaged file or a full disk costs a compilation and not the run."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except Exception:  # whatever unpickling foreign bytes may raise
            self.flush()
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        with contextlib.suppress(Exception):
            super().save_overload(sig, data)


def kernel(function: F) -> F:
    """Compile ``function`` on first call, for each combination of argument types.

    No fastmath anywhere: it hides NaN (numba issue 2919). Division by zero gives infinity, as in numpy. The
    interpreter lock is released, so kernels of several threads run side by side.
    """
    compiled: Any = numba.njit(nogil=True, error_model="numpy")(function)
    if cache_folder is not None and not _numba_config.DISABLE_JIT:
        compiled._cache = _ForgivingCache(function)
    return cast(F, compiled)


def inlined(function: F) -> F:
    """Compile ``function`` into each kernel that calls it: a call for every block would cost a fifth of the time."""
    compiled: Any = numba.njit(nogil=True, error_model="numpy", inline="always")(function)
    return cast(F, compiled)
