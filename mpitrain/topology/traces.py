"""Files with the rate of a link over time: mahimahi's packet times, and CSV."""

from bisect import bisect_right
from itertools import groupby, pairwise
from math import isfinite
from pathlib import Path
from statistics import median

from mpitrain.config.plain import printable, shown
from mpitrain.errors import ConfigError
from mpitrain.topology.files import read_text
from mpitrain.topology.rates import BYTES_S, Trace

MAX_CHARACTERS = 64_000_000
MAX_MBPS = 1e6
MAX_MS = 86_400_000

PACKET_BYTES = 1500
"""What may leave at each time of a mahimahi file."""

BIN_MS = 10
"""Packet times within so many milliseconds are taken together: a rate rather than single moments."""

CSV_HEAD = "time_s,mbps"
GAP = 1.5
"""Distance of two lines of a CSV file, in terms of the usual one, that shows that lines are missing."""


def read_trace(path: Path) -> Trace:
    """Read a trace; mahimahi's and CSV files are told apart by their first line.

    mahimahi: a line for each packet of 1500 bytes, with the millisecond at which it may leave; the last one is the
    period. CSV: the line ``time_s,mbps``, then lines at even distances, each of which holds until the next.

    Raises
    ------
    ConfigError
        Where the file cannot be read or is none of these, and where times go back, lines are missing, or rates are
        negative or all zero.
    """
    origin = printable(str(path))
    lines = _lines(path, origin)
    first = lines[0].strip()
    if first.replace(" ", "").lower() == CSV_HEAD:
        starts, rates, period = _csv(lines[1:], origin)
    elif first.isascii() and first.isdigit():
        starts, rates, period = _mahimahi(lines, origin)
    else:
        raise ConfigError(
            f"trace {origin}: line 1: expected {CSV_HEAD}, or the millisecond of a packet (mahimahi's format), "
            f"got {shown(first)}"
        )
    if not any(rates):
        raise ConfigError(f"trace {origin}: all rates are zero; a link that never carries anything is left out")
    return Trace(*_merged(starts, rates), period, file=str(path))


def _lines(path: Path, origin: str) -> list[str]:
    """Read the lines of a text file, without empty ones at its end."""
    lines = read_text(path, MAX_CHARACTERS, f"trace {origin}").rstrip().split("\n")
    if lines == [""]:
        raise ConfigError(f"trace {origin}: expected at least two lines, got an empty file")
    return lines


def _mahimahi(lines: list[str], origin: str) -> tuple[list[float], list[float], float]:
    """Count packets in bins; the packet of millisecond m leaves in the millisecond that ends then."""
    times = [_millisecond(line, number, origin) for number, line in enumerate(lines, 1)]
    for number, (before, after) in enumerate(pairwise(times), 2):
        if after < before:
            raise ConfigError(f"trace {origin}: line {number}: times go back, from {before} to {after} ms; sort them")
    period_ms = times[-1]
    if not 0 < period_ms <= MAX_MS:
        raise ConfigError(f"trace {origin}: expected the last line, its period, at 1 to {MAX_MS} ms, got {period_ms}")
    starts_ms = range(0, period_ms, BIN_MS)
    ends_ms = [*starts_ms[1:], period_ms]
    left = [0, *(bisect_right(times, end) for end in ends_ms)]
    packets = (after - before for before, after in pairwise(left))
    spans = zip(packets, starts_ms, ends_ms, strict=True)
    rates = [count * PACKET_BYTES / (end - start) * 1000 for count, start, end in spans]
    return [start / 1000 for start in starts_ms], rates, period_ms / 1000


def _millisecond(line: str, number: int, origin: str) -> int:
    text = line.strip()
    if not (text.isascii() and text.isdigit() and len(text) <= 12):
        raise ConfigError(f"trace {origin}: line {number}: expected a whole number of milliseconds, got {shown(text)}")
    return int(text)


def _csv(lines: list[str], origin: str) -> tuple[list[float], list[float], float]:
    rows = [_row(line, number, origin) for number, line in enumerate(lines, 2)]
    if len(rows) < 2:
        raise ConfigError(f"trace {origin}: expected at least two lines after the first, got {len(rows)}")
    times = [time for time, _ in rows]
    steps = [after - before for before, after in pairwise(times)]
    _refuse_gaps(times, steps, median(steps), origin)
    starts = [time - times[0] for time in times]
    return starts, [mbps * BYTES_S for _, mbps in rows], starts[-1] + median(steps)


def _refuse_gaps(times: list[float], steps: list[float], usual: float, origin: str) -> None:
    """Refuse times that go back or stand still, and steps that are longer than the usual ones."""
    for number, (before, step) in enumerate(zip(times, steps, strict=False), 3):
        if step <= 0:
            raise ConfigError(
                f"trace {origin}: line {number}: expected a time later than {before:g} s, got {before + step:g}; "
                "sort the lines"
            )
    for number, step in enumerate(steps, 3):
        if step > GAP * usual:
            raise ConfigError(
                f"trace {origin}: line {number}: a gap of {step:g} s, where lines are {usual:g} s apart; "
                "add the missing lines, with 0 where nothing was carried"
            )


def _row(line: str, number: int, origin: str) -> tuple[float, float]:
    """Read the time and the rate of a line."""
    cells = line.split(",")
    try:
        time, mbps = (float(cell) for cell in cells)
    except ValueError:
        time = mbps = float("nan")
    if not (isfinite(time) and 0 <= mbps <= MAX_MBPS):
        raise ConfigError(
            f"trace {origin}: line {number}: expected seconds and a rate of 0 to {MAX_MBPS:g} Mbit/s, "
            f"got {shown(line.strip())}"
        )
    return time, mbps


def _merged(starts: list[float], rates: list[float]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Join neighbouring steps of the same rate."""
    firsts = [next(group) for _, group in groupby(range(len(rates)), key=rates.__getitem__)]
    return tuple(starts[first] for first in firsts), tuple(rates[first] for first in firsts)
