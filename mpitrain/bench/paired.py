"""Statistics of runs that differ in their seeds: means, and differences of runs with the same seed."""

from collections.abc import Sequence

import numpy as np

from mpitrain.bench.records import Record
from mpitrain.intervals import paired_percent


def column(results: Sequence[Record], name: str) -> np.ndarray:
    """List the values of the results that have one, (n,) float64."""
    return np.array([result[name] for result in results if result[name] is not None], np.float64)


def mean(values: np.ndarray) -> float | None:
    """Return the mean; None of nothing."""
    return float(np.mean(values)) if len(values) else None


def difference(results: Sequence[Record], baseline: Sequence[Record], name: str) -> str:
    """Give the 95 % interval of the mean difference of runs with the same seed, in percent of the baseline's mean.

    Of one pair, the difference alone; ``-`` where no seed has both.
    """
    pairs = [pair for pair in zip(results, baseline, strict=True) if None not in (pair[0][name], pair[1][name])]
    if not pairs:
        return "-"
    mine, others = (column([pair[side] for pair in pairs], name).tolist() for side in (0, 1))
    middle, half = paired_percent(mine, others)
    return f"{middle - half:+.2f} … {middle + half:+.2f}" if len(pairs) > 1 else f"{middle:+.2f}"
