"""Delay compensation against its plain numpy twin, its bound, and the case in which it is exact."""

import numpy as np
import pytest

from mpitrain.optim.compensation import EPSILON, Compensation
from mpitrain.params import Layout, Params, ParamSpec
from tests.reference.compensation import compensated

FLOATS = [np.float32, np.float64]
DECAYS = [None, 0.0, 0.95]
SPECIAL = [0.0, -0.0, 1e-45, -1e-40, 1e-30, 1e20, -3e38, np.inf, -np.inf, np.nan]


def draw(size, dtype):
    rng = np.random.default_rng(size)
    arrays = [rng.standard_normal(size) * 10.0 ** rng.integers(-12, 6, size) for _ in range(3)]
    return [x.astype(dtype) for x in (*arrays, rng.random(size))]


def check_against_twin(arrays, decay, strength=0.7):
    """Run kernel and twin; return the corrected gradient and the mean square."""
    grad, param, backup, mean_square = (x.copy() for x in arrays)
    expected, mean = compensated(*arrays, strength=strength, decay=decay)
    state = None if decay is None else mean_square
    Compensation(strength=strength, decay=decay).correct(grad, param, backup, state)
    assert np.array_equal(grad, expected, equal_nan=True)
    assert np.array_equal(np.signbit(grad) & ~np.isnan(grad), np.signbit(expected) & ~np.isnan(expected))
    assert np.array_equal(mean_square, mean)
    assert np.array_equal(param, arrays[1], equal_nan=True)
    assert np.array_equal(backup, arrays[2], equal_nan=True)
    return grad, mean_square


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("size", [0, 1, 2, 15, 16, 17, 127, 128, 129, 1000])
def test_equals_its_twin_bit_for_bit(size, dtype, decay):
    arrays = draw(size, dtype)
    grad, _ = check_against_twin(arrays, decay)
    assert size < 100 or not np.array_equal(grad, arrays[0])


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_special_values(dtype, decay):
    """Every combination of zeros, subnormal, huge and non-finite values: as the twin, and nothing bad is hidden."""
    with np.errstate(over="ignore"):
        special = np.array(SPECIAL + ([1e300, -1e-310] if dtype == np.float64 else []), dtype)
    arrays = [x.ravel() for x in np.meshgrid(special, special, special)]
    mean_square = np.ones_like(arrays[0])
    grad, mean = check_against_twin([*arrays, mean_square], decay)
    assert np.isfinite(mean).all()
    bad = ~np.isfinite(arrays[0])
    assert not np.isfinite(grad[bad]).any()


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_correction_is_never_longer_than_the_gradient(dtype, decay):
    """Whatever lambda: an element may vanish or double, its sign stays."""
    arrays = draw(500, dtype)
    for strength in (0.0, 1e-3, 1.0, 1e30):
        grad, _ = check_against_twin(arrays, decay, strength)
        assert np.all(np.abs(grad - arrays[0]) <= np.abs(arrays[0]))
        assert np.all(np.sign(grad) * np.sign(arrays[0]) >= 0)
        assert strength or np.array_equal(grad, arrays[0])
    assert np.all((grad == 0) | (grad == 2 * arrays[0]) | (arrays[1] == arrays[2]))


@pytest.mark.parametrize("decay", [None, 0.5])
def test_fresh_gradients_stay_as_they_are(decay):
    grad, param, _, mean_square = draw(300, np.float32)
    after, _ = check_against_twin([grad, param, param, mean_square], decay)
    assert after.tobytes() == grad.tobytes()


def test_the_formula_by_hand():
    """0.2 + 0.5·0.2²·(3 − 1) = 0.24; adaptive with m = 0: lambda = 0.5/√(0.04 + eps), about 2.5: 0.4."""
    grad, param, backup = np.array([0.2]), np.array([3.0]), np.array([1.0])
    Compensation(strength=0.5).correct(grad, param, backup)
    assert grad[0] == pytest.approx(0.24, rel=1e-12)
    grad, mean_square = np.array([0.2]), np.array([7.0])
    Compensation(strength=0.5, decay=0.0).correct(grad, param, backup, mean_square)
    assert mean_square[0] == pytest.approx(0.04, rel=1e-12)
    assert grad[0] == pytest.approx(0.2 + 0.5 / np.sqrt(0.04 + EPSILON) * 0.04 * 2, rel=1e-12)


def test_the_mean_square_remembers():
    compensation = Compensation(strength=0.1, decay=0.75)
    param = Params(Layout([ParamSpec("w", (3,))]), np.float32)
    assert Compensation(strength=0.1).init(param) == {}
    state = compensation.init(param)
    assert list(state) == ["mean_square"]
    assert state["mean_square"].layout is param.layout
    for _ in range(2):
        grad = np.full(param.flat.size, 2, np.float32)
        compensation.correct(grad, param.flat, param.flat, state["mean_square"].flat)
    assert np.all(state["mean_square"].flat == 0.75 * (0.25 * 4) + 0.25 * 4)


def test_arrays_that_do_not_fit_are_refused():
    ones = np.ones(3, np.float32)
    for other in (np.ones(2, np.float32), np.ones(3)):
        with pytest.raises(ValueError, match="one size and type"):
            Compensation(strength=1.0).correct(ones, ones, other)
    with pytest.raises(ValueError, match="mean square"):
        Compensation(strength=1.0, decay=0.5).correct(ones, ones, ones)
    with pytest.raises(ValueError, match="mean square"):
        Compensation(strength=1.0).correct(ones, ones, ones, ones)
