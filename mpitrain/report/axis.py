"""Axes: round ticks, their labels, and the way from a value to a place."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

LOG_RANGE = 50
"""Ratio of the largest to the smallest value from which on a linear axis would hide the small ones."""

SMALLEST = 1e-280
"""Below it differences and powers of ten are not safe from becoming zero."""


@dataclass(frozen=True)
class Axis:
    """From values to places between ``start`` and ``end`` (in units of the picture)."""

    ticks: list[float]
    start: float
    end: float
    log: bool = False
    names: tuple[str, ...] = ()
    """Labels of the ticks, where they are no bare numbers."""

    def place(self, value: float) -> float:
        """Return where a value is drawn."""
        low, high, at = self.ticks[0], self.ticks[-1], value
        if self.log:
            low, high, at = math.log10(low), math.log10(high), math.log10(value)
        return self.start + (at - low) / (high - low) * (self.end - self.start)

    def labels(self) -> list[str]:
        """Write the ticks with as many decimals as they need."""
        if self.names:
            return list(self.names)
        if self.log:
            return [f"{tick:g}" for tick in self.ticks]
        step, largest = self.ticks[1] - self.ticks[0], max(map(abs, self.ticks))
        if step < 1e-6 or largest >= 1e9:
            return [f"{tick:.6g}" for tick in self.ticks]
        decimals = max(0, -math.floor(math.log10(step) + 1e-9))
        return [f"{tick:,.{decimals}f}" for tick in self.ticks]


def make_axis(
    values: Iterable[float], start: float, end: float, *, zero: bool = False, log: bool = False, least: float = 0.0
) -> Axis:
    """Lay an axis around the numbers among ``values``; ``zero`` makes it begin at 0.

    ``log`` allows a logarithmic one, which is taken where all values are positive and range over more than LOG_RANGE.
    ``least`` bounds the distance of linear ticks from below: 1 for what is counted.
    """
    finite = [value for value in values if not math.isnan(value)] or [0.0]
    low, high = min(finite), max(finite)
    if log and low > SMALLEST and high > LOG_RANGE * low:
        return Axis(log_ticks(low, high), start, end, log=True)
    return Axis(linear_ticks(min(low, 0.0) if zero else low, high, least=least), start, end)


def linear_ticks(low: float, high: float, *, least: float = 0.0, wanted: int = 5) -> list[float]:
    """Return multiples of 1, 2 or 5 times a power of ten from below ``low`` to above ``high``; two at least."""
    largest = max(abs(low), abs(high))
    if high - low <= max(1e-9 * largest, SMALLEST):
        margin = 0.1 * largest if largest > SMALLEST else 1.0
        low, high = (low - margin, high + margin) if low else (0.0, margin)
    raw = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(raw))
    step = max(least, next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9)))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [count * step for count in range(first, max(last, first + 1) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Return powers of ten from below ``low`` to above ``high``, thinned to eight or fewer."""
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    stride = max(1, math.ceil((last - first) / 7))
    return [10.0**exponent for exponent in range(first, last + stride, stride)]
