"""How far behind the weights of gradients were, and how ranks have waited: of runs that tell."""

import math
from collections.abc import Callable, Sequence

from mpitrain.report.chart import LEVELS, Bar, Line, bar_chart, legend, line_chart, swatches
from mpitrain.report.read import Run, number, printable, table, tables
from mpitrain.report.sections import MAX_BANDS, MAX_RANKS, averaging, figure, rank_label
from mpitrain.report.series import buckets, seconds_text
from mpitrain.report.tables import column_table
from mpitrain.train.runfolder import Row

UNKNOWN = "-"
MOST_DIGITS = 9
"""Of a number that is the name of an entry; longer ones are no worker and no staleness."""


def _count(value: float) -> str:
    return f"{value:,.0f}"


COLUMNS: dict[str, tuple[str, Callable[[float], str]]] = {
    "wait_s": ("waited", seconds_text),
    "wait_p95_s": ("wait of a step, 95 %", seconds_text),
    "pushed": ("gradients pushed", _count),
    "applied": ("applied", _count),
    "dropped": ("dropped", _count),
}
"""What is told of a rank: the key of summary.json, and how it is headed and written."""

TELLING = ("wait_p95_s", "pushed", "applied", "dropped")
"""Keys without which the waiting of a rank is told by the picture of times alone."""


def staleness(runs: Sequence[Run]) -> list[str]:
    """Show waiting and staleness of the runs that tell of them; nothing where none does."""
    named = len(runs) > 1
    return [*(_waiting(run, named) for run in runs if _ranks(run)), *_over_steps(runs), *_bars(runs)]


def histogram(run: Run) -> dict[int, dict[int, float]]:
    """Return how many gradients of each worker were how stale, by the summary; entries that make no sense are not."""
    workers = table(table(run.summary, "staleness"), "histogram")
    found: dict[int, dict[int, float]] = {}
    for worker in filter(_is_number, workers):
        counts = table(workers, worker)
        found[int(worker)] = {int(key): n for key in filter(_is_number, counts) if (n := number(counts, key)) > 0}
    return {worker: found[worker] for worker in sorted(found) if found[worker]}


def _is_number(name: str) -> bool:
    return name.isdecimal() and len(name) <= MOST_DIGITS


def _ranks(run: Run) -> list[Row]:
    """List the ranks of which more than their time is told."""
    ranks = [entry for entry in tables(run.summary, "per_rank") if not math.isnan(number(entry, "rank"))]
    return ranks if any(not math.isnan(number(entry, key)) for entry in ranks for key in TELLING) else []


def _waiting(run: Run, named: bool) -> str:
    title, ranks = "Waiting" + (f": {run.name}" if named else ""), _ranks(run)
    shown = sorted(sorted(ranks, key=_waited)[:MAX_RANKS], key=lambda entry: number(entry, "rank"))
    columns = [key for key in COLUMNS if any(not math.isnan(number(entry, key)) for entry in shown)]
    rows = {
        rank_label(int(number(entry, "rank")), printable(str(entry.get("host", "")))): [
            UNKNOWN if math.isnan(value := number(entry, key)) else COLUMNS[key][1](value) for key in columns
        ]
        for entry in shown
    }
    note = f"The {MAX_RANKS} of {len(ranks)} ranks that waited longest." if len(shown) < len(ranks) else ""
    return figure(title, column_table([COLUMNS[key][0] for key in columns], rows, ""), note)


def _waited(entry: Row) -> float:
    waited = number(entry, "wait_s")
    return 0.0 if math.isnan(waited) else -waited


def _over_steps(runs: Sequence[Run]) -> list[str]:
    """Draw the staleness of rank 0's gradients over its steps."""
    lines, most = [], 0
    for style, run in enumerate(runs):
        rows = [row for row in run.rows if not math.isnan(number(row, "staleness"))]
        points = buckets([number(row, "step") for row in rows], [number(row, "staleness") for row in rows])
        band = [(point.x, point.low, point.high) for point in points] if len(runs) <= MAX_BANDS else []
        lines.append(Line(run.name, style, [(point.x, point.mean) for point in points], band))
        most = max(most, len(rows))
    if not most:
        return []
    picture = legend(lines) + line_chart(lines, "step", "staleness on rank 0", zero=True)
    return [figure("Staleness", picture, averaging(most, "steps", shaded=len(runs) <= MAX_BANDS))]


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
