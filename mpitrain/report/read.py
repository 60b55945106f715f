"""Run folders as the report sees them: whatever is there is read, and what is not is named."""

import json
import math
import os
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from mpitrain.errors import ConfigError
from mpitrain.train.runfolder import CONFIG, METRICS, SUMMARY, TIMELINE, Row

LARGEST = 1e300
"""Beyond it a number counts as infinite, so that differences stay finite."""

Event = tuple[str, float, float]


@dataclass(frozen=True)
class RankTime:
    """Where a rank's time went; seconds of the whole run by the name of the activity."""

    rank: int
    host: str
    seconds: dict[str, float]


@dataclass(frozen=True)
class RankEvents:
    """What a rank did in one step: name, start and end in seconds since it began the step."""

    rank: int
    host: str
    events: list[Event]


@dataclass
class Run:
    """A run folder.

    Attributes
    ----------
    name : str
        For people; printable.
    rows : list of dict
        Of metrics.jsonl, by ascending step.
    summary : dict
        Of summary.json; empty where there is none.
    settings : dict
        Dotted key to value, of config.toml; ``config_text`` is the file, with the sources as comments.
    timeline_step : int or None
        The step that ``timeline`` shows.
    missing : list of str
        What could not be read, and why it may be so.
    """

    name: str
    rows: list[Row] = field(default_factory=list)
    summary: Row = field(default_factory=dict)
    settings: dict[str, object] = field(default_factory=dict)
    config_text: str = ""
    times: list[RankTime] = field(default_factory=list)
    timeline_step: int | None = None
    timeline: list[RankEvents] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def column(self, key: str) -> list[float]:
        """Return a number a row; NaN where it is missing, null or not finite."""
        return [number(row, key) for row in self.rows]

    @property
    def gradient_bytes(self) -> list[float]:
        """Return the bytes a row that went from replica to replica; what stays within one is no gradient of a ring."""
        rows = zip(self.column("sent_bytes"), self.column("replica_bytes"), strict=True)
        return [sent - (0.0 if math.isnan(inside) else inside) for sent, inside in rows]

    @property
    def metric(self) -> str:
        """Name of what is measured, as in ``accuracy``; empty where nothing tells."""
        told = str(table(self.summary, "metric").get("name", ""))
        seen = (key for row in self.rows for key in row if key.startswith("test_") and key != "test_loss")
        trained = (key for key in (self.rows[0] if self.rows else {}) if key in ("accuracy", "rmse", "bits_per_char"))
        return printable((told or next(seen, "")).removeprefix("test_") or next(trained, ""))


def read_runs(folders: list[Path]) -> list[Run]:
    """Read run folders; they are called by their last part where that tells them apart.

    Raises
    ------
    ConfigError
        A folder that holds no run, or is given twice.
    """
    if len({os.path.realpath(folder) for folder in folders}) < len(folders):
        raise ConfigError("report: a run folder is given twice; give each once")
    last = [os.path.basename(os.path.realpath(folder)) for folder in folders]
    unique = len(set(last)) == len(last)
    return [
        read_run(folder, printable(name if unique else str(folder))) for folder, name in zip(folders, last, strict=True)
    ]


def read_run(folder: Path, name: str) -> Run:
    """Read one run folder; raises ConfigError where it holds neither rows nor a summary."""
    if not any(os.path.isfile(folder / file) for file in (METRICS, SUMMARY)):
        raise ConfigError(
            f"report: {printable(str(folder))} holds no run: neither {METRICS} nor {SUMMARY}; give the run.folder of a "
            "training, or a file that mpitrain bench codec or bench convergence wrote by --json"
        )
    run = Run(name)
    _read_rows(run, folder / METRICS)
    run.summary = _read_json(run, folder / SUMMARY, "the run has not come to its end")
    _read_config(run, folder / CONFIG)
    _read_times(run)
    _read_timeline(run, folder / TIMELINE)
    return run


def number(row: Row, key: str) -> float:
    """Return a finite number of a row, or NaN."""
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < LARGEST:
        return math.nan
    return float(value)


def table(row: Row, key: str) -> Row:
    """Return a table within a table; empty where there is none."""
    value = row.get(key)
    return cast(Row, value) if isinstance(value, dict) else {}


def tables(row: Row, key: str) -> list[Row]:
    """Return the tables of a list within a table."""
    value = row.get(key)
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def printable(text: str) -> str:
    """Make a name fit for any page and terminal: no control characters, no halves of characters."""
    return "".join(character if character.isprintable() else "?" for character in text)


def _read_text(run: Run, path: Path, reason: str) -> str | None:
    """Read a file; where there is none, note it."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        absent = isinstance(error, FileNotFoundError)
        run.missing.append(f"{path.name}: " + (f"missing; {reason}" if absent else f"cannot be read: {error.strerror}"))
        return None


def _read_rows(run: Run, path: Path) -> None:
    damaged = repeated = 0
    for line in (_read_text(run, path, "no step was written") or "").splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        # A step that comes twice was taken again after a resume: the later row is what the weights went through.
        if isinstance(row, dict) and not math.isnan(step := number(row, "step")):
            while run.rows and number(run.rows[-1], "step") >= step:
                run.rows.pop()
                repeated += 1
            run.rows.append(row)
        else:
            damaged += 1
    if damaged:
        run.missing.append(f"{path.name}: {damaged} damaged or half-written lines are left out")
    if repeated:
        run.missing.append(f"{path.name}: {repeated} rows are left out, whose steps were taken again later")
    if not run.rows and path.exists():
        run.missing.append(f"{path.name}: holds no step")


def _read_json(run: Run, path: Path, reason: str) -> Row:
    text = _read_text(run, path, reason)
    try:
        value = json.loads(text) if text is not None else {}
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, dict):
        return value
    run.missing.append(f"{path.name}: damaged; it is not read")
    return {}


def _read_config(run: Run, path: Path) -> None:
    run.config_text = _read_text(run, path, "the settings are not known") or ""
    try:
        tree = tomllib.loads(run.config_text)
    except (tomllib.TOMLDecodeError, RecursionError):
        run.missing.append(f"{path.name}: damaged; the settings are not compared")
        return
    for section, values in tree.items():
        inner = values.items() if isinstance(values, dict) else []
        run.settings |= {f"{section}.{key}": value for key, value in inner} if inner else {section: values}


ACTIVITIES = ("compute", "encode", "decode", "wait")


def _read_times(run: Run) -> None:
    """Take the seconds of all ranks from the summary, else those of rank 0 from its rows."""
    for entry in tables(run.summary, "per_rank"):
        if not math.isnan(rank := number(entry, "rank")):
            seconds = {name: _positive(number(entry, f"{name}_s")) for name in ACTIVITIES}
            run.times.append(RankTime(int(rank), printable(str(entry.get("host", ""))), seconds))
    if run.times or not run.rows:
        return
    run.missing.append(f"{SUMMARY}: no per_rank; of the time only rank 0's is known, from {METRICS}")
    seconds = {name: sum(map(_positive, run.column(f"{name}_s"))) for name in ACTIVITIES}
    run.times.append(RankTime(0, "", seconds))


def _positive(value: float) -> float:
    return value if value > 0 else 0.0


def _read_timeline(run: Run, path: Path) -> None:
    content = _read_json(run, path, "the run wrote no timeline of a step")
    damaged = 0
    for entry in tables(content, "ranks"):
        given = entry.get("events")
        given = given if isinstance(given, list) else []
        events = [event for item in given if (event := _event(item))]
        damaged += len(given) - len(events)
        rank = number(entry, "rank")
        if events and not math.isnan(rank):
            run.timeline.append(RankEvents(int(rank), printable(str(entry.get("host", ""))), events))
    if damaged:
        run.missing.append(f"{path.name}: {damaged} events that cannot be read are left out")
    step = number(content, "step")
    run.timeline_step = None if math.isnan(step) else int(step)


def _event(item: object) -> Event | None:
    """Check one event: a name, and a start that is not after the end."""
    if not isinstance(item, list) or len(item) != 3:
        return None
    start, end = number({"s": item[1]}, "s"), number({"s": item[2]}, "s")
    return (printable(str(item[0])), start, end) if start <= end else None
