"""Confidence intervals of differences of runs that share their seeds."""

import math
from collections.abc import Sequence
from statistics import fmean, stdev

T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""Two-sided 95 % quantiles of Student's t for 1, 2, … degrees of freedom; 1.96 beyond."""


def paired_percent(mine: Sequence[float], others: Sequence[float]) -> tuple[float, float]:
    """Return the mean difference in percent of the others' mean, and half its 95 % interval; NaN of a single pair."""
    base = fmean(others)
    percent = [100 * (one - other) / base for one, other in zip(mine, others, strict=True)]
    degrees = len(percent) - 1
    if not degrees:
        return percent[0], math.nan
    quantile = T_95[degrees - 1] if degrees <= len(T_95) else 1.96
    return fmean(percent), quantile * stdev(percent) / math.sqrt(len(percent))
