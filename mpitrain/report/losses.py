"""Final loss against bytes: records of ``mpitrain bench convergence CONFIG --json FILE``, a picture a configuration."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mpitrain.intervals import paired_percent
from mpitrain.report.losschart import LossMark, loss_chart, size
from mpitrain.report.read import number, printable
from mpitrain.report.records import wrong_records
from mpitrain.report.sections import figure
from mpitrain.report.tables import column_table
from mpitrain.train.runfolder import Row

UNKNOWN = "-"
COLUMNS = ["test metric", "test loss", "difference, %", "train loss difference, %", "bytes", "times less"]
Runs = dict[int, Row]
"""Runs of a cell by seed."""


@dataclass(frozen=True)
class LossFile:
    """A file of records: runs by configuration and cell; the first cell of a configuration is its yardstick."""

    name: str
    configs: dict[str, dict[str, Runs]]


def is_loss(record: object) -> bool:
    """Tell whether a record is of a run of a convergence table."""
    return isinstance(record, dict) and "config" in record


def read_losses(path: Path, records: Sequence[object]) -> LossFile:
    """Sort the records of a file; ConfigError where one is of another kind, or there twice."""
    configs: dict[str, dict[str, Runs]] = {}
    for index, record in enumerate(records):
        row: Row = record if isinstance(record, dict) else {}
        named, seed = row.get("config"), row.get("seed")
        config, _, cell = printable(named).partition(" ") if isinstance(named, str) else ("", "", "")
        if not cell or type(seed) is not int or not {"loss", "train_loss", "metric", "bytes"} <= row.keys():
            raise wrong_records(
                path, f"a record (number {index + 1}) without config and cell, seed, loss, train_loss, metric and bytes"
            )
        runs = configs.setdefault(config, {}).setdefault(cell, {})
        if seed in runs:
            raise wrong_records(path, f"{config} {cell}, seed {seed} twice")
        runs[seed] = row
    return LossFile(printable(path.name), configs)


def losses(files: Sequence[LossFile]) -> list[str]:
    """Draw every configuration of every file."""
    return [
        _section(config, cells, f" ({file.name})" if len(files) > 1 else "")
        for file in files
        for config, cells in file.configs.items()
    ]


def compared(runs: Runs, base: Runs, key: str) -> tuple[float, float]:
    """Return difference and half its 95 % interval in percent, of seeds that both have; NaN where none does."""
    pairs = [(number(runs[seed], key), number(base[seed], key)) for seed in runs if seed in base]
    pairs = [pair for pair in pairs if not any(map(math.isnan, pair))]
    if not pairs or not sum(other for _, other in pairs):
        return math.nan, math.nan
    return paired_percent([mine for mine, _ in pairs], [other for _, other in pairs])


def mean(runs: Runs, key: str) -> float:
    """Return the mean of the runs that have a number; NaN of none."""
    values = [value for row in runs.values() if not math.isnan(value := number(row, key))]
    return sum(values) / len(values) if values else math.nan


def _section(config: str, cells: dict[str, Runs], suffix: str) -> str:
    base_name, base = next(iter(cells.items()))
    yardstick = mean(base, "bytes")
    marks = [LossMark(cell, mean(runs, "bytes"), *compared(runs, base, "loss")) for cell, runs in cells.items()]
    drawn = [mark for mark in marks if mark.nbytes > 0 and not math.isnan(mark.percent)]
    rows = {_told(cell, runs): _row(runs, base, yardstick, is_base=cell == base_name) for cell, runs in cells.items()}
    table = column_table(COLUMNS, rows, "cell")
    note = (
        f"Differences are to {base_name}, paired by seed, with 95 % intervals. Further left is cheaper, lower is "
        "better; the dashed line is no difference, the band around it 1 %."
    )
    if left_out := [mark.name for mark in marks if mark not in drawn]:
        note += f" Without a point, for no run can be compared: {', '.join(left_out)}."
    if not drawn or not yardstick > 0:
        return figure(f"Final loss against bytes: {config}{suffix}", table, note)
    picture, unnamed = loss_chart(drawn, yardstick, f"loss, % from {base_name}")
    if unnamed:
        note += f" Too close to others to be named in the picture: {', '.join(unnamed)}."
    return figure(f"Final loss against bytes: {config}{suffix}", picture + table, note)


def _told(cell: str, runs: Runs) -> str:
    diverged = sum(math.isnan(number(row, "loss")) for row in runs.values())
    return f"{cell} ({diverged} of {len(runs)} diverged)" if diverged else cell


def _row(runs: Runs, base: Runs, yardstick: float, *, is_base: bool) -> list[str]:
    nbytes = mean(runs, "bytes")
    return [
        *(_decimal(mean(runs, key)) for key in ("metric", "loss")),
        *(UNKNOWN if is_base else interval(*compared(runs, base, key)) for key in ("loss", "train_loss")),
        UNKNOWN if math.isnan(nbytes) else size(nbytes),
        f"{yardstick / nbytes:.4g}" if nbytes > 0 and not math.isnan(yardstick) else UNKNOWN,
    ]


def interval(middle: float, half: float) -> str:
    """Write a difference with its interval, as far as they are known."""
    if math.isnan(middle):
        return UNKNOWN
    return f"{middle:+.2f}" + ("" if math.isnan(half) else f" ({middle - half:+.2f} … {middle + half:+.2f})")


def _decimal(value: float) -> str:
    return UNKNOWN if math.isnan(value) else f"{value:.4f}"
