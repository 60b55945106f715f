"""Where names of points are written, so that none lies on another, on a point or on a line."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

CHARACTER, TALL = 6.9, 13.0
"""Size of a character in units of the picture; most are narrower."""

NEAR = 9.0
"""Distance from a point at which a label needs no line to it."""

CLEAR = 8.0
"""Distance that a label keeps from points which are not its own."""

DISTANCES = (NEAR, 18.0, 28.0, 40.0, 54.0, 70.0, 90.0, 115.0, 145.0)
BELOW = (0, -8, 40, 15, 65, -40, 90, -75, -83, -87, -90, 140)
ABOVE = (-140, 180, -90, 140, -40, 0, 90)
"""Degrees, clockwise from the right, in the order of preference: first to the right below, or to the left above."""

Place = tuple[float, float]


@dataclass(frozen=True)
class Box:
    """A rectangle in the picture, y downwards."""

    left: float
    top: float
    right: float
    bottom: float

    def holds(self, place: Place, margin: float = 0.0) -> bool:
        """Tell whether a place lies inside, or not farther than ``margin`` outside."""
        x, y = place
        return self.left - margin <= x <= self.right + margin and self.top - margin <= y <= self.bottom + margin

    def meets(self, other: "Box") -> bool:
        """Tell whether two boxes share a place."""
        return (
            self.left < other.right and other.left < self.right and self.top < other.bottom and other.top < self.bottom
        )

    def within(self, other: "Box") -> bool:
        """Tell whether this box lies inside the other one."""
        return other.holds((self.left, self.top)) and other.holds((self.right, self.bottom))

    def nearest(self, place: Place) -> Place:
        """Return the place of the box that lies nearest."""
        return min(max(place[0], self.left), self.right), min(max(place[1], self.top), self.bottom)


@dataclass(frozen=True)
class Label:
    """A text in its box, and the place that it names."""

    text: str
    box: Box
    of: Place

    @property
    def leader(self) -> tuple[Place, Place] | None:
        """Return the ends of a line to the point; None where the label is near enough without."""
        end = self.box.nearest(self.of)
        return (self.of, end) if math.dist(self.of, end) > NEAR + 1 else None


@dataclass(frozen=True)
class Name:
    """A text to be written at a place; ``directions`` in the order of preference, in degrees."""

    text: str
    of: Place
    directions: Sequence[int] = BELOW


def place_labels(names: Sequence[Name], lines: Sequence[Sequence[Place]], area: Box) -> list[Label | None]:
    """Find a box for every name; None where there is no room. Those that fit beside their point come first.

    Parameters
    ----------
    lines : list of list of place
        Drawn from place to place; no name may lie on them.
    area : Box
        Where names may lie.
    """
    taken = [name.of for name in names]
    drawn = [place for line in lines for place in _along(line)]
    found: dict[int, Label] = {}
    for distances, clear in ((DISTANCES[:1], CLEAR), (DISTANCES, CLEAR), (DISTANCES, CLEAR / 2)):
        for index, name in enumerate(names):
            if index in found:
                continue
            options = _candidates(name, distances)
            free = (each for each in options if _free(each, [*found.values()], taken, drawn, area, clear=clear))
            if label := next(free, None):
                found[index] = label
                drawn += _along(label.leader) if label.leader else []
    return [found.get(index) for index in range(len(names))]


def _candidates(name: Name, distances: Sequence[float]) -> Iterator[Label]:
    width, of = CHARACTER * len(name.text), name.of
    for distance in distances:
        for direction in name.directions:
            dx, dy = math.cos(math.radians(direction)), math.sin(math.radians(direction))
            x, y = of[0] + distance * dx, of[1] + distance * dy
            left = x - width / 2 if abs(dx) < 0.01 else x - width * (dx < 0)
            top = y - TALL / 2 if abs(dy) < 0.1 else y - TALL * (dy < 0)
            yield Label(name.text, Box(left, top, left + width, top + TALL), of)


def _free(
    label: Label, placed: Sequence[Label], taken: Sequence[Place], drawn: Sequence[Place], area: Box, *, clear: float
) -> bool:
    """Tell whether a label, and the line to it, meet nothing else."""
    box = label.box
    if not box.within(area) or any(box.meets(other.box) for other in placed):
        return False
    others = [place for place in taken if math.dist(place, label.of) > CLEAR]  # who is nearer cannot be told apart
    if any(box.holds(place, clear) for place in others) or any(box.holds(place, 1.0) for place in [*taken, *drawn]):
        return False
    leader = _along(label.leader) if label.leader else []
    return not any(
        any(other.box.holds(place, 1.0) for other in placed) or any(math.dist(place, other) < 4 for other in others)
        for place in leader
    )


def _along(line: Sequence[Place]) -> list[Place]:
    """List places on a line, close enough that no label slips between them."""
    places = list(line[:1])
    for (a, b), (c, d) in pairwise(line):
        steps = max(1, math.ceil(math.dist((a, b), (c, d)) / 3))
        places += [(a + (c - a) * i / steps, b + (d - b) * i / steps) for i in range(1, steps + 1)]
    return places
