"""The one way kernels are compiled, and where their machine code is cached.

Machine code is cached on disk so that only the first start of an installation compiles. The folder is chosen at
import; where none can be written, kernels are compiled anew in every process.
"""

import contextlib
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
from numba.core.caching import FunctionCache, IndexDataCacheFile

from mpitrain.kernels.storage import choose_folder

F = TypeVar("F", bound=Callable[..., Any])


cache_folder: Path | None = choose_folder()
"""Where machine code is kept; None when every process compiles for itself."""

_numba_config: Any = numba.config
_numba_config.CACHE_DIR = str(cache_folder or "")


def _fingerprint() -> str:
    """Digest the sources of all kernels: one is compiled into others, of which numba looks at their own file only."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).resolve().parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


_SOURCES = _fingerprint()


class _ForgivingCache(FunctionCache):
    """Numba's cache, except that a damaged file or a full disk costs a compilation and not the run.

    What it keeps counts as long as no source of any kernel has changed.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self._cache_file = IndexDataCacheFile(self._cache_path, self._impl.filename_base, _SOURCES)

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
