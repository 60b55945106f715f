"""Where the stages of a pipeline begin: equal work first, then few bytes over the cuts."""

from collections.abc import Sequence
from itertools import pairwise
from math import inf

from mpitrain.errors import ConfigError, count
from mpitrain.nn.layer import Chain
from mpitrain.parallel.units import Unit

SLACK = 0.05
"""Share of the lightest possible heaviest stage by which a stage may be heavier, if fewer bytes cross the cuts then."""


def cuts(found: Sequence[Unit], stages: int) -> list[int]:
    """Choose the first unit of every stage but the first.

    Among the partitions into consecutive units, at least one a stage, whose heaviest stage is within 5 % of the
    lightest one that there can be: the one that sends the fewest elements over its cuts; of these, the one whose
    heaviest stage is lightest.

    Parameters
    ----------
    stages : int
        Pieces; ``pp`` times ``chunks``.

    Raises
    ------
    ConfigError
        There are fewer units than stages.
    """
    _check_stages(found, stages)
    works = [unit.work for unit in found]
    crossing = [unit.output_size for unit in found]
    (_, lightest), _ = _best(works, [0] * len(found), stages, inf)
    _, chosen = _best(works, crossing, stages, lightest * (1 + SLACK))
    return chosen


def check_cuts(given: Sequence[int], found: Sequence[Unit], stages: int) -> list[int]:
    """Take the cuts of the configuration.

    Raises
    ------
    ConfigError
        They are not ascending units within the model, or not one fewer than there are stages.
    """
    _check_stages(found, stages)
    ascending = all(a < b for a, b in pairwise(given))
    if len(given) == stages - 1 and ascending and all(0 < cut < len(found) for cut in given):
        return list(given)
    raise ConfigError(
        f"parallel.cuts = {list(given)}: {count(stages, 'stage')} need {count(stages - 1, 'cut')}, ascending, from 1 "
        f"to {len(found) - 1}: the number of the unit with which a stage begins; the units are {_listed(found)}"
    )


def stage_layers(
    chain: Chain, found: Sequence[Unit], chosen: Sequence[int], stages: int, chunks: int = 1
) -> list[list[Chain]]:
    """Cut a chain.

    Parameters
    ----------
    found : list of Unit
        Units of ``chain``.
    chosen : list of int
        First units of all pieces but the first, ``stages * chunks - 1`` of them.

    Returns
    -------
    list of list of Chain
        The chunks of each stage: piece ``chunk * stages + stage``.
    """
    starts = [0, *(found[cut].start for cut in chosen)]
    stops = [*starts[1:], len(chain.layers)]
    pieces = [Chain(chain.layers[start:stop]) for start, stop in zip(starts, stops, strict=True)]
    return [[pieces[chunk * stages + stage] for chunk in range(chunks)] for stage in range(stages)]


def cut_shapes(found: Sequence[Unit], chosen: Sequence[int]) -> list[tuple[int, ...]]:
    """List what crosses every cut, for one sample."""
    return [found[cut - 1].output_shape for cut in chosen]


def pieces(found: Sequence[Unit], chosen: Sequence[int]) -> list[Sequence[Unit]]:
    """Cut the list of units."""
    edges = [0, *chosen, len(found)]
    return [found[start:stop] for start, stop in pairwise(edges)]


def _check_stages(found: Sequence[Unit], stages: int) -> None:
    if stages > len(found):
        raise ConfigError(
            f"parallel: pp times chunks = {stages} needs as many units or more, but the model has {len(found)}: "
            f"{_listed(found)}; set parallel.pp and chunks so that their product is {len(found)} or less"
        )


def _listed(found: Sequence[Unit]) -> str:
    return ", ".join(f"{index} {unit.name}" for index, unit in enumerate(found))


Cost = tuple[float, float]
"""Elements over the cuts, and the work of the heaviest stage."""


def _best(works: Sequence[float], crossing: Sequence[int], stages: int, limit: float) -> tuple[Cost, list[int]]:
    """Find the partition of least cost among those with no stage above ``limit``: dynamic programming over prefixes."""
    best: dict[int, tuple[Cost, list[int]]] = {0: ((0.0, 0.0), [])}
    for stage in range(stages):
        longer: dict[int, tuple[Cost, list[int]]] = {}
        for start, ((sent, heaviest), before) in best.items():
            for stop in range(start + 1, len(works) - (stages - stage - 1) + 1):
                work = sum(works[start:stop])
                if work > limit:
                    continue
                here = crossing[start - 1] if start else 0
                candidate = ((sent + here, max(heaviest, work)), [*before, *[start] * bool(start)])
                if stop not in longer or candidate < longer[stop]:
                    longer[stop] = candidate
        best = longer
    return best[len(works)]
