"""Files that an option of a command names for its results: a path that cannot be written is the user's to change."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from mpitrain.errors import ConfigError


def check_output(path: Path, option: str) -> None:
    """Refuse a file that cannot be written before the work is done, and leave nothing behind; raises ConfigError."""
    with _naming(path, option):
        if path.exists():
            os.close(os.open(path, os.O_WRONLY))
        else:
            existing = next(folder for folder in path.absolute().parents if folder.exists())
            tempfile.TemporaryFile(dir=existing).close()


def write_output(path: Path, text: str, option: str) -> None:
    """Write a file, and the folders above it; raises ConfigError."""
    with _naming(path, option):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def _naming(path: Path, option: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{option}: cannot write {path}: {error.strerror}; name another file") from None
