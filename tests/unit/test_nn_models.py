"""What the models promise besides right gradients: types, order of completion, causality, independent noise."""

import numpy as np
import pytest

from mpitrain.errors import ConfigError, DataError
from mpitrain.nn.dropout import Dropout
from mpitrain.nn.embedding import Embedding, Positions
from mpitrain.nn.layer import EVALUATE, Context
from mpitrain.nn.models import Mlp, Transformer
from mpitrain.params import Layout, Params

SHAPE = {"time": 6, "d_model": 8, "blocks": 2, "heads": 2, "d_ff": 16}


def start(model, dtype=np.float32):
    params = Params(Layout(model.specs()), dtype)
    params.initialize(3)
    return params


def models():
    return {
        "mlp": (Mlp(inputs=18, hidden=(7, 5), outputs=4, dropout=0.5), np.ones((3, 6, 3), np.float32)),
        "encoder": (
            Transformer(task="classify", features=3, outputs=4, dropout=0.5, **SHAPE),
            np.random.default_rng(0).standard_normal((3, 6, 3)).astype(np.float32),
        ),
        "lm": (Transformer(task="lm", vocabulary=9, outputs=9, dropout=0.5, **SHAPE), np.arange(18).reshape(3, 6) % 9),
    }


def arrays_in(cache):
    if isinstance(cache, np.ndarray):
        return [cache]
    parts = cache if isinstance(cache, tuple) else vars(cache).values() if hasattr(cache, "__dict__") else ()
    return [array for part in parts for array in arrays_in(part)]


@pytest.mark.parametrize("name", ["mlp", "encoder", "lm"])
def test_float32_is_never_widened(name):
    model, x = models()[name]
    params = start(model)
    output, cache = model.forward(params, x, Context(train=True, key=1, samples=np.arange(3)))
    kinds = {array.dtype for array in arrays_in(cache) if array.dtype.kind == "f"}
    assert kinds == {output.dtype} == {np.dtype(np.float32)}
    assert model.backward(params, cache, output, params.zeros_like()).dtype == np.float32


@pytest.mark.parametrize("name", ["mlp", "encoder", "lm"])
def test_finished_reports_each_parameter_once_when_its_gradient_is_final(name):
    model, x = models()[name]
    params = start(model, np.float64)
    grads, expected = params.zeros_like(), params.zeros_like()
    output, cache = model.forward(params, x, EVALUATE)
    model.backward(params, cache, output, expected)
    reported = []

    def finished(names):
        for parameter in names:
            assert np.array_equal(grads[parameter], expected[parameter])
            assert grads[parameter].any()
        reported.append(names)

    model.backward(params, cache, output, grads, finished=finished)
    forward_order = [spec.name for spec in model.specs()]
    assert [name for names in reversed(reported) for name in names] == forward_order
    assert max(map(len, reported)) <= 2


def test_a_causal_model_does_not_look_ahead():
    model = Transformer(task="lm", vocabulary=9, outputs=9, **SHAPE)
    params = start(model, np.float64)
    params.flat[:] *= 10
    tokens = np.arange(12).reshape(2, 6) % 9
    before = model.forward(params, tokens, EVALUATE)[0]
    for step in range(6):
        changed = tokens.copy()
        changed[:, step] = (changed[:, step] + 1) % 9
        after = model.forward(params, changed, EVALUATE)[0]
        assert np.array_equal(after[:, :step], before[:, :step])
        assert (after[:, step:] != before[:, step:]).any(axis=(0, 2)).all()


def test_an_encoder_looks_both_ways():
    model = Transformer(task="forecast", features=3, outputs=2, **SHAPE)
    causal = Transformer(task="forecast", features=3, outputs=2, causal=True, **SHAPE)
    params, x = start(model), np.random.default_rng(0).standard_normal((2, 6, 3)).astype(np.float32)
    assert (model.forward(params, x, EVALUATE)[0] != causal.forward(params, x, EVALUATE)[0]).any()


def test_the_first_layer_returns_no_gradient():
    for model, x in models().values():
        params = start(model)
        output, cache = model.forward(params, x, EVALUATE)
        assert model.backward(params, cache, output, params.zeros_like()).size == 0


@pytest.mark.parametrize("name", ["mlp", "encoder", "lm"])
@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 0, 1), (3,)])
def test_noise_and_gradients_do_not_depend_on_the_split(name, sizes):
    model, x = models()[name]
    params = start(model, np.float64)
    whole, parts = params.zeros_like(), params.zeros_like()
    samples = np.array([5, 2**40, 11])
    output, cache = model.forward(params, x, Context(train=True, key=8, samples=samples))
    model.backward(params, cache, np.ones_like(output), whole)
    begin = 0
    for size in sizes:
        part = slice(begin, begin + size)
        context = Context(train=True, key=8, samples=samples[part])
        out, cache = model.forward(params, x[part], context)
        np.testing.assert_allclose(out, output[part], rtol=1e-12, atol=1e-14)
        model.backward(params, cache, np.ones_like(out), parts)
        begin += size
    np.testing.assert_allclose(parts.flat, whole.flat, rtol=1e-10, atol=1e-12)


def masks(name="a", key=1, rate=0.25, samples=range(200), shape=(51,), dtype=np.float32):
    context = Context(train=True, key=key, samples=np.array(samples))
    return Dropout(name, rate).forward({}, np.ones((len(context.samples), *shape), dtype), context)[0]


def test_dropout_keeps_the_mean_and_scales_what_stays():
    y = masks(shape=(40, 50))
    assert set(np.unique(y)) == {np.float32(0), np.float32(4 / 3)}
    assert abs(y.mean() - 1) < 0.005
    assert abs(y.mean(axis=0) - 1).max() < 5 * 0.58 / 200**0.5
    assert abs(y.mean(axis=(1, 2)) - 1).max() < 5 * 0.58 / 2000**0.5


def test_dropout_noise_differs_by_key_name_sample_and_element():
    base = masks() > 0
    expected = 0.75**2 + 0.25**2
    for other in (masks(key=2), masks(key=2**64 - 1), masks(name="b"), masks(samples=range(1000, 1200))):
        assert abs(np.mean((other > 0) == base) - expected) < 0.02
    for shift in (1, 2, 7):
        assert abs(np.mean(base[shift:] == base[:-shift]) - expected) < 0.02
        assert abs(np.mean(base[:, shift:] == base[:, :-shift]) - expected) < 0.02


def test_dropout_noise_is_the_same_in_both_types_and_forever():
    assert np.array_equal(masks() > 0, masks(dtype=np.float64) > 0)
    picture = "".join("x."[int(v)] for v in masks(samples=[0, 1], shape=(24,), rate=0.5).ravel() > 0)
    assert picture == GOLDEN


GOLDEN = "..x.xxxxxx..xxx.....x...xxxxxx...xxx....xxxxxxx."


def test_dropout_is_off_in_evaluation_and_at_rate_zero():
    x = np.ones((2, 3), np.float32)
    for layer, context in (
        (Dropout("a", 0.5), EVALUATE),
        (Dropout("a", 0.0), Context(train=True, samples=np.arange(2))),
    ):
        y, cache = layer.forward({}, x, context)
        assert y is x
        assert layer.backward({}, cache, x, {}) is x


def test_init_is_that_of_gpt2():
    model = Transformer(task="lm", vocabulary=300, outputs=300, time=64, d_model=64, blocks=8, heads=4, d_ff=256)
    params, specs = start(model), {spec.name: spec for spec in model.specs()}
    for name, std in (("embedding", 0.02), ("blocks.3.attention.qkv", 0.02), ("blocks.7.mlp.out", 0.005)):
        assert params[f"{name}.weight"].std() == pytest.approx(std, rel=0.05)
    assert params["blocks.0.attention.out.weight"].std() == pytest.approx(0.005, rel=0.05)
    assert (params["norm.gain"] == 1).all()
    assert not params["head.bias"].any()
    decaying = {name for name in specs if specs[name].decay}
    assert decaying == {n for n in specs if n.endswith(".weight") and n != "positions.weight"}


def test_softmax_survives_huge_scores():
    model = Transformer(task="classify", features=3, outputs=4, **SHAPE)
    params = start(model)
    params["blocks.0.attention.qkv.weight"][...] *= 1e4
    x = np.random.default_rng(0).standard_normal((2, 6, 3)).astype(np.float32)
    output, cache = model.forward(params, x, EVALUATE)
    grads = params.zeros_like()
    model.backward(params, cache, output, grads)
    assert np.isfinite(output).all()
    assert np.isfinite(grads.flat).all()


def test_gelu_survives_large_inputs():
    model = Mlp(inputs=1, hidden=(1,), outputs=1, activation="gelu")
    params = start(model)
    params["hidden.0.weight"][...] = params["head.weight"][...] = 1
    x = np.array([[-1e4], [-50], [0], [50], [1e4]], np.float32)
    output, cache = model.forward(params, x, EVALUATE)
    assert output.ravel().tolist() == [0, 0, 0, 50, 1e4]
    model.backward(params, cache, np.ones_like(output), params.zeros_like())


def test_refusals_name_the_remedy():
    with pytest.raises(ConfigError, match=r"heads = 3 does not divide d_model = 8; set one of \[1, 2, 4, 8\]"):
        Transformer(task="lm", vocabulary=9, outputs=9, **{**SHAPE, "heads": 3})
    with pytest.raises(ConfigError, match="exactly one"):
        Transformer(task="lm", vocabulary=9, features=2, outputs=9, **SHAPE)
    with pytest.raises(ConfigError, match="exactly one"):
        Transformer(task="lm", outputs=9, **SHAPE)
    positions = Positions("p", 2, 3)
    with pytest.raises(ConfigError, match="3 time steps"):
        positions.forward(start(positions), np.zeros((1, 3, 3), np.float32), EVALUATE)
    embedding = Embedding("e", 4, 3)
    for token in (-1, 4):
        with pytest.raises(DataError, match="0 to 3"):
            embedding.forward(start(embedding), np.array([[token]]), EVALUATE)
