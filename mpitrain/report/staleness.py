"""What servers did with gradients, how far behind the weights of these were, and how workers waited."""

import math
from collections.abc import Callable, Sequence

from mpitrain.report.chart import LEVELS, Bar, Line, bar_chart, legend, line_chart, swatches
from mpitrain.report.read import Run, number, table, tables
from mpitrain.report.sections import MAX_BANDS, MAX_RANKS, averaging, figure
from mpitrain.report.series import buckets, seconds_text
from mpitrain.report.tables import column_table
from mpitrain.train.runfolder import Row

UNKNOWN = "-"
MOST_DIGITS = 9
"""Of a number that is the name of an entry; longer ones are no worker and no staleness."""


def _count(value: float) -> str:
    return f"{value:,.0f}"


COLUMNS: dict[str, tuple[str, Callable[[float], str]]] = {
    "pushed": ("gradients pushed", _count),
    "applied": ("applied", _count),
    "dropped": ("dropped, too late", _count),
    "rejected": ("rejected", _count),
    "staleness_mean": ("staleness, mean", lambda value: f"{value:.2f}"),
    "staleness_max": ("most", _count),
    "wait_p95_s": ("wait of a step, 95 %", seconds_text),
}
"""What is told of a worker: the key of summary.json, and how it is headed and written."""


def staleness(runs: Sequence[Run]) -> list[str]:
    """Show what became of the gradients of each worker, of runs that tell; nothing where none does."""
    told = [_pushes(run, len(runs) > 1) for run in runs if _workers(run)]
    return [*told, *_over_steps(runs), *_bars(runs)]


def _workers(run: Run) -> list[Row]:
    return [entry for entry in tables(run.summary, "workers") if not math.isnan(number(entry, "worker"))]


def histogram(run: Run) -> dict[int, dict[int, float]]:
    """Return how many gradients of each worker were how stale, by the summary; entries that make no sense are not."""
    found: dict[int, dict[int, float]] = {}
    for entry in _workers(run):
        counts = table(entry, "staleness")
        known = {int(key): n for key in filter(_is_number, counts) if (n := number(counts, key)) > 0}
        found |= {int(number(entry, "worker")): known} if known else {}
    return found


def _is_number(name: str) -> bool:
    return name.isdecimal() and len(name) <= MOST_DIGITS


def _pushes(run: Run, named: bool) -> str:
    title, workers = "Gradients on the servers" + (f": {run.name}" if named else ""), _workers(run)
    shown = sorted(sorted(workers, key=_waited)[:MAX_RANKS], key=lambda entry: number(entry, "worker"))
    columns = [key for key in COLUMNS if any(not math.isnan(number(entry, key)) for entry in shown)]
    rows = {
        f"worker {number(entry, 'worker'):.0f}": [
            UNKNOWN if math.isnan(value := number(entry, key)) else COLUMNS[key][1](value) for key in columns
        ]
        for entry in shown
    }
    note = f"The {MAX_RANKS} of {len(workers)} workers that waited longest." if len(shown) < len(workers) else ""
    return figure(title, column_table([COLUMNS[key][0] for key in columns], rows, ""), note)


def _waited(entry: Row) -> float:
    waited = number(entry, "wait_p95_s")
    return 0.0 if math.isnan(waited) else -waited


def _over_steps(runs: Sequence[Run]) -> list[str]:
    """Draw the staleness of the gradients of a step, the mean over its workers."""
    lines, most = [], 0
    for style, run in enumerate(runs):
        rows = [row for row in run.rows if not math.isnan(number(row, "staleness"))]
        points = buckets([number(row, "step") for row in rows], [number(row, "staleness") for row in rows])
        band = [(point.x, point.low, point.high) for point in points] if len(runs) <= MAX_BANDS else []
        lines.append(Line(run.name, style, [(point.x, point.mean) for point in points], band))
        most = max(most, len(rows))
    if not most:
        return []
    picture = legend(lines) + line_chart(lines, "step", "staleness", zero=True)
    return [figure("Staleness, mean over workers", picture, averaging(most, "steps", shaded=len(runs) <= MAX_BANDS))]


def _bars(runs: Sequence[Run]) -> list[str]:
    """Draw a bar a worker: how many of its gradients were how stale."""
    bars: list[Bar] = []
    notes = [
        "Updates, or clocks, by which the weights of an applied gradient were behind; at the end mean and maximum."
    ]
    for run in runs:
        workers = histogram(run)
        bars += [Bar(run.name)] if len(runs) > 1 and workers else []
        shown = sorted(sorted(workers, key=lambda worker: -_mean(workers[worker]))[:MAX_RANKS])
        bars += [_bar(worker, workers[worker]) for worker in shown]
        if len(shown) < len(workers):
            notes.append(f"{run.name}: the {MAX_RANKS} of {len(workers)} workers that were stalest.")
    if not bars:
        return []
    title = "Staleness of gradients"
    used = [name for name in LEVELS if any(name in bar.parts for bar in bars)]
    return [figure(title, swatches(used) + bar_chart(bars, title), " ".join(notes))]


def _bar(worker: int, counts: dict[int, float]) -> Bar:
    parts = dict.fromkeys(LEVELS, 0.0)
    for value, times in counts.items():
        parts[list(LEVELS)[min(value.bit_length(), len(LEVELS) - 1)]] += times
    filled = {name: times for name, times in parts.items() if times}
    return Bar(f"worker {worker}", filled, f"{_mean(counts):.2f}, ≤ {max(counts)}")


def _mean(counts: dict[int, float]) -> float:
    return sum(value * times for value, times in counts.items()) / sum(counts.values())
