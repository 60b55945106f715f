"""Confidence intervals of differences of runs that share their seeds."""

import math
from collections.abc import Sequence

import numpy as np

T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""Two-sided 95 % quantiles of Student's t for 1, 2, … degrees of freedom; 1.96 beyond."""


def paired_percent(mine: Sequence[float] | np.ndarray, others: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """Return the mean difference in percent of the others' mean, and half its 95 % interval; NaN of a single pair."""
    base = np.asarray(others, np.float64)
    percent = 100 * (np.asarray(mine, np.float64) - base) / np.mean(base)
    degrees = len(percent) - 1
    if not degrees:
        return float(percent[0]), math.nan
    quantile = T_95[degrees - 1] if degrees <= len(T_95) else 1.96
    return float(np.mean(percent)), quantile * float(np.std(percent, ddof=1)) / math.sqrt(len(percent))
