import numpy as np
import pytest

from mpitrain.config.schema import DataConfig
from mpitrain.data.dataset import combine_moments
from mpitrain.data.open import open_dataset
from mpitrain.errors import DataError


def test_standardized_values_are_bounded():
    dataset = open_dataset(DataConfig(samples=200, test_samples=50), "classify", 0)
    everything = np.arange(200), np.arange(50)
    dataset.load(*everything)
    dataset.standardize(*combine_moments(dataset.moments()))
    free = dataset.train(np.arange(200)).x
    dataset.load(*everything)
    dataset.standardize(*combine_moments(dataset.moments()), limit=1.5)
    bounded = dataset.train(np.arange(200)).x
    assert np.abs(free).max() > 1.5
    assert np.array_equal(bounded, np.clip(free, -1.5, 1.5))


def test_dropped_columns_are_not_seen_but_still_decide_activity(tmp_path):
    path = tmp_path / "table.npz"
    rows = np.arange(40)
    matrix = np.stack([rows, 100.0 + rows, (rows >= 8).astype(float)], axis=1)
    columns = np.array(["a", "b", "busy"])
    np.savez(path, x=matrix, columns=columns, y=rows // 4 % 2, trace=rows // 20)
    config = DataConfig(
        kind="windows", path=str(path), group="trace", window=4, test_groups=[1], active=["busy"], drop=["busy", "a"]
    )
    dataset = open_dataset(config, "classify", 0)
    assert dataset.feature_names == ["b"]
    assert dataset.train_group_sizes == [3]  # the two idle windows of the first group do not count
    dataset.load(np.arange(3), np.arange(dataset.num_test))
    assert dataset.train(np.array([0])).x.tolist() == [[[108.0], [109.0], [110.0], [111.0]]]


@pytest.mark.parametrize(
    ("drop", "message"), [(["c"], 'there is no "c"'), (["a", "b"], "leaves none of the 2 columns")]
)
def test_dropping_too_much_is_refused(tmp_path, drop, message):
    path = tmp_path / "table.npz"
    columns = np.array(["a", "b"])
    np.savez(path, x=np.ones((20, 2)), columns=columns, y=np.arange(20) % 2, trace=np.arange(20) // 10)
    config = DataConfig(kind="windows", path=str(path), group="trace", window=5, test_groups=[1], drop=drop)
    with pytest.raises(DataError, match=message):
        open_dataset(config, "classify", 0)
