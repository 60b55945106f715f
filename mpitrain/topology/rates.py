"""Rates that change over time: steps that begin anew after their end, and such that are generated from a fit."""

import random
from bisect import bisect_right
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from math import exp, log, sqrt

from mpitrain.topology.model import Constant, Rate
from mpitrain.topology.profiles import PROFILES, Measured

BYTES_S = 125_000
"""Of one Mbit/s."""

GENERATED_S = 3600
"""Seconds after which a generated rate begins anew."""

Z_95, Z_99 = 1.6449, 2.3263
"""Percentiles of the normal distribution."""


@dataclass(frozen=True)
class Trace:
    """A rate that changes in steps and begins anew after its end.

    Attributes
    ----------
    starts_s : tuple of float
        When each step begins; ascending, the first at 0.
    rates : tuple of float
        Bytes a second in each step; 0 for a stall. At least one is above 0.
    period_s : float
        When the last step ends.
    file, profile : str
        Where it comes from; one of them, or none.
    """

    starts_s: tuple[float, ...] = field(repr=False)
    rates: tuple[float, ...] = field(repr=False)
    period_s: float
    file: str = ""
    profile: str = ""

    @cached_property
    def mean_bytes_s(self) -> float:
        """The mean over the period."""
        ends = (*self.starts_s, self.period_s)
        spans = (end - start for start, end in pairwise(ends))
        return sum(rate * span for rate, span in zip(self.rates, spans, strict=True)) / self.period_s

    def at(self, time_s: float) -> tuple[float, float]:
        """Return the rate at a time since the start, and until when it holds: always later than that time."""
        laps = int(time_s // self.period_s)
        begun_s = laps * self.period_s
        step = max(bisect_right(self.starts_s, time_s - begun_s) - 1, 0)
        while True:
            last = step + 1 == len(self.rates)
            until_s = begun_s + (self.period_s if last else self.starts_s[step + 1])
            if until_s > time_s:
                return self.rates[step], until_s
            # The time is the very end of a step, but for rounding.
            step, begun_s = (0, begun_s + self.period_s) if last else (step + 1, begun_s)


def generated(profile: str, way: str, seed: int, link: str) -> Rate | None:
    """Draw the rate of one direction from a profile: the same for the same seed, link and direction.

    The steps of one second are clipped at the first and the last percentile. A direction without a fit gets its
    spread from its percentiles and the pace of its changes from the other direction, and its median for good where
    neither has one; None where nothing was measured.

    Parameters
    ----------
    profile : str
        Name in PROFILES.
    way : {"up", "down"}
        Down leads to the user, so ``between`` names the user's site first.
    seed : int
    link : str
        Its name, so that links differ and none changes when another one is added.
    """
    facts = PROFILES[profile]
    measured, other = (facts.up, facts.down) if way == "up" else (facts.down, facts.up)
    if measured is None:
        return None
    phi = measured.phi or (other.phi if other else None)
    if phi is None:
        return Constant(measured.p50 * BYTES_S)
    rates = _draw(measured, phi, random.Random(f"{seed} {link} {way} {profile}"))
    starts = tuple(float(second) for second in range(GENERATED_S))
    return Trace(starts, tuple(rates), float(GENERATED_S), profile=profile)


def _draw(measured: Measured, phi: float, chance: random.Random) -> list[float]:
    """Draw one rate a second; stalls begin so often, and last so long, that their share and mean are those given."""
    ln_mu = log(measured.p50) if measured.ln_mu is None else measured.ln_mu
    ln_sd = log(measured.p95 / measured.p50) / Z_95 if measured.ln_sd is None else measured.ln_sd
    ends = 1 / measured.stall_s
    begins = ends * measured.stall / (1 - measured.stall)
    z, stalled = chance.gauss(0, 1), chance.random() < measured.stall
    rates = []
    for _ in range(GENERATED_S):
        clipped = min(max(z, -Z_99), Z_99)
        rates.append(0.0 if stalled else exp(ln_mu + ln_sd * clipped) * BYTES_S)
        z = phi * z + sqrt(1 - phi * phi) * chance.gauss(0, 1)
        turn = chance.random()
        stalled = turn >= ends if stalled else turn < begins
    return rates
