"""Statistics of runs that differ in their seeds: means, and differences of runs with the same seed."""

from collections.abc import Sequence

import numpy as np

from mpitrain.bench.records import Record

T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""Two-sided 95 % quantiles of Student's t for 1, 2, … degrees of freedom; 1.96 beyond."""


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
    mine, others = (column([pair[side] for pair in pairs], name) for side in (0, 1))
    percent = 100 * (mine - others) / np.mean(others)
    middle, half = float(np.mean(percent)), _interval(percent)
    return f"{middle - half:+.2f} … {middle + half:+.2f}" if len(pairs) > 1 else f"{middle:+.2f}"


def _interval(values: np.ndarray) -> float:
    """Return half the width of the 95 % confidence interval of the mean; 0 of a single value."""
    degrees = len(values) - 1
    if not degrees:
        return 0.0
    quantile = T_95[degrees - 1] if degrees <= len(T_95) else 1.96
    return quantile * float(np.std(values, ddof=1)) / float(np.sqrt(len(values)))
