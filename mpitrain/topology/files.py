"""Text files of limited size."""

from pathlib import Path

from mpitrain.errors import ConfigError


def read_text(path: Path, limit: int, where: str) -> str:
    """Read a UTF-8 file; a mark of the byte order at its beginning is skipped, and any line end becomes a newline.

    Parameters
    ----------
    limit : int
        Characters that it may have; no more are read, whatever the path is.
    where : str
        Names the file in messages.

    Raises
    ------
    ConfigError
        Where it cannot be read, is no text, or is longer.
    """
    try:
        with path.open(encoding="utf-8-sig") as stream:
            text = stream.read(limit + 1)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where}: expected UTF-8 text, got other bytes ({error.reason})") from None
    except (OSError, ValueError) as error:  # the latter: a path with a NUL character
        raise ConfigError(f"{where}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(text) > limit:
        raise ConfigError(f"{where}: expected at most {limit:,} characters, got more")
    if "\0" in text:
        raise ConfigError(f"{where}: expected text, got NUL characters")
    return text
