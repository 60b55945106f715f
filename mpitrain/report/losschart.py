"""The picture of losses against bytes: points with whiskers, a logarithmic axis of bytes and of times less."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from mpitrain.report.axis import Axis, linear_ticks
from mpitrain.report.chart import BOTTOM, HEIGHT, LEFT, RIGHT, TALL, TOP, Line, axes, curve, shade, svg, write_label
from mpitrain.report.labels import Box, Name, place_labels

MARGIN = 40
"""Room to the right of the last tick, for half its label."""

TICKS = 7
"""As many labels of bytes fit beside each other."""

GOOD = 1.0
"""Half the width of the band, in percent."""


@dataclass(frozen=True)
class LossMark:
    """A cell: bytes of all ranks, difference of the loss in percent, half its interval (NaN: unknown)."""

    name: str
    nbytes: float
    percent: float
    half: float

    @property
    def ends(self) -> tuple[float, float]:
        """Ends of the interval; the point itself where it is unknown."""
        half = 0.0 if math.isnan(self.half) else self.half
        return self.percent - half, self.percent + half


def loss_chart(marks: Sequence[LossMark], yardstick: float, y_label: str) -> tuple[str, list[str]]:
    """Draw cells; return the picture, and the names for which there was no room."""
    x, bottom = byte_axis([mark.nbytes for mark in marks], yardstick), BOTTOM + TALL
    ys = [end for mark in marks for end in mark.ends] + [-GOOD, GOOD]
    y = Axis(linear_ticks(min(ys), max(ys), wanted=8), bottom, TOP)
    ends = x.ticks[0], x.ticks[-1]
    zero = Line("no difference", None, [(at, 0.0) for at in ends], [(at, -GOOD, GOOD) for at in ends])
    ordered = sorted(marks, key=lambda mark: (mark.nbytes, mark.percent))
    names = [Name(mark.name, (x.place(mark.nbytes), y.place(mark.percent))) for mark in ordered]
    whiskers = [[(x.place(mark.nbytes), y.place(end)) for end in mark.ends] for mark in ordered]
    level = [(x.place(at), y.place(0.0)) for at in ends]
    labels = place_labels(names, [level, *whiskers], Box(LEFT, TOP, RIGHT, bottom))
    parts = [*axes(x, y, "bytes of all ranks (÷ times less), log", y_label), shade(zero, x, y), curve(zero, x, y)]
    for mark, name, ((at, low), (_, high)) in zip(ordered, names, whiskers, strict=True):
        if low > high:
            caps = "".join(f"M{at - 4:.1f} {end:.1f}h8" for end in (low, high))
            parts.append(f'<path class="whisker" d="M{at:.1f} {low:.1f}V{high:.1f}{caps}"/>')
        note = escape(
            f"{mark.name}: {mark.percent:+.2f} % at {size(mark.nbytes)}, {yardstick / mark.nbytes:.4g} times less"
        )
        parts.append(f'<circle class="c0" cx="{at:.1f}" cy="{name.of[1]:.1f}" r="3.5"><title>{note}</title></circle>')
    parts += [write_label(label) for label in labels if label]
    unnamed = [name.text for name, label in zip(names, labels, strict=True) if not label]
    return svg("final loss against bytes of all ranks", HEIGHT + TALL, parts), unnamed


def byte_axis(values: Sequence[float], yardstick: float) -> Axis:
    """Lay a logarithmic axis whose ticks are the yardstick's bytes divided by round numbers."""
    most, least = yardstick / min(*values, yardstick), yardstick / max(*values, yardstick)
    first, last = math.floor(math.log10(least) + 1e-9), math.ceil(math.log10(most) - 1e-9)
    for steps in ((1, 2, 5), (1, 3), (1,)):
        every = [step * 10.0**power for power in range(first, last + 1) for step in steps]
        below = max(time for time in every if time <= least * (1 + 1e-9))
        above = min(time for time in [*every, 10.0 ** (last + 1)] if time >= most * (1 - 1e-9) and time > below)
        times = [time for time in every if below <= time < above] + [above]
        if len(times) <= TICKS:
            break
    times = times[:: math.ceil(len(times) / TICKS)] + times[-1:] if len(times) > TICKS else times
    times = sorted(set(times), reverse=True)
    names = [f"{size(yardstick / time)} (÷{time:g})" for time in times]
    return Axis([yardstick / time for time in times], LEFT, RIGHT - MARGIN, log=True, names=tuple(names))


def size(nbytes: float) -> str:
    """Write bytes with a decimal prefix."""
    for unit, prefix in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if nbytes >= 0.9995 * unit:
            return f"{nbytes / unit:.3g} {prefix}"
    return f"{nbytes:.3g} B"
