"""Files of records that the report draws: read once, refused in one way."""

import json
from pathlib import Path

from mpitrain.errors import ConfigError
from mpitrain.report.read import printable


def load_records(path: Path) -> list[object]:
    """Read a list of records; ConfigError where the file cannot be read or holds something else."""
    try:
        records = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise wrong_records(path, f"a file that cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError):
        raise wrong_records(path, "no JSON") from None
    if not isinstance(records, list) or not records:
        raise wrong_records(path, "an empty list" if isinstance(records, list) else f"a {type(records).__name__}")
    return records


def wrong_records(path: Path, got: str) -> ConfigError:
    """Make the error of a file that is of no known kind."""
    return ConfigError(
        f"report: {printable(str(path))}: expected a run folder or records of codecs or of convergence, got {got}; "
        "write records with mpitrain bench codec --json FILE or mpitrain bench convergence CONFIG --json FILE"
    )
