"""Where the machine code of kernels is kept; known without loading numba.

The folder is ``NUMBA_CACHE_DIR``, as it is, where the user has set it and nobody else owns it, else a subfolder of the
first of the package's own folder, the user's cache folder and the temporary folder that can be written. There, each
host has one of its own: machine code depends on the processor, and folders on a network disk are not written by two
hosts at once.
"""

import contextlib
import os
import platform
import tempfile
from pathlib import Path


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


def choose_folder() -> Path | None:
    """Return the folder for this host and user; None when every process must compile for itself."""
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
