"""What travels in place of gradients: what the configuration allows, differences to what was sent last, and units."""

from types import SimpleNamespace

import numpy as np
import pytest

from mpitrain.codecs.memory import Delta
from mpitrain.codecs.registry import make_codec
from mpitrain.config.load import resolve
from mpitrain.errors import ConfigError
from mpitrain.kernels import optimizer as kernels
from mpitrain.optim.frozen import LEAST_SHARE, FrozenAdamW
from mpitrain.optim.optimizer import AdamW
from mpitrain.params import Layout, Params, ParamSpec
from mpitrain.train.signal import LEAST_SHARE as LEAST_ROOT
from mpitrain.train.signal import Preconditioned

COARSE = ["int2", "sign", "topk-4"]


@pytest.mark.parametrize(
    ("tree", "told"),
    [
        ({"exchange": {"signal": "momentum"}}, "exchange.warmup_steps = 0 steps, which have taught it nothing"),
        ({"exchange": {"signal": "momentum"}, "optim": {"kind": "sgd", "momentum": 0.0}}, "momentum = 0 leaves no"),
        ({"exchange": {"signal": "momentum"}, "optim": {"kind": "sgd", "nesterov": True}}, "nesterov = true looks"),
        ({"exchange": {"signal": "momentum", "when": "local"}, "optim": {"kind": "sgd"}}, 'exchange.when = "local"'),
        (
            {"exchange": {"signal": "preconditioned"}, "optim": {"kind": "sgd"}},
            'but optim.kind = "sgd"; set optim.kind',
        ),
        ({"exchange": {"signal": "preconditioned", "when": "server", "servers": 1}}, 'exchange.when = "server"; set'),
        ({"exchange": {"codec": "sign", "memory": "delta"}}, 'signal = "momentum" and collective = "direct"'),
        (
            {
                "exchange": {"codec": "sign", "memory": "delta", "signal": "momentum", "collective": "ring"},
                "optim": {"kind": "sgd"},
            },
            'signal = "momentum" and collective = "direct"',
        ),
    ],
)
def test_what_is_refused(tree, told):
    with pytest.raises(ConfigError) as error:
        resolve(tree, "test", [])
    assert told in str(error.value)


@pytest.mark.parametrize("collective", ["ring", "server"])
def test_what_is_refused_in_a_rule(collective):
    exchange = {"codec": "int8", "memory": "delta", "signal": "momentum", "collective": collective, "warmup_steps": 9}
    assert resolve({"exchange": exchange}, "test", []).config.exchange.memory == "delta"
    with pytest.raises(ConfigError, match=r'exchange.rule\[0\]: .*with codec "sign" .*collective = "direct"'):
        resolve({"exchange": exchange | {"rule": [{"match": "*", "codec": "sign"}]}}, "test", [])


@pytest.mark.parametrize("codec", COARSE)
def test_what_is_allowed(codec):
    exchange = {"codec": codec, "memory": "delta", "signal": "momentum", "warmup_steps": 30}
    assert resolve({"exchange": exchange}, "test", []).config.exchange.memory == "delta"


@pytest.mark.parametrize("name", COARSE)
def test_full_differences_come_near_a_value_that_stays(name):
    """The payload is the codec's alone, both ends keep the same, and the error falls with every message."""
    codec = make_codec(name)
    sender, receiver = Delta(codec, 300), Delta(codec, 300)
    assert sender.max_nbytes(300) == codec.max_nbytes(300)
    x = np.random.default_rng(0).standard_normal(300).astype(np.float32)
    wire, decoded, out = np.zeros(sender.max_nbytes(300), np.uint8), np.empty_like(x), np.empty_like(x)
    past, errors = np.zeros_like(x), []
    for _ in range(12):
        nbytes, nonfinite = sender.encode(x, wire, decoded, key=0, first=0)
        assert nonfinite == 0
        twin = np.zeros(codec.max_nbytes(300), np.uint8)
        assert (wire[:nbytes] == twin[: codec.encode(x - past, twin)[0]]).all()
        receiver.decode(wire[:nbytes], out)
        assert (out == decoded).all()
        total = np.ones_like(x)
        receiver.decode_add(wire[:nbytes], total)
        assert (total == 1 + out).all()
        for end in (sender, receiver):
            end.commit()
        past = decoded.copy()
        errors.append(np.abs(x - decoded).mean())
    assert errors[-1] < 0.1 * errors[0]


def test_a_sum_beyond_the_largest_float_is_counted():
    sender = Delta(make_codec("sign"), 4)
    huge, wire = np.full(4, 3e38, np.float32), np.zeros(sender.max_nbytes(4), np.uint8)
    assert sender.encode(huge, wire, None, key=0, first=0)[1] == 0
    sender.commit()
    assert sender.encode(-huge, wire, None, key=0, first=0)[1] == 4


def test_momentum_of():
    rng = np.random.default_rng(1)
    grad, past = rng.standard_normal((2, 9)).astype(np.float32)
    following, expected = np.empty(9, np.float32), np.float32(0.9) * past + np.float32(0.1) * grad
    kernels.momentum_of(grad, past, following, np.float32(0.9), np.float32(0.1))
    assert np.allclose(following, expected, rtol=1e-6)
    assert (grad == following).all()


@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_a_frozen_step_is_numpys(dtype):
    """Root, correction and floor once; then first moments over them, decay where the tensor has one."""
    optimizer = FrozenAdamW(beta1=0.8, beta2=0.9, eps=1e-3, weight_decay=0.5)
    params = Params(Layout([ParamSpec("w", (20,), decay=True), ParamSpec("b", (5,))]), dtype)
    rng = np.random.default_rng(2)
    params.flat[:] = rng.standard_normal(params.flat.size)
    state, moment = optimizer.init(params), params.zeros_like()
    state.step = 3
    for name, values in state.buffers["second"].items():
        values[...] = rng.random(values.shape)
        values[1] = 0
        moment[name][...] = rng.standard_normal(values.shape)
    second = {name: values.astype(np.float64) for name, values in state.buffers["second"].items()}
    optimizer.freeze(state)
    before = {name: values.astype(np.float64) for name, values in params.items()}
    optimizer.step(params, moment, state, 0.01)
    assert state.step == 4
    for name, values in second.items():
        root = np.sqrt(np.maximum(values, LEAST_SHARE * values.mean()) / (1 - 0.9**3))
        np.testing.assert_allclose(state.buffers["second"][name], root, rtol=1e-5)
        keep = 1 - 0.01 * 0.5 if name == "w" else 1.0
        moved = before[name] * keep - 0.01 / (1 - 0.8**4) * moment[name] / (root + 1e-3)
        np.testing.assert_allclose(params[name], moved, rtol=1e-5, atol=1e-6)
        assert (state.buffers["first"][name] == moment[name]).all()


def test_freezing_before_any_step_divides_by_nothing():
    optimizer = FrozenAdamW()
    params = Params(Layout([ParamSpec("w", (4,))]))
    state = optimizer.init(params)
    optimizer.freeze(state)
    optimizer.step(params, params.zeros_like(), state, 0.1)
    assert np.isfinite(params.flat).all()


@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_units_of_a_preconditioned_gradient(dtype):
    """Roots as numpy's, with a floor by tensor; the first step and a tensor without a gradient are left alone."""
    params = Params(Layout([ParamSpec("w", (20,)), ParamSpec("b", (5,)), ParamSpec("dead", (3,))]), dtype)
    rng = np.random.default_rng(3)
    weights = SimpleNamespace(grads=params.zeros_like(), state=AdamW(beta2=0.9).init(params))
    signal = Preconditioned(weights, 0.9)
    weights.grads.flat[:] = rng.standard_normal(params.flat.size)
    before = {name: values.copy() for name, values in weights.grads.items()}
    signal.begin(1)
    signal.replace(list(before))
    signal.restore()
    assert all((weights.grads[name] == values).all() for name, values in before.items())
    weights.state.step = 2
    for name in ("w", "b"):
        weights.state.buffers["second"][name][...] = rng.random(before[name].shape) ** 8
        weights.state.buffers["second"][name][1] = 0
    signal.begin(3)
    signal.replace(["w"])
    signal.replace(["b", "dead"])
    for name, values in before.items():
        second = weights.state.buffers["second"][name].astype(np.float64)
        roots = np.sqrt(np.maximum(second, LEAST_ROOT * second.mean()) / (1 - 0.9**2)) if name != "dead" else 1.0
        np.testing.assert_allclose(weights.grads[name], values / roots, rtol=1e-5)
    signal.restore()
    for name, values in before.items():
        np.testing.assert_allclose(weights.grads[name], values, rtol=3e-7)
