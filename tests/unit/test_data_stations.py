"""The embedded stations: seeded, unequal, each sample on its own."""

import numpy as np
import pytest

from mpitrain.config.schema import DataConfig
from mpitrain.data.dataset import combine_moments
from mpitrain.data.hashing import make_key
from mpitrain.data.open import open_dataset
from mpitrain.data.sampler import Sampler
from mpitrain.data.stations import FEATURES, class_mixes, generate_windows, station_sizes

SMALL = DataConfig(samples=200, test_samples=40, stations=5)


def loaded(config=SMALL, task="classify", seed=0, train=None, test=None):
    dataset = open_dataset(config, task, seed)
    dataset.load(
        np.arange(config.samples) if train is None else train, np.arange(config.test_samples) if test is None else test
    )
    return dataset


@pytest.mark.parametrize("task", ["classify", "forecast"])
def test_shapes_and_types(task):
    dataset = loaded(task=task)
    batch = dataset.train(np.array([3, 150, 3]))
    assert dataset.input_shape == (16, len(dataset.feature_names)) == batch.x.shape[1:]
    assert batch.x.dtype == np.float32
    assert np.isfinite(batch.x).all()
    assert len(batch) == 3
    if task == "classify":
        assert batch.y.shape == (3,)
        assert batch.y.dtype == np.int64
        assert dataset.num_outputs == len(dataset.class_names) == 6
        assert set(dataset.train(np.arange(200)).y) == set(range(6))
    else:
        assert batch.y.shape == (3, dataset.num_outputs) == (3, 4)
        assert batch.y.dtype == np.float32
    assert np.array_equal(batch.x[0], batch.x[2])


def test_a_seed_repeats_and_another_differs():
    first, again, other = loaded(), loaded(), loaded(seed=1)
    everything = np.arange(SMALL.samples)
    assert np.array_equal(first.train(everything).x, again.train(everything).x)
    assert np.array_equal(first.train(everything).y, again.train(everything).y)
    assert not np.isin(other.train(everything).x[:, :, 3], first.train(everything).x[:, :, 3]).any()


def test_test_samples_are_not_training_samples():
    dataset = loaded()
    train, test = dataset.train(np.arange(200)).x, dataset.test(np.arange(40)).x
    assert not np.isin(test[:, :, 3], train[:, :, 3]).any()


@pytest.mark.parametrize("task", ["classify", "forecast"])
def test_a_part_is_the_same_as_in_the_whole_and_nothing_else_is_read(task):
    whole = loaded(task=task)
    part = np.array([199, 3, 77, 20])
    some = loaded(task=task, train=part, test=np.array([5]))
    assert some.samples_read == 5
    assert np.array_equal(some.train(part).x, whole.train(part).x)
    assert np.array_equal(some.train(part).y, whole.train(part).y)
    assert np.array_equal(some.test(np.array([5])).x, whole.test(np.array([5])).x)
    for missing in (0, 198, 200):
        with pytest.raises(IndexError, match=f"sample {missing} was not loaded"):
            some.train(np.array([3, missing]))


def test_each_rank_reads_only_its_part():
    sizes = open_dataset(SMALL, "classify", 0).train_group_sizes
    read = []
    for rank in range(3):
        owned = Sampler(sizes, 8, ranks=3, rank=rank, placement="station", seed=0).owned
        dataset = loaded(train=owned, test=np.arange(0))
        assert dataset.samples_read == len(owned) < SMALL.samples
        assert len(dataset.test(np.arange(0))) == 0
        read.append(dataset.samples_read)
    assert sum(read) == SMALL.samples


@pytest.mark.parametrize("skew", [0, 0.5, 1, 2])
@pytest.mark.parametrize(("samples", "stations"), [(6000, 8), (10, 10), (11, 10), (7, 3), (3, 8), (1, 1)])
def test_sizes_sum_up_and_leave_no_station_empty(skew, samples, stations):
    sizes = station_sizes(DataConfig(samples=samples, stations=stations, skew=skew))
    assert sum(sizes) == samples
    assert len(sizes) == min(stations, samples)
    assert min(sizes) >= 1
    assert sizes == sorted(sizes, reverse=True)


def test_skew_steers_sizes_and_mixes():
    def ratio(skew):
        sizes = station_sizes(DataConfig(skew=skew))
        return sizes[0] / sizes[-1]

    assert ratio(0) == 1
    assert 2 < ratio(0.5) < ratio(1) < ratio(2)
    assert np.ptp(class_mixes(8, 0, 0)) == 0
    spread = [class_mixes(200, skew, 0).std() for skew in (0.5, 1, 2)]
    assert 0.05 < spread[0] < spread[1] < spread[2]
    # A flat Dirichlet distribution over 6 classes has this standard deviation.
    assert spread[1] == pytest.approx(np.sqrt(5 / 36 / 7), rel=0.1)


def test_labels_follow_the_mix_of_their_station():
    config = DataConfig(samples=4000, stations=2)
    y = loaded(config).train(np.arange(4000)).y
    first = station_sizes(config)[0]
    for station, labels in enumerate((y[:first], y[first:])):
        shares = np.bincount(labels, minlength=6) / len(labels)
        assert np.abs(shares - class_mixes(2, config.skew, 0)[station]).max() < 0.04


def test_links_keep_the_measured_facts():
    keys = make_key(7, np.arange(4000))
    static = generate_windows(keys, np.zeros(4000, np.int64), 40)
    down, stall = static[:, :, 0], static[:, :, FEATURES.index("stall")]
    assert stall.mean() == pytest.approx(0.069, rel=0.1)
    starts = (np.diff(stall, axis=1) == 1).sum()
    assert stall[:, 1:].sum() / starts == pytest.approx(1.6, rel=0.1)
    assert np.expm1(np.median(down[stall == 0])) == pytest.approx(np.exp(3.604), rel=0.1)
    assert np.expm1(down.max()) == pytest.approx(230.7)
    assert (down[stall == 1] == 0).all()


def test_a_forecast_continues_its_window():
    short = loaded(DataConfig(samples=50, window=8, horizon=8), "forecast").train(np.arange(50))
    last, next_second = short.x[:, -1, 0], short.y[:, 0]
    assert np.corrcoef(last, next_second)[0, 1] > 0.6


def test_moments_do_not_depend_on_who_holds_which_group():
    whole = loaded()
    expected = combine_moments(whole.moments())
    for ranks in (2, 3, 5):
        tables = []
        for rank in range(ranks):
            sampler = Sampler(whole.train_group_sizes, 8, ranks=ranks, rank=rank, placement="station", seed=0)
            tables.append(loaded(train=sampler.owned).moments())
        for order in (tables, tables[::-1]):
            mean, scale = combine_moments(sum(order))
            assert np.array_equal(mean, expected[0])
            assert np.array_equal(scale, expected[1])


def test_standardized_columns_have_mean_0_and_deviation_1():
    dataset = loaded()
    raw = dataset.train(np.arange(200)).x.astype(np.float64)
    mean, scale = combine_moments(dataset.moments())
    assert mean == pytest.approx(raw.mean((0, 1)))
    assert scale == pytest.approx(raw.std((0, 1)))
    test = dataset.test(np.array([1])).x
    dataset.standardize(mean, scale)
    x = dataset.train(np.arange(200)).x.astype(np.float64)
    assert np.abs(x.mean((0, 1))).max() < 1e-5
    assert np.abs(x.std((0, 1)) - 1).max() < 1e-5
    assert dataset.test(np.array([1])).x == pytest.approx((test - mean) / scale, abs=1e-5)


def test_the_task_is_neither_trivial_nor_hopeless():
    """A linear model learns most classes, not all."""
    dataset = loaded(DataConfig())
    dataset.standardize(*combine_moments(dataset.moments()))
    train, test = dataset.train(np.arange(6000)), dataset.test(np.arange(2000))
    x = np.c_[train.x.reshape(6000, -1), np.ones(6000)].astype(np.float64)
    weights = np.linalg.solve(x.T @ x + np.eye(x.shape[1]), x.T @ np.eye(6)[train.y])
    right = (np.c_[test.x.reshape(2000, -1), np.ones(2000)] @ weights).argmax(1) == test.y
    assert 0.5 < right.mean() < 0.8
