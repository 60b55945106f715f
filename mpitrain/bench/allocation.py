"""Which tensor gets how many bytes: reverse water-filling where every tensor has a few ways to be coded.

Shannon's water-filling gives independent Gaussian sources of variance σ² the errors min(θ, σ²): bits go where the next
one lowers the error most. With a finite list of ways the same is a descent along every tensor's lower convex hull of
error over bytes, the steepest edge of all first (Shoham and Gersho, 1988).
"""

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Choice:
    """A way to code a tensor.

    Attributes
    ----------
    nbytes : float
        What it costs.
    error : float
        What it loses.
    """

    nbytes: float
    error: float


Options = Sequence[Sequence[Choice]]
"""The ways of every tensor."""


def lower_hull(choices: Sequence[Choice]) -> list[int]:
    """List the choices on the lower convex hull of error over bytes, the fewest bytes first.

    Errors fall along it, each byte by less than the one before; of equal choices the first one stays.
    """
    order = sorted(range(len(choices)), key=lambda index: (choices[index].nbytes, choices[index].error))
    hull: list[int] = []
    for index in order:
        if hull and choices[index].error >= choices[hull[-1]].error:
            continue
        while len(hull) > 1 and _gain(choices, hull[-2], hull[-1]) <= _gain(choices, hull[-2], index):
            hull.pop()
        hull.append(index)
    return hull


def allocate_bytes(options: Options, budget: float) -> list[int] | None:
    """Choose for every tensor so that the errors add up to little and the bytes to ``budget`` at most.

    Returns
    -------
    list of int or None
        A choice for every tensor; None where even the fewest bytes are more than the budget. The error is above the
        least possible by less than what the first edge that did not fit would have gained.
    """
    return _descend(options, fits=lambda nbytes: nbytes <= budget, done=lambda error: False)


def allocate_error(options: Options, budget: float) -> list[int] | None:
    """Choose for every tensor so that the bytes add up to few and the errors to ``budget`` at most.

    Returns
    -------
    list of int or None
        A choice for every tensor; None where even the smallest errors are more than the budget. The bytes are above
        the fewest possible by less than those of the last edge.
    """
    return _descend(options, fits=lambda nbytes: True, done=lambda error: error <= budget)


def total(options: Options, chosen: Sequence[int]) -> Choice:
    """Add up bytes and errors of a choice for every tensor."""
    picked = [choices[index] for choices, index in zip(options, chosen, strict=True)]
    return Choice(math.fsum(one.nbytes for one in picked), math.fsum(one.error for one in picked))


def fewest_bytes(options: Options) -> float:
    """Return what the cheapest choices cost together: no budget can be below it."""
    return math.fsum(choices[lower_hull(choices)[0]].nbytes for choices in options)


def smallest_error(options: Options) -> float:
    """Return what the best choices lose together: no bound can be below it."""
    return math.fsum(choices[lower_hull(choices)[-1]].error for choices in options)


def _descend(options: Options, *, fits: Callable[[float], bool], done: Callable[[float], bool]) -> list[int] | None:
    """Begin with the fewest bytes, and take the steepest edge that fits until done; None where that cannot be."""
    hulls = [lower_hull(choices) for choices in options]
    at = [0] * len(hulls)

    def chosen() -> list[int]:
        return [hull[place] for hull, place in zip(hulls, at, strict=True)]

    if not fits(total(options, chosen()).nbytes):
        return None
    # A tensor has one edge in the heap, from where it stands: those behind it are less steep.
    edges = [edge for tensor in range(len(hulls)) for edge in _edge(options, hulls, tensor, 0)]
    heapq.heapify(edges)
    while not done(total(options, chosen()).error):
        if not edges:
            return None if done(-math.inf) else chosen()
        _, tensor = heapq.heappop(edges)
        at[tensor] += 1
        if fits(total(options, chosen()).nbytes):
            for edge in _edge(options, hulls, tensor, at[tensor]):
                heapq.heappush(edges, edge)
        else:
            at[tensor] -= 1  # a smaller edge of another tensor may still fit
    return chosen()


def _edge(options: Options, hulls: Sequence[Sequence[int]], tensor: int, place: int) -> list[tuple[float, int]]:
    """Return the edge of a tensor's hull behind a place, if there is one; the steepest sorts first."""
    hull = hulls[tensor]
    if place + 1 == len(hull):
        return []
    return [(-_gain(options[tensor], hull[place], hull[place + 1]), tensor)]


def _gain(choices: Sequence[Choice], here: int, there: int) -> float:
    """Return by how much the error falls for each byte more."""
    return (choices[here].error - choices[there].error) / (choices[there].nbytes - choices[here].nbytes)
