import numpy as np

from mpitrain.config.schema import DataConfig
from mpitrain.data.dataset import combine_moments
from mpitrain.data.open import open_dataset


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
