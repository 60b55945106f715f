"""``mpitrain report``: a table in the terminal, and the pictures in one file."""

import sys
from pathlib import Path

from mpitrain.errors import ConfigError
from mpitrain.report.facts import terminal_table
from mpitrain.report.page import page
from mpitrain.report.read import printable, read_runs
from mpitrain.train.runfolder import REPORT

LEGEND = """\
bytes sent: payload and headers, by all ranks together
vs float32: gradients beside an uncompressed float32 ring, without headers"""


def main(folders: list[Path], output: Path | None) -> int:
    """Sum up runs, and draw them into ``output`` (report.html in the first run's folder where left out)."""
    try:
        runs = read_runs(folders)
        path = output or folders[0] / REPORT
        _write(path, page(runs))
    except ConfigError as error:
        print(f"mpitrain: {error}", file=sys.stderr)
        return int(error.exit_code)
    lines = [terminal_table(runs), "", LEGEND, ""]
    lines += [f"{run.name}: {text}" for run in runs for text in run.missing]
    _print("\n".join([*lines, f"report: {printable(str(path))}"]))
    return 0


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"report: cannot write {printable(str(path))}: {error.strerror}; name another file with --output"
        ) from None


def _print(text: str) -> None:
    """Print on a terminal of any encoding."""
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "replace").decode(encoding))
