"""What codecs are measured with: how gradients are laid and cut, and the bound of tensors with different scales."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpitrain.bench.captured import make_source
from mpitrain.bench.sources import draw, least_bits, water_level
from mpitrain.errors import ConfigError, DivergedError
from mpitrain.params import Layout, Params, ParamSpec

SPECS = [
    ParamSpec("first.weight", (40, 50)),
    ParamSpec("first.bias", (50,)),
    ParamSpec("second.weight", (50, 30)),
    ParamSpec("third.weight", (30, 10)),
]


def gradients(specs=SPECS):
    grads = Params(Layout(specs, lambda spec: spec.name))
    rng = np.random.default_rng(3)
    for name in grads:
        grads[name][...] = rng.normal(size=grads[name].shape)
    return grads


def test_bound_of_one_tensor():
    """½·log2(σ²/D), and nothing once the error is as large as the values."""
    assert least_bits([1000], [4.0], 0.25) == pytest.approx(2.0, abs=1e-12)
    assert least_bits([7], [4.0], 4.0) == least_bits([7], [4.0], 9.0) == 0


def test_bound_of_two_tensors_by_hand():
    """A quarter of the values at 16, the rest at 1; θ = 4 drowns the small ones, θ = ¼ none."""
    sizes, powers = [100, 300], [16.0, 1.0]
    assert water_level(sizes, powers, (100 * 4 + 300 * 1) / 400) == pytest.approx(4.0)
    assert least_bits(sizes, powers, (100 * 4 + 300 * 1) / 400) == pytest.approx(0.25 * 1.0)
    assert water_level(sizes, powers, 0.25) == pytest.approx(0.25)
    assert least_bits(sizes, powers, 0.25) == pytest.approx(0.25 * 3.0 + 0.75 * 1.0)
    assert least_bits(sizes, powers, 4.75) == least_bits(sizes, powers, 5.0) == 0


TENSORS = st.lists(st.tuples(st.integers(1, 10**6), st.floats(0, 1e6) | st.just(0.0)), min_size=1, max_size=8)


@given(TENSORS, st.floats(1e-6, 1.0))
def test_the_level_spends_the_error_and_one_gaussian_needs_more(tensors, share):
    sizes, powers = zip(*tensors, strict=True)
    mean = sum(n * power for n, power in tensors) / sum(sizes)
    noise = share * mean
    if noise < 1e-300:
        return
    level = water_level(sizes, powers, noise)
    assert sum(n * min(level, power) for n, power in tensors) == pytest.approx(noise * sum(sizes), rel=1e-9)
    assert -1e-9 <= least_bits(sizes, powers, noise) <= 0.5 * math.log2(mean / noise) + 1e-9


def test_gradients_lie_as_training_lays_them():
    """Large tensors on multiples of 128, in buckets that backward fills from the end; small ones are not there."""
    grads = gradients()
    source = make_source("own", grads, None, 7)
    assert (source.count, source.values.size) == (3500, 2048 + 1500)
    assert source.messages == [slice(2048, 3548), slice(0, 2000)]
    assert np.array_equal(source.values[:2000], grads["first.weight"].ravel())
    assert np.array_equal(source.values[2048:], grads["second.weight"].ravel())
    assert not source.values[2000:2048].any()
    assert source.told == "3,500 of the gradient of step 7 of own: its large tensors, 2 of 4, in 2 messages"
    assert make_source("own", grads, 1.0, 7).messages == [slice(0, 3548)]
    powers = [float(np.mean(np.square(grads[name], dtype=np.float64))) for name in ("first.weight", "second.weight")]
    assert source.least_bits(0.01) == pytest.approx(least_bits([2000, 1500], powers, 0.01), rel=1e-12)


def test_gradients_that_are_none():
    with pytest.raises(ConfigError, match="own has no tensor that a codec would serve"):
        make_source("own", gradients(SPECS[1:2]), None, 1)
    grads = gradients()
    grads["first.weight"][3, 4] = np.nan
    with pytest.raises(DivergedError, match="the gradient of step 5 of own is not finite; take another --step"):
        make_source("own", grads, None, 5)


def test_drawn_values():
    one, other = draw("laplace", 1000), draw("laplace", 1000)
    assert np.array_equal(one.values, other.values)
    assert (one.messages, one.count) == ([slice(0, 1000)], 1000)
    power = float(np.mean(np.square(one.values, dtype=np.float64)))
    assert one.least_bits(power / 4) == pytest.approx(1 + 0.5 * math.log2(math.e / math.pi), abs=1e-12)
