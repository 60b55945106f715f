"""``mpitrain report``: a table in the terminal, and the pictures in one file."""

import sys
from pathlib import Path

from mpitrain.errors import ConfigError
from mpitrain.report.facts import terminal_table
from mpitrain.report.losses import LossFile, is_loss, read_losses
from mpitrain.report.page import page
from mpitrain.report.rates import RateFile, read_rates
from mpitrain.report.read import printable, read_runs
from mpitrain.report.records import load_records
from mpitrain.train.runfolder import REPORT

LEGEND = """\
bytes sent: payload and headers, by all ranks together
vs float32: gradients beside an uncompressed float32 ring, without headers"""


def main(paths: list[Path], output: Path | None) -> int:
    """Sum up runs and records of codecs and of convergence, and draw them into ``output``.

    Where it is left out: report.html in the first run's folder, or the first file of records with the suffix .html.
    """
    files = [path for path in paths if path.is_file()]
    folders = [path for path in paths if path not in files]
    try:
        runs, measured = read_runs(folders), _read_files(files)
        path = output or (folders[0] / REPORT if folders else files[0].with_suffix(".html"))
        _write(path, page(runs, measured), files)
    except ConfigError as error:
        print(f"mpitrain: {error}", file=sys.stderr)
        return int(error.exit_code)
    lines = [terminal_table(runs), "", LEGEND, ""] if runs else []
    lines += [f"{run.name}: {text}" for run in runs for text in run.missing]
    _print("\n".join([*lines, f"report: {printable(str(path))}"]))
    return 0


def _read_files(files: list[Path]) -> list[RateFile | LossFile]:
    if len({path.resolve() for path in files}) < len(files):
        raise ConfigError("report: a file of records is given twice; give each once")
    return [_read_file(path) for path in files]


def _read_file(path: Path) -> RateFile | LossFile:
    """Read records of the kind that the first one is of."""
    records = load_records(path)
    return read_losses(path, records) if is_loss(records[0]) else read_rates(path, records)


def _write(path: Path, text: str, sources: list[Path]) -> None:
    if path.resolve() in [source.resolve() for source in sources]:
        raise ConfigError(f"report: {printable(str(path))} holds the records; name another file with --output")
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
