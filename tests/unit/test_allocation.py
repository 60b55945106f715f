"""Reverse water-filling: against every possible choice, and against Shannon's own for Gaussian sources."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpitrain.bench.allocation import (
    Choice,
    allocate_bytes,
    allocate_error,
    fewest_bytes,
    lower_hull,
    smallest_error,
    total,
)

CHOICES = st.lists(
    st.builds(Choice, st.integers(1, 40).map(float), st.integers(0, 40).map(float)), min_size=1, max_size=5
)
OPTIONS = st.lists(CHOICES, min_size=1, max_size=4)


def everything(options):
    """List every choice for all tensors, with what it comes to."""
    return [total(options, chosen) for chosen in itertools.product(*(range(len(choices)) for choices in options))]


def edges(options):
    """List the edges of all hulls: what each costs, and gains."""
    for choices in options:
        for here, there in itertools.pairwise(lower_hull(choices)):
            yield choices[there].nbytes - choices[here].nbytes, choices[here].error - choices[there].error


def test_a_hull_by_hand():
    points = [(4, 1), (1, 9), (2, 4), (3, 3.5), (2, 4), (5, 2), (1, 10), (6, 1)]
    choices = [Choice(*point) for point in points]
    assert lower_hull(choices) == [1, 2, 0], "(3, 3.5) lies above the edge from (2, 4) to (4, 1)"
    assert lower_hull([Choice(2, 0), Choice(1, 0)]) == [1]


@given(OPTIONS, st.integers(0, 160))
def test_bytes_against_every_choice(options, budget):
    possible = [found.error for found in everything(options) if found.nbytes <= budget]
    chosen = allocate_bytes(options, budget)
    if chosen is None:
        assert not possible
        assert fewest_bytes(options) > budget
        return
    found = total(options, chosen)
    assert found.nbytes <= budget
    assert min(possible) <= found.error <= min(possible) + max((gain for _, gain in edges(options)), default=0)


@given(OPTIONS, st.integers(0, 160))
def test_errors_against_every_choice(options, budget):
    possible = [found.nbytes for found in everything(options) if found.error <= budget]
    chosen = allocate_error(options, budget)
    if chosen is None:
        assert not possible
        assert smallest_error(options) > budget
        return
    found = total(options, chosen)
    assert found.error <= budget
    assert min(possible) <= found.nbytes <= min(possible) + max((nbytes for nbytes, _ in edges(options)), default=0)


@given(OPTIONS, st.integers(0, 20))
def test_where_the_descent_stops_by_itself_nothing_is_better(options, steps):
    """With exactly the bytes of the steepest edges of all no other choice has a smaller error."""
    steepest = sorted(edges(options), key=lambda edge: -edge[1] / edge[0])[:steps]
    budget = fewest_bytes(options) + sum(nbytes for nbytes, _ in steepest)
    found = total(options, allocate_bytes(options, budget))
    assert found.error == min(each.error for each in everything(options) if each.nbytes <= budget)
    assert total(options, allocate_error(options, found.error)).nbytes <= budget


def test_a_smaller_edge_may_fit_where_a_steeper_one_does_not():
    options = [[Choice(1, 100), Choice(11, 0)], [Choice(1, 5), Choice(2, 4)]]
    assert allocate_bytes(options, 3) == [0, 1]
    assert allocate_bytes(options, 12) == [1, 0]


@pytest.mark.parametrize("water", [2.0, 0.5, 0.03])
@pytest.mark.parametrize("by_bytes", [True, False])
def test_gaussian_sources_are_filled_to_one_level(water, by_bytes):
    """D = min(water, variance), and 1/2 log2(variance / D) bits a value (Shannon 1959), to a step of the grid."""
    variances, step = [4.0, 1.0, 0.25, 0.01], 1 / 64
    # Bytes that are left go to tensors with smaller edges: only with equal ones are they less than a step.
    sizes = [100] * 4 if by_bytes else [100, 700, 50, 3000]
    rates = np.arange(0, 10, step)
    options = [
        [Choice(size * bits / 8, size * variance * 4.0**-bits) for bits in rates]
        for variance, size in zip(variances, sizes, strict=True)
    ]
    ideal = [0.5 * math.log2(max(1, variance / water)) for variance in variances]
    if by_bytes:
        chosen = allocate_bytes(options, sum(size * bits / 8 for size, bits in zip(sizes, ideal, strict=True)))
    else:
        chosen = allocate_error(options, sum(n * min(water, v) for n, v in zip(sizes, variances, strict=True)))
    for index, variance, bits in zip(chosen, variances, ideal, strict=True):
        assert rates[index] == pytest.approx(bits, abs=2 * step)
        assert variance * 4.0 ** -rates[index] == pytest.approx(min(water, variance), rel=4 ** (2 * step) - 1)
