"""Pictures as inline SVG: lines, stacked bars, lanes of events. Colours come from the style sheet of the page."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise
from typing import TypeVar

from mpitrain.report.axis import Axis, linear_ticks, make_axis
from mpitrain.report.labels import ABOVE, Box, Label, Name, place_labels

WIDTH, HEIGHT = 720, 300
LEFT, RIGHT, TOP, BOTTOM = 66, 704, 12, 256
TALL = 180
"""By how much a picture of points is taller than one of lines: names need room."""

BAR_LEFT, BAR_RIGHT = 150, 640
ROW = 20
"""Height of a bar with its gap."""

STYLES = 6
"""Colours; with the four dash patterns, twelve lines differ."""

Band = list[tuple[float, float, float]]
Point = TypeVar("Point", bound=tuple[float, ...])


@dataclass(frozen=True)
class Line:
    """A line of a chart; a point whose y is NaN interrupts it.

    Attributes
    ----------
    name : str
        For the legend.
    style : int
        Number of its colour and dash pattern; None for a yardstick, drawn thin and grey.
    band : list of (x, low, high)
        Range that is shaded behind the line.
    dots : bool
        Mark every point: they are few.
    """

    name: str
    style: int | None
    points: list[tuple[float, float]]
    band: Band = field(default_factory=list)
    dots: bool = False

    @property
    def css(self) -> str:
        """Classes of the style sheet."""
        return "yardstick" if self.style is None else f"c{self.style % STYLES} d{self.style % 4}"


def line_chart(lines: Sequence[Line], x_label: str, y_label: str, *, zero: bool = False) -> str:
    """Draw lines over a common x axis that begins at 0; y is logarithmic where that shows more, unless ``zero``."""
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points] + [y for line in lines for row in line.band for y in row[1:]]
    x = make_axis(xs, LEFT, RIGHT, zero=True, least=1.0 if x_label == "step" else 0.0)
    y = make_axis(ys, BOTTOM, TOP, zero=zero, log=not zero)
    parts = axes(x, y, x_label, y_label)
    parts += [shade(line, x, y) for line in lines if line.band]
    parts += [curve(line, x, y) for line in lines]
    return svg(f"{y_label} over {x_label}", HEIGHT, parts)


@dataclass(frozen=True)
class Mark:
    """A point with a name."""

    name: str
    x: float
    y: float


def point_chart(marks: Sequence[Mark], lines: Sequence[Line], x_label: str, y_label: str) -> tuple[str, list[str]]:
    """Draw points with their names beside lines, both axes from 0 on.

    Returns
    -------
    picture : str
    unnamed : list of str
        Names for which there was no room.
    """
    places = [(mark.x, mark.y) for mark in marks] + [place for line in lines for place in line.points]
    xs, ys = zip(*places, strict=True)
    x = Axis(linear_ticks(min(0.0, *xs), max(xs), wanted=9), LEFT, RIGHT)
    y = Axis(linear_ticks(min(0.0, *ys), max(ys), wanted=8), BOTTOM + TALL, TOP)
    curves = [[(x.place(a), y.place(b)) for a, b in line.points] for line in lines]
    # From the left: there, where rates are low, points lie closest. A line is named at its middle, as there is room.
    ordered = sorted(marks, key=lambda mark: (mark.x, mark.y))
    names = [Name(mark.name, (x.place(mark.x), y.place(mark.y))) for mark in ordered]
    names += [Name(line.name, _middle(curve), ABOVE) for line, curve in zip(lines, curves, strict=True)]
    labels = place_labels(names, curves, Box(LEFT, TOP, RIGHT, BOTTOM + TALL))
    parts = [*axes(x, y, x_label, y_label), *(curve(line, x, y) for line in lines)]
    for mark, name in zip(ordered, names, strict=False):
        note = escape(f"{mark.name}: {mark.y:.4g} {y_label} at {mark.x:.4g} {x_label}")
        left, top = name.of
        parts.append(f'<circle class="c0" cx="{left:.1f}" cy="{top:.1f}" r="3.5"><title>{note}</title></circle>')
    parts += [write_label(label) for label in labels if label]
    unnamed = [name.text for name, label in zip(names, labels, strict=True) if not label]
    return svg(f"{y_label} over {x_label}", HEIGHT + TALL, parts), unnamed


def _middle(curve: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return a place half-way between the ends of a rising curve, as far as x goes."""
    half = (curve[0][0] + curve[-1][0]) / 2
    for (a, b), (c, d) in pairwise(curve):
        if a <= half <= c and a < c:
            return half, b + (half - a) / (c - a) * (d - b)
    return curve[0]


def write_label(label: Label) -> str:
    """Write a name from the side on which its point lies, so that other fonts change the far end only."""
    box, (x, _) = label.box, label.of
    centre = (box.left + box.right) / 2
    anchor = "middle" if abs(centre - x) < 1 else "start" if centre > x else "end"
    at = {"middle": centre, "start": box.left, "end": box.right}[anchor]
    text = _text(at, box.bottom - 3, label.text, anchor, "name")
    if label.leader:
        (a, b), (c, d) = label.leader
        text = f'<path class="leader" d="M{a:.1f} {b:.1f}L{c:.1f} {d:.1f}"/>' + text
    return text


def axes(x: Axis, y: Axis, x_label: str, y_label: str) -> list[str]:
    """Draw the grid, its ticks and the names of both axes."""
    return [*_grid(x, y), *_axis_names(x, y, x_label, y_label)]


def _axis_names(x: Axis, y: Axis, x_label: str, y_label: str) -> list[str]:
    return [
        _text(x.end, y.start + 36, x_label, "end"),
        f'<text class="axis" transform="translate(14 {(y.start + y.end) / 2:g}) rotate(-90)" text-anchor="middle">'
        f"{escape(y_label + (' (log)' if y.log else ''))}</text>",
    ]


def _grid(x: Axis, y: Axis) -> list[str]:
    parts = []
    for tick, label in zip(x.ticks, x.labels(), strict=True):
        place = x.place(tick)
        parts.append(
            f'<path class="grid" d="M{place:.1f} {y.end:g}V{y.start:g}"/>' + _text(place, y.start + 17, label, "middle")
        )
    for tick, label in zip(y.ticks, y.labels(), strict=True):
        place = y.place(tick)
        parts.append(f'<path class="grid" d="M{LEFT} {place:.1f}H{RIGHT}"/>' + _text(LEFT - 7, place + 4, label, "end"))
    return parts


def shade(line: Line, x: Axis, y: Axis) -> str:
    """Shade from the smallest to the largest value, interrupted where there are none."""
    path = ""
    for run in _unbroken(line.band):
        upper = [f"{x.place(at):.1f} {y.place(high):.1f}" for at, _, high in run]
        lower = [f"{x.place(at):.1f} {y.place(low):.1f}" for at, low, _ in reversed(run)]
        path += "M" + "L".join(upper + lower) + "Z"
    return f'<path class="band {line.css}" d="{path}"/>'


def curve(line: Line, x: Axis, y: Axis) -> str:
    """Draw the points of a line, interrupted where there are none."""
    runs = list(_unbroken(line.points))
    path = "".join("M" + "L".join(f"{x.place(a):.1f} {y.place(b):.1f}" for a, b in run) for run in runs)
    text = f'<path class="line {line.css}" d="{path}"><title>{escape(line.name)}</title></path>'
    for run in runs:
        for a, b in run:
            if line.dots or len(run) == 1:  # a line of one point would not be seen
                title = escape(f"{line.name}: {b:.5g} at {a:,.6g}")
                text += f'<circle class="{line.css}" cx="{x.place(a):.1f}" cy="{y.place(b):.1f}" r="3">'
                text += f"<title>{title}</title></circle>"
    return text


def _unbroken(points: Sequence[Point]) -> list[list[Point]]:
    """Split where a number is missing."""
    runs: list[list[Point]] = [[]]
    for point in points:
        if any(map(math.isnan, point)):
            runs.append([])
        else:
            runs[-1].append(point)
    return [run for run in runs if run]


def legend(lines: Sequence[Line]) -> str:
    """Name the lines, each beside a piece of it; nothing for a single one without a yardstick."""
    items = [
        f'<li><svg width="34" height="10" aria-hidden="true"><path class="line {line.css}" d="M1 5H33"/></svg> '
        f"{escape(line.name)}</li>"
        for line in lines
    ]
    return f'<ul class="legend">{"".join(items)}</ul>' if len(lines) > 1 else ""


def swatches(names: Sequence[str]) -> str:
    """Name the colours of activities."""
    items = [
        f'<li><svg width="12" height="12" aria-hidden="true"><rect class="{activity_css(name)}" width="12" '
        f'height="12"/></svg> {escape(name)}</li>'
        for name in names
    ]
    return f'<ul class="legend">{"".join(items)}</ul>'


ACTIVITIES = ("read", "forward", "backward", "update", "compute", "encode", "decode", "wait")
LEVELS = {"0": "s0", "1": "s1", "2-3": "s2", "4-7": "s3", "8 or more": "s4"}
"""Classes of how stale a gradient is, from good to bad; each is twice as wide as the one before."""


def activity_css(name: str) -> str:
    """Class of the colour of an activity or level; unknown ones share a neutral colour."""
    return f"a-{LEVELS.get(name, name)}" if name in ACTIVITIES or name in LEVELS else "a-other"


@dataclass(frozen=True)
class Bar:
    """A row: label, its parts by activity, and a text at the end. A row without parts is a heading."""

    label: str
    parts: dict[str, float] = field(default_factory=dict)
    text: str = ""


def bar_chart(bars: Sequence[Bar], title: str) -> str:
    """Draw one stacked bar a row, all to the same scale; parts that are wide enough tell their share."""
    longest = max([sum(bar.parts.values()) for bar in bars] or [0.0]) or 1.0
    parts, top = [], 4.0
    for bar in bars:
        start, total = float(BAR_LEFT), sum(bar.parts.values()) or 1.0
        heading = not bar.parts
        parts.append(_text(0 if heading else BAR_LEFT - 8, top + 13, bar.label, "start" if heading else "end"))
        for name, value in bar.parts.items():
            width = value / longest * (BAR_RIGHT - BAR_LEFT)
            share = f"{value / total:.0%}"
            parts.append(
                f'<rect class="{activity_css(name)}" x="{start:.1f}" y="{top:g}" width="{width:.1f}" '
                f'height="{ROW - 4}"><title>{escape(f"{name} {share}")}</title></rect>'
            )
            parts += [_text(start + width / 2, top + 12.5, share, "middle", "inside")] if width > 34 else []
            start += width
        parts.append(_text(start + 6, top + 13, bar.text, "start"))
        top += ROW
    return svg(title, top + 4, parts)


Lane = tuple[str, list[tuple[str, float, float]]]


def lane_chart(lanes: Sequence[Lane], x_label: str, title: str) -> str:
    """Draw events as boxes on one lane a row; what takes least time in all lies on top, so that it is seen."""
    bottom = TOP + ROW * len(lanes) + 4
    x = make_axis([time for _, events in lanes for event in events for time in event[1:]], BAR_LEFT, RIGHT, zero=True)
    parts = []
    for tick, label in zip(x.ticks, x.labels(), strict=True):
        place = x.place(tick)
        parts.append(
            f'<path class="grid" d="M{place:.1f} {TOP}V{bottom}"/>' + _text(place, bottom + 17, label, "middle")
        )
    for row, (label, events) in enumerate(lanes):
        top = TOP + ROW * row + 3
        parts.append(_text(BAR_LEFT - 8, top + 12, label, "end"))
        parts += _boxes(label, events, top, x.place)
    parts.append(_text(RIGHT, bottom + 36, x_label, "end"))
    return svg(title, bottom + 44, parts)


def _boxes(
    label: str, events: Sequence[tuple[str, float, float]], top: float, place: Callable[[float], float]
) -> list[str]:
    """Draw all events of a name as one path: many small ones cost few bytes."""
    total: dict[str, float] = {}
    for name, start, end in events:
        total[name] = total.get(name, 0.0) + end - start
    paths = []
    for name in sorted(total, key=lambda name: -total[name]):
        boxes = [(place(start), place(end)) for other, start, end in events if other == name]
        path = "".join(f"M{a:.1f} {top:g}H{max(b, a + 0.3):.1f}v{ROW - 6}H{a:.1f}z" for a, b in boxes)
        note = escape(f"{label} {name}: {len(boxes)} times")
        paths.append(f'<path class="{activity_css(name)}" d="{path}"><title>{note}</title></path>')
    return paths


def _text(x: float, y: float, text: str, anchor: str, css: str = "axis") -> str:
    return f'<text class="{css}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>' if text else ""


def svg(title: str, height: float, parts: Sequence[str]) -> str:
    """Put parts into a picture that tells its title to who cannot see it."""
    return f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(title)}">' + "".join(parts) + "</svg>"
