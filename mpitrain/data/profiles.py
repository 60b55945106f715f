"""Access links as measured: the classes of the synthetic stations.

Rates are AR(1) in ln(rate) at steps of 1 s, fitted to published traces; the other columns are percentiles of the same
traces. Sources: raca5g (5G and LTE logs of phones, Ireland), mahimahi (T-Mobile and Verizon LTE, USA), leo (Starlink on
a motorway, Germany), errant (Nordic speed tests), and run means of a year of 5G uplink (IFIP 2024).
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class LinkProfile:
    """One kind of link.

    Attributes
    ----------
    down_ln_mu, down_ln_sd, down_phi : float
        Mean, standard deviation and correlation over 1 s of ln(Mbit/s) towards the station.
    down_max_mbps : float
        95th percentile, at which rates are clipped (no 99th is published).
    stall_share, stall_mean_s : float
        Share of seconds without any rate, and mean length of such a gap.
    up_p50_mbps, up_p95_mbps : float
        Percentiles of the rate away from the station.
    rtt_p5_ms, rtt_p50_ms, rtt_p95_ms : float
        Percentiles of the round-trip time.
    jitter_p50_ms, jitter_p95_ms : float
        Percentiles of its variation within a second.
    """

    name: str
    down_ln_mu: float
    down_ln_sd: float
    down_phi: float
    down_max_mbps: float
    stall_share: float
    stall_mean_s: float
    up_p50_mbps: float
    up_p95_mbps: float
    rtt_p5_ms: float
    rtt_p50_ms: float
    rtt_p95_ms: float
    jitter_p50_ms: float
    jitter_p95_ms: float


# Assumed where the trace lacks a column: uplink and LTE round trips are errant's 4G percentiles, the uplink of the 5G
# links the IFIP run means, jitter of the US links and of leo that of lte-driving; leo's 5th and 95th percentile of the
# round trip extend its published quartiles (21.5, 38.8). Gaps of links without any are as short as steps allow.
PROFILES = (
    LinkProfile("5g-static", 3.604, 1.495, 0.808, 230.7, 0.069, 1.6, 22.4, 103.9, 66, 69, 94, 2.0, 17.3),
    LinkProfile("5g-driving", 3.081, 1.436, 0.825, 221.0, 0.079, 1.4, 22.4, 103.9, 66, 74, 88.5, 1.5, 9.5),
    LinkProfile("lte-driving", 1.965, 1.082, 0.773, 34.0, 0.074, 1.5, 10.6, 42.5, 67, 84, 106, 4.0, 17.7),
    LinkProfile("lte-tmobile-us", 2.637, 0.631, 0.558, 36.6, 0.0, 1.0, 11.5, 27.5, 43.4, 84.8, 200.2, 4.0, 17.7),
    LinkProfile("lte-verizon-us", 1.385, 0.733, 0.761, 10.8, 0.0, 1.0, 5.7, 11.4, 43.4, 84.8, 200.2, 4.0, 17.7),
    LinkProfile("leo-highway", 5.222, 0.709, 0.752, 395.0, 0.009, 3.8, 14.9, 32.7, 16.0, 27.6, 55.0, 4.0, 17.7),
)
