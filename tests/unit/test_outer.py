"""The outer step of local steps against a plain numpy twin, and against the formula it stands for."""

import numpy as np
import pytest

from mpitrain.optim.outer import OuterNesterov, merge
from tests.reference.optimizers import merged, outer_step

SETTINGS = [(1.0, 0.0), (0.7, 0.9), (0.5, 0.0), (1.0, 0.5), (0.3, 0.99)]


def draw(size, dtype, seed=0):
    rng = np.random.default_rng(seed)
    scales = 10.0 ** rng.integers(-9, 4, (3, size))
    return (rng.standard_normal((3, size)) * scales).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("size", [0, 1, 127, 128, 1000])
@pytest.mark.parametrize(("lr", "momentum"), SETTINGS)
def test_outer_step_equals_its_twin_bit_for_bit(lr, momentum, size, dtype):
    params, change, moment = draw(size, dtype)
    expected, memory = params.copy(), moment.copy()
    optimizer = OuterNesterov(lr=lr, momentum=momentum)
    for turn in range(4):
        change = draw(size, dtype, turn)[0]
        given = change.copy()
        expected, memory = outer_step(expected - change, change, memory, lr=lr, mu=momentum)
        params -= change
        optimizer.step(params, change, moment)
        assert np.array_equal(change, given)
        assert params.dtype == expected.dtype == dtype
        assert np.array_equal(params, expected)
        assert np.array_equal(moment, memory)


@pytest.mark.parametrize(("lr", "momentum"), SETTINGS)
def test_outer_step_is_the_published_formula(lr, momentum):
    """Theta minus eta times (D plus mu times M), with M taken first; in float64 to its last digits."""
    theta, moment = np.zeros(50), np.zeros(50)
    params, kept = theta.copy(), moment.copy()
    for turn in range(6):
        change = np.random.default_rng(turn).standard_normal(50)
        moment = momentum * moment + change
        theta = theta - lr * (change + momentum * moment)
        params -= change
        OuterNesterov(lr=lr, momentum=momentum).step(params, change, kept)
    np.testing.assert_allclose(params, theta, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(kept, moment, rtol=1e-12, atol=1e-12)


def test_lr_1_without_momentum_takes_the_mean_as_it_is():
    """Not the last weights minus the change, which may lack its last bits."""
    before, mean, _ = draw(1000, np.float32)
    change, moment = before - mean, np.zeros(1000, np.float32)
    assert not np.array_equal(before - change, mean)
    params = mean.copy()
    OuterNesterov(lr=1.0, momentum=0.0).step(params, change, moment)
    assert np.array_equal(params, mean)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 0.9])
def test_merge_equals_its_twin_bit_for_bit(share, dtype):
    local, params, _ = draw(300, dtype)
    expected, given = merged(local, params, share), params.copy()
    merge(local, params, share)
    assert local.dtype == dtype
    assert np.array_equal(local, expected)
    assert np.array_equal(params, given)


def test_merge_without_a_share_forgets_whatever_was_there():
    local = np.array([np.nan, np.inf, 1.0], np.float32)
    merge(local, np.array([1.0, 2.0, 3.0], np.float32), 0.0)
    assert local.tolist() == [1.0, 2.0, 3.0]
