"""Embedded synthetic base stations: seeded, labelled, unequal; no file is needed.

A sample is a window of seconds on one access link. It is generated from (seed, split, station, sample) alone, so that
a rank makes its own samples and no others.
"""

from dataclasses import fields

import numpy as np
import numpy.typing as npt

from mpitrain.arrays import Ints
from mpitrain.config.schema import DataConfig, Task
from mpitrain.data.dataset import Block, Dataset, Split
from mpitrain.data.hashing import Keys, draw_normals, draw_uniforms, make_key
from mpitrain.data.profiles import PROFILES, LinkProfile
from mpitrain.partition import split_sizes, split_weighted

FEATURES = ["ln(1 + down Mbit/s)", "ln(1 + up Mbit/s)", "ln RTT ms", "ln jitter ms", "stall"]

_Values = npt.NDArray[np.float64]

_TABLE: dict[str, _Values] = {
    column.name: np.array([getattr(profile, column.name) for profile in PROFILES])
    for column in fields(LinkProfile)
    if column.name != "name"
}

Z95 = 1.645
"""Standard deviations from the median of a normal distribution to its 95th percentile."""

SITE_SD = 0.3
"""Spread of the medians of ln(rate), in its standard deviations, and of the other columns, between places."""

SALTS = {"train": 0, "test": 1, "mix": 2}
"""Keep apart what is drawn from one seed."""


def open_stations(config: DataConfig, task: Task, seed: int) -> Dataset:
    """Describe the stations' data; nothing is generated before `Dataset.load`.

    Parameters
    ----------
    config : DataConfig
        ``stations``, ``samples``, ``test_samples``, ``skew``, ``window``, and ``horizon`` for a forecast.
    task : {"classify", "forecast"}
        The kind of link that a window shows, or ln(1 + down Mbit/s) of each of the ``horizon`` seconds after it.
    seed : int
        Other seeds are other stations.
    """
    sizes = station_sizes(config)
    classify = task == "classify"
    return Dataset(
        source=StationSource(config, task, seed),
        task=task,
        input_shape=(config.window, len(FEATURES)),
        num_outputs=len(PROFILES) if classify else config.horizon,
        class_names=[profile.name for profile in PROFILES] if classify else [],
        feature_names=list(FEATURES),
        group_names=[f"station {station}" for station in range(len(sizes))],
        train_group_sizes=sizes,
        num_test=config.test_samples,
    )


def station_sizes(config: DataConfig) -> list[int]:
    """Training samples of each station: a power law of exponent ``skew``, at least one, ``samples`` in all.

    With fewer samples than stations, only as many stations exist.
    """
    stations = min(config.stations, config.samples)
    weights = [round(1e9 * (station + 1) ** -config.skew) for station in range(stations)]
    if config.skew == 0:
        return split_sizes(config.samples, stations)
    return [1 + extra for extra in split_weighted(config.samples - stations, weights)]


def class_mixes(stations: int, skew: float, seed: int) -> _Values:
    """Share of each class at each station: (stations, classes) float64.

    Equal shares at ``skew`` 0, a flat Dirichlet distribution at 1 (normalized exponentials), steeper beyond.
    """
    uniforms = draw_uniforms(make_key(seed, SALTS["mix"], np.arange(stations)), len(PROFILES))
    weights: _Values = (-np.log(uniforms)) ** skew
    weights /= weights.sum(axis=1, keepdims=True)
    return weights


class StationSource:
    """Generates the samples of all stations."""

    def __init__(self, config: DataConfig, task: Task, seed: int) -> None:
        self._config, self._task, self._seed = config, task, seed
        self._ends = np.cumsum(station_sizes(config))
        self._mixes = class_mixes(len(self._ends), config.skew, seed)

    def read(self, split: Split, indices: Ints) -> Block:
        """Generate samples; test samples are spread evenly over the stations, and share none with training."""
        stations = len(self._ends)
        station = np.searchsorted(self._ends, indices, side="right") if split == "train" else indices % stations
        keys = make_key(self._seed, SALTS[split], station, indices)
        steps = np.cumsum(self._mixes, axis=1)[station]
        label = np.minimum((draw_uniforms(keys, 1) > steps).sum(axis=1), len(PROFILES) - 1)
        window = self._config.window
        classify = self._task == "classify"
        series = generate_windows(keys, label, window if classify else window + self._config.horizon)
        x = series[:, :window].astype(np.float32)
        y = label.astype(np.int64) if classify else series[:, window:, 0].astype(np.float32)
        return Block(indices, x.reshape(-1, len(FEATURES)), np.arange(len(indices)) * window, window, y)


def generate_windows(keys: Keys, label: Ints, seconds: int) -> _Values:
    """Simulate links second by second.

    Parameters
    ----------
    keys : (n,) uint64
        Key of each sample.
    label : (n,) integer array
        Profile of each sample.
    seconds : int
        Length.

    Returns
    -------
    series : (n, seconds, 5) float64
        `FEATURES`. A stall has no rate; round trips grow as the rate falls.
    """
    link = {name: column[label][:, None] for name, column in _TABLE.items()}
    site = SITE_SD * draw_normals(make_key(1, keys), 4)
    noise = draw_normals(make_key(2, keys), 4 * seconds).reshape(len(keys), 4, seconds)
    stalled = _stalls(draw_uniforms(make_key(3, keys), seconds), link["stall_share"], link["stall_mean_s"])
    down_z = _autoregress(noise[:, 0], link["down_phi"])
    up_z = 0.5 * down_z + np.sqrt(0.75) * _autoregress(noise[:, 1], link["down_phi"])
    rtt_z = -0.3 * down_z + np.sqrt(0.91) * noise[:, 2]
    down = np.exp(link["down_ln_mu"] + link["down_ln_sd"] * (down_z + site[:, :1]))
    up_sd = np.log(link["up_p95_mbps"] / link["up_p50_mbps"]) / Z95
    up = np.minimum(link["up_p50_mbps"] * np.exp(up_sd * (up_z + site[:, 1:2])), link["up_p95_mbps"])
    rtt = np.log(link["rtt_p50_ms"]) + _two_sided(rtt_z + site[:, 2:3], link)
    jitter_sd = np.log(link["jitter_p95_ms"] / link["jitter_p50_ms"]) / Z95
    jitter = np.log(link["jitter_p50_ms"]) + jitter_sd * (noise[:, 3] + site[:, 3:])
    down = np.minimum(down, link["down_max_mbps"])
    columns = [np.log1p(np.where(stalled, 0, down)), np.log1p(np.where(stalled, 0, up)), rtt, jitter, stalled]
    return np.stack(columns, axis=2)


def _two_sided(z: _Values, link: dict[str, _Values]) -> _Values:
    """Scale a standard normal to ln(RTT / median), by its own spread on each side."""
    above = np.log(link["rtt_p95_ms"] / link["rtt_p50_ms"]) / Z95
    below = np.log(link["rtt_p50_ms"] / link["rtt_p5_ms"]) / Z95
    return z * np.where(z > 0, above, below)


def _autoregress(noise: _Values, phi: _Values) -> _Values:
    """Run z' = phi z + sqrt(1 - phi^2) noise from its stationary distribution: (n, seconds) in and out."""
    z = noise.copy()
    for second in range(1, z.shape[1]):
        z[:, second] = phi[:, 0] * z[:, second - 1] + np.sqrt(1 - phi[:, 0] ** 2) * noise[:, second]
    return z


def _stalls(uniforms: _Values, share: _Values, mean_s: _Values) -> npt.NDArray[np.bool_]:
    """Run the two-state chain with the given share and mean length of stalls: (n, seconds)."""
    leave = (1 / mean_s)[:, 0]
    enter = share[:, 0] * leave / (1 - share[:, 0])
    stalled = np.empty(uniforms.shape, np.bool_)
    stalled[:, 0] = uniforms[:, 0] < share[:, 0]
    for second in range(1, uniforms.shape[1]):
        stalled[:, second] = uniforms[:, second] < np.where(stalled[:, second - 1], 1 - leave, enter)
    return stalled
