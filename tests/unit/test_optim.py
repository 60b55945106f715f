"""Optimizers, norms and schedules against plain numpy twins."""

import math

import numpy as np
import pytest

from mpitrain.errors import ConfigError
from mpitrain.kernels import optimizer as kernels
from mpitrain.optim.clip import clip_by_norm, clip_factor, global_norm, sum_of_squares
from mpitrain.optim.optimizer import AdamW, Sgd
from mpitrain.optim.schedule import Schedule
from mpitrain.params import Layout, Params, ParamSpec
from tests.reference.optimizers import adamw_step, sgd_step

SPECS = [
    ParamSpec("bias", (33,), std=0.5),
    ParamSpec("weight", (33, 40), std=0.5, decay=True),
    ParamSpec("empty", (0, 3), decay=True),
    ParamSpec("one", (1,), std=0.5, decay=True),
    ParamSpec("head", (129,), mean=1.0, decay=True),
]


def make(dtype):
    params = Params(Layout(SPECS), dtype)
    params.initialize(1)
    return params


def fill(grads, seed):
    rng = np.random.default_rng(seed)
    for name in grads:
        grads[name][...] = rng.standard_normal(grads[name].shape) * 10.0 ** rng.integers(-20, 5)


OPTIMIZERS = [
    Sgd(),
    Sgd(weight_decay=0.1),
    Sgd(momentum=0.9, weight_decay=0.1),
    Sgd(momentum=0.9, nesterov=True, weight_decay=0.1),
    AdamW(),
    AdamW(beta1=0.8, beta2=0.95, eps=1e-6, weight_decay=0.1),
]


def twin_step(optimizer, step, param, grad, buffers, lr, decay):
    if isinstance(optimizer, Sgd):
        return sgd_step(
            param, grad, buffers, lr=lr, momentum=optimizer.momentum, nesterov=optimizer.nesterov, weight_decay=decay
        )
    betas = {"beta1": optimizer.beta1, "beta2": optimizer.beta2, "eps": optimizer.eps}
    return adamw_step(param, grad, buffers, lr=lr, step=step, weight_decay=decay, **betas)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
def test_optimizer_equals_its_twin_bit_for_bit(optimizer, dtype):
    params = make(dtype)
    grads, state = params.zeros_like(), optimizer.init(params)
    twin = {name: params[name].copy() for name in params}
    memory = {name: [buffer[name].copy() for buffer in state.buffers.values()] for name in params}
    for step in range(1, 6):
        fill(grads, step)
        given, lr = grads.flat.copy(), 0.1 / step
        optimizer.step(params, grads, state, lr)
        assert np.array_equal(grads.flat, given)
        for spec in SPECS:
            name, decay = spec.name, optimizer.weight_decay if spec.decay else 0.0
            new = twin_step(optimizer, step, twin[name], grads[name], memory[name], lr, decay)
            twin[name], memory[name] = new
            assert twin[name].dtype == dtype
            assert np.array_equal(params[name], twin[name])
            for buffer, expected in zip(state.buffers.values(), memory[name], strict=True):
                assert np.array_equal(buffer[name], expected)
    assert state.step == 5


def test_state_is_named_and_of_the_parameters_layout():
    params = make(np.float32)
    assert list(Sgd().init(params).buffers) == []
    assert list(Sgd(momentum=0.9).init(params).buffers) == ["momentum"]
    state = AdamW().init(params)
    assert list(state.buffers) == ["first", "second"]
    assert state.step == 0
    assert all(buffer.layout is params.layout and not buffer.flat.any() for buffer in state.buffers.values())


def test_padding_stays_zero():
    params = make(np.float32)
    grads = params.zeros_like()
    grads.flat[:] = 1
    covered = np.zeros(params.layout.size, bool)
    for segment in params.layout.segments.values():
        covered[segment.start : segment.stop] = True
    assert not covered.all()
    optimizer = AdamW(weight_decay=0.1)
    optimizer.step(params, grads, optimizer.init(params), 0.1)
    assert not params.flat[~covered].any()


def test_weight_decay_is_decoupled_and_only_where_declared():
    params = make(np.float64)
    before, grads = params.flat.copy(), params.zeros_like()
    for optimizer in (Sgd(momentum=0.9, weight_decay=0.5), AdamW(weight_decay=0.5)):
        params.flat[:] = before
        optimizer.step(params, grads, optimizer.init(params), 0.1)
        for segment in params.layout.segments.values():
            factor = 0.95 if segment.spec.decay else 1.0
            expected = before[segment.start : segment.stop] * factor
            np.testing.assert_allclose(params.flat[segment.start : segment.stop], expected, rtol=1e-15)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("size", [0, 1, 2, 63, 64, 65, 127, 128, 1000, 100_003])
def test_sum_of_squares_is_exact_to_rounding(size, dtype):
    x = np.random.default_rng(size).standard_normal(size).astype(dtype)
    exact = math.fsum(float(value) ** 2 for value in x)
    assert sum_of_squares(x) == pytest.approx(exact, rel=1e-14)


@pytest.mark.parametrize("size", [1, 63, 64, 65, 128, 1000])
def test_every_element_counts_once(size):
    for index in {0, size // 2, size - 1}:
        x = np.zeros(size, np.float32)
        x[index] = 3
        assert sum_of_squares(x) == 9


@pytest.mark.parametrize("size", [63, 100, 127, 1000])
def test_sum_of_squares_order_is_that_of_the_plain_twin(size):
    x = np.random.default_rng(0).lognormal(sigma=3, size=size).astype(np.float32)
    lanes = np.zeros(64)
    for i, value in enumerate(x):
        lanes[i % 64] += float(value) * float(value)
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = lanes[:half] + lanes[half:]
    shifted = np.empty(size + 1, np.float32)[1:]
    shifted[:] = x
    assert sum_of_squares(x) == sum_of_squares(shifted) == lanes[0]


@pytest.mark.parametrize(
    ("optimizer", "steps"),
    [(AdamW(beta1=0.9, beta2=0.95), 2000), (Sgd(momentum=0.9), 1000), (Sgd(momentum=0.9, nesterov=True), 1000)],
)
def test_moments_without_gradients_fade_to_zero(optimizer, steps):
    """They are normal numbers all the way down, and then 0 (C17)."""
    params = make(np.float32)
    state, grads = optimizer.init(params), params.zeros_like()
    grads.flat[:] = 0.01
    optimizer.step(params, grads, state, 0.01)
    grads.flat[:] = 0
    for _ in range(steps):
        optimizer.step(params, grads, state, 0.01)
        for buffer in state.buffers.values():
            sizes = np.abs(buffer.flat)
            assert not ((sizes > 0) & (sizes < np.finfo(np.float32).tiny)).any()
    assert [buffer.flat.any() for buffer in state.buffers.values()] == [False] * len(state.buffers)


@pytest.mark.parametrize("value", [1e-45, 1e-30, 1e30, 3.4e38])
def test_subnormal_and_huge_values_neither_vanish_nor_overflow(value):
    x = np.full(100, value, np.float32)
    assert math.sqrt(sum_of_squares(x)) == pytest.approx(10 * float(x[0]), rel=1e-12)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_non_finite_values_show(value):
    x = np.zeros(1000, np.float32)
    x[777] = value
    assert not math.isfinite(sum_of_squares(x))


def test_global_norm_covers_all_tensors():
    params = make(np.float32)
    exact = math.sqrt(math.fsum(float(v) ** 2 for name in params for v in params[name].ravel()))
    assert global_norm(params) == pytest.approx(exact, rel=1e-14)


def test_clip_scales_only_what_is_too_long():
    grads = make(np.float32)
    before = grads.flat.copy()
    norm = global_norm(grads)
    assert clip_by_norm(grads, norm * 2) == (norm, 1.0)
    assert np.array_equal(grads.flat, before)
    assert clip_by_norm(grads, norm / 4) == (norm, 0.25)
    assert np.array_equal(grads.flat, before * np.float32(0.25))


def test_clip_leaves_non_finite_gradients_alone():
    grads = make(np.float32)
    grads["bias"][3] = np.inf
    before = grads.flat.copy()
    norm, factor = clip_by_norm(grads, 1.0)
    assert norm == np.inf
    assert factor == 1.0
    assert np.array_equal(grads.flat, before)
    assert clip_factor(math.nan, 1.0) == 1.0


@pytest.mark.parametrize("max_norm", [0.0, -1.0, math.nan])
def test_clip_refuses_a_bound_that_is_not_positive(max_norm):
    with pytest.raises(ConfigError, match="clip_norm"):
        clip_factor(1.0, max_norm)


def test_scale_kernel():
    x = np.arange(5, dtype=np.float32)
    kernels.scale(x, np.float32(2))
    assert x.tolist() == [0, 2, 4, 6, 8]


def test_constant_schedule():
    schedule = Schedule(kind="constant", lr=0.4, total_steps=20, warmup_steps=4, min_ratio=0.1)
    assert [schedule(s) for s in (0, 1, 3, 4, 19, 100)] == pytest.approx([0.1, 0.2, 0.4, 0.4, 0.4, 0.4])


@pytest.mark.parametrize(
    ("kind", "middle", "last"),
    [("cosine", 0.5, (1 + math.cos(math.pi * 15 / 16)) / 2), ("linear", 0.5, 1 / 16)],
)
def test_decay_schedules(kind, middle, last):
    schedule = Schedule(kind=kind, lr=2.0, total_steps=20, warmup_steps=4, min_ratio=0.2)
    steps = (0, 3, 4, 12, 19, 20, 1000)
    heights = (None, None, 1.0, middle, last, 0.0, 0.0)
    expected = [0.5, 2.0] + [2.0 * (0.2 + 0.8 * h) for h in heights[2:]]
    assert [schedule(s) for s in steps] == pytest.approx(expected)


@pytest.mark.parametrize("kind", ["constant", "cosine", "linear"])
def test_schedule_edges(kind):
    assert Schedule(kind=kind, lr=1.0, total_steps=1)(0) == 1.0
    assert Schedule(kind=kind, lr=1.0, total_steps=10)(9) > 0
    all_warmup = Schedule(kind=kind, lr=1.0, total_steps=5, warmup_steps=5)
    assert [all_warmup(s) for s in range(5)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert all_warmup(5) == 1.0
