"""Numbers made ready for drawing: fewer points, running sums, units."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

MAX_POINTS = 80
"""Of a line: more could not be told apart in print, and the means of that many buckets are calm enough to compare."""


@dataclass(frozen=True)
class Bucket:
    """Consecutive rows in one point; mean, low and high are NaN where no row has a number."""

    x: float
    mean: float
    low: float
    high: float


def bucket_size(rows: int) -> int:
    """Rows that share a point."""
    return max(1, math.ceil(rows / MAX_POINTS))


def buckets(x: Sequence[float], y: Sequence[float]) -> list[Bucket]:
    """Average consecutive rows, and keep their extremes: nothing that was measured falls outside low … high."""
    size = bucket_size(len(x))
    found = []
    for start in range(0, len(x), size):
        xs = x[start : start + size]
        ys = [value for value in y[start : start + size] if not math.isnan(value)] or [math.nan]
        found.append(Bucket(sum(xs) / len(xs), math.fsum(ys) / len(ys), min(ys), max(ys)))
    return found


def thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Keep the last point of every bucket: enough of what only rises."""
    return points[:: -bucket_size(len(points))][::-1]


def running_sum(values: Sequence[float]) -> list[float]:
    """Sum up to and including each value; NaN adds nothing."""
    total, sums = 0.0, []
    for value in values:
        total += 0.0 if math.isnan(value) else value
        sums.append(total)
    return sums


BYTE_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))
SECOND_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


def unit(largest: float, units: Sequence[tuple[float, str]]) -> tuple[float, str]:
    """Choose the unit in which the largest value is 1 or more; the smallest where none is."""
    return next((entry for entry in units if largest >= entry[0]), units[-1])


def bytes_text(value: float) -> str:
    """Write bytes for people, powers of ten."""
    size, name = unit(value, BYTE_UNITS)
    return f"{value / size:,.0f} {name}" if size == 1 else f"{value / size:,.1f} {name}"


def seconds_text(value: float) -> str:
    """Write a duration for people."""
    if value >= 60:
        minutes, seconds = divmod(round(value), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02} min"
    size, name = unit(value, SECOND_UNITS)
    return f"{value / size:.3g} {name}" if value else "0 s"
