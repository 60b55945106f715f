"""Measured kinds of links: percentiles and fits, as numbers.

Rates are those of application data. The fit is an autoregression of the logarithm at steps of one second,
z[t+1] = phi z[t] + sqrt(1 - phi²) e and rate = exp(ln_mu + ln_sd z) Mbit/s, with stalls in between.

Sources: the 5G and LTE traces of Raca et al. 2020 (with ping bursts); mahimahi's traces of US operators (Winstein et
al. 2013); the speed tests of ERRANT (Trevisan et al. 2020); Starlink along a motorway (starlink_autobahn); pings in
private networks of DETERMINISTIC6G; the uplink of 5g-* from the run means of a year-long study (IFIP 2024).
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Measured:
    """Rates of one direction in Mbit/s, as far as they are known.

    Attributes
    ----------
    p50, p95 : float
        Percentiles.
    ln_mu, ln_sd, phi : float or None
        The fit.
    stall, stall_s : float
        Share of the time without any data, and how long such a stall lasts on average.
    """

    p50: float
    p95: float
    ln_mu: float | None = None
    ln_sd: float | None = None
    phi: float | None = None
    stall: float = 0.0
    stall_s: float = 1.0


@dataclass(frozen=True)
class Profile:
    """A kind of link; None where something was not measured.

    Attributes
    ----------
    down, up : Measured or None
        Towards the user, and from it.
    rtt_ms, jitter_ms : float or None
        Medians of the round trip and of its variation.
    loss_pct : float or None
        Of pings, there and back.
    source : str
    """

    down: Measured | None
    up: Measured | None
    rtt_ms: float | None
    jitter_ms: float | None
    loss_pct: float | None
    source: str


_RACA, _MAHIMAHI, _ERRANT, _D6G = "Raca et al. 2020", "mahimahi", "ERRANT", "DETERMINISTIC6G"
_UP_5G = Measured(22.4, 103.9)

PROFILES = {
    "5g-static": Profile(
        Measured(35.7, 230.7, 3.604, 1.495, 0.808, 0.069, 1.6), _UP_5G, 69, 2, 1.16, f"{_RACA}; up: IFIP 2024"
    ),
    "5g-driving": Profile(
        Measured(17.4, 221.0, 3.081, 1.436, 0.825, 0.079, 1.4), _UP_5G, 74, 1.5, 1.09, f"{_RACA}; up: IFIP 2024"
    ),
    "lte-driving": Profile(Measured(7.3, 34.0, 1.965, 1.082, 0.773, 0.074, 1.5), None, 84, 4, 2.55, _RACA),
    "lte-tmobile-us": Profile(
        Measured(13.9, 36.6, 2.637, 0.631, 0.558), Measured(11.5, 27.5), None, None, None, _MAHIMAHI
    ),
    "lte-verizon-us": Profile(
        Measured(4.3, 10.8, 1.385, 0.733, 0.761), Measured(5.7, 11.4), None, None, None, _MAHIMAHI
    ),
    "lte-att-us-driving": Profile(Measured(5.4, 9.5), Measured(1.0, 1.2), None, None, None, _MAHIMAHI),
    "4g-nordic": Profile(Measured(27.1, 99.0), Measured(10.6, 42.5), 84.8, None, None, _ERRANT),
    "3g-nordic": Profile(Measured(13.2, 23.3), Measured(2.7, 4.0), 80.0, None, None, _ERRANT),
    "leo-highway": Profile(
        Measured(218.3, 395.0, 5.222, 0.709, 0.752, 0.009, 3.8),
        Measured(14.9, 32.7),
        27.6,
        None,
        None,
        "starlink_autobahn",
    ),
    "private-5g-edge": Profile(None, None, 14.4, 1.9, 0.0, _D6G),
    "private-5g-cloud": Profile(None, None, 12.0, 3.2, 0.0, _D6G),
    "oran-indoor-edge": Profile(None, None, 24.3, 6.6, 0.0, _D6G),
    "oran-indoor-cloud": Profile(None, None, 28.3, 2.0, 0.0, _D6G),
    "industrial-5g-3.7ghz": Profile(None, None, 11.8, None, None, _D6G),
}
