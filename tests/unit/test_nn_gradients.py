"""Every layer and both models against central differences in float64."""

import zlib

import numpy as np
import pytest

from mpitrain.nn.activation import Gelu, Relu
from mpitrain.nn.attention import Attention, MultiHeadAttention
from mpitrain.nn.block import Block
from mpitrain.nn.dropout import Dropout
from mpitrain.nn.embedding import Embedding, Positions
from mpitrain.nn.layer import Chain, Context, Residual
from mpitrain.nn.linear import Linear
from mpitrain.nn.loss import cross_entropy, squared_error
from mpitrain.nn.models import Mlp, Transformer
from mpitrain.nn.norm import LayerNorm
from mpitrain.nn.pooling import Flatten, LastStep, MeanOverTime
from mpitrain.params import Layout, Params

STEP = 1e-5


def make_params(layer, dtype=np.float64, scale=0.5):
    """Draw every parameter, gains and biases too, large enough for all paths to matter."""
    params = Params(Layout(layer.specs()), dtype)
    for name in params:
        rng = np.random.default_rng(zlib.crc32(name.encode()))
        params[name][...] = scale * rng.standard_normal(params[name].shape)
    return params


def context_for(batch):
    return Context(train=True, key=2**63 + 5, samples=np.arange(batch) * 7 + 3)


def numeric_gradient(function, array):
    """Differentiate ``function()`` by every element of ``array``, which it reads."""
    gradient = np.zeros_like(array)
    for index in np.ndindex(array.shape):
        kept = array[index]
        array[index] = kept + STEP
        above = function()
        array[index] = kept - STEP
        below = function()
        array[index] = kept
        gradient[index] = (above - below) / (2 * STEP)
    return gradient


def check_directions(function, array, gradient):
    """Check ``gradient`` along three random directions: a model has too many elements for one at a time."""
    rng, kept = np.random.default_rng(6), array.copy()
    for _ in range(3):
        direction = rng.standard_normal(array.shape)
        slopes = []
        for sign in (1, -1):
            array[...] = kept + sign * STEP * direction
            slopes.append(function())
        array[...] = kept
        assert_close(np.sum(gradient * direction), (slopes[0] - slopes[1]) / (2 * STEP))


def assert_close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-8)


def check_layer(layer, x):
    """Check a layer under the loss sum(y * random)."""
    params, context = make_params(layer), context_for(len(x))
    grads = params.zeros_like()
    y, cache = layer.forward(params, x, context)
    assert y.dtype == np.float64
    dy = np.random.default_rng(9).standard_normal(y.shape)
    given = x.copy(), dy.copy(), params.flat.copy()
    dx = layer.backward(params, cache, dy, grads)
    assert np.array_equal(x, given[0])
    assert np.array_equal(dy, given[1])
    assert np.array_equal(params.flat, given[2])

    def loss():
        return float(np.sum(layer.forward(params, x, context)[0] * dy))

    if x.dtype == np.float64 and not getattr(layer, "first", False):
        assert dx.shape == x.shape
        assert_close(dx, numeric_gradient(loss, x))
    else:
        assert dx.size == 0
    for name in params:
        assert_close(grads[name], numeric_gradient(loss, params[name]))
    once = grads.flat.copy()
    layer.backward(params, cache, dy, grads)
    np.testing.assert_allclose(grads.flat, 2 * once, rtol=1e-14)


def floats(*shape):
    return np.random.default_rng(4).standard_normal(shape)


LAYERS = {
    "linear": Linear("l", 4, 3),
    "linear without bias": Linear("l", 4, 3, bias=False),
    "first linear": Linear("l", 4, 3, first=True),
    "norm": LayerNorm("n", 4),
    "gelu": Gelu(),
    "relu": Relu(),
    "dropout": Dropout("d", 0.4),
    "positions": Positions("p", 5, 4),
    "mean": MeanOverTime(),
    "last": LastStep(),
    "flatten": Flatten(),
    "attention": MultiHeadAttention("a", 4, 2, causal=False),
    "causal attention": MultiHeadAttention("a", 4, 2, causal=True),
    "block": Block("b", 4, heads=2, hidden=6, causal=True, dropout=0.3),
    "residual": Residual([Linear("a", 4, 4), Gelu()]),
}


@pytest.mark.parametrize("shape", [(2, 3, 4), (1, 1, 4), (0, 3, 4), (3, 1, 4)], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_layer(name, shape):
    check_layer(LAYERS[name], floats(*shape))


@pytest.mark.parametrize("causal", [False, True])
def test_attention_of_three_heads(causal):
    check_layer(Attention(3, causal), floats(2, 4, 18))


@pytest.mark.parametrize("shape", [(2, 3), (1, 1), (0, 3)], ids=str)
def test_embedding(shape):
    check_layer(Embedding("e", 5, 3), np.random.default_rng(0).integers(0, 3, shape))


@pytest.mark.parametrize("layer", [Linear("l", 4, 3), LayerNorm("n", 4), Relu(), Gelu(), Dropout("d", 0.4)], ids=str)
def test_layers_that_take_any_leading_dims(layer):
    check_layer(layer, floats(3, 4))
    if not isinstance(layer, Dropout):
        check_layer(layer, floats(2, 1, 2, 4))


def model_inputs(model_kind, batch, time):
    rng = np.random.default_rng(1)
    if model_kind == "tokens":
        return rng.integers(0, 5, (batch, time))
    return rng.standard_normal((batch, time, 3))


def transformer(task, kind, *, dropout=0.2, blocks=2, outputs=3, **options):
    inputs = {"vocabulary": 5} if kind == "tokens" else {"features": 3}
    shape = {"time": 4, "d_model": 4, "blocks": blocks, "heads": 2, "d_ff": 5, "outputs": outputs}
    return Transformer(task=task, dropout=dropout, **shape, **inputs, **options)


MODELS = {
    "classify floats": (transformer("classify", "floats"), "floats"),
    "classify floats causal": (transformer("classify", "floats", causal=True, blocks=1), "floats"),
    "classify tokens": (transformer("classify", "tokens", dropout=0.0, blocks=1), "tokens"),
    "forecast floats causal": (transformer("forecast", "floats", causal=True, blocks=1), "floats"),
    "forecast no blocks": (transformer("forecast", "floats", blocks=0), "floats"),
    "lm": (transformer("lm", "tokens", blocks=1), "tokens"),
    "lm tied": (transformer("lm", "tokens", blocks=1, outputs=5, tied=True), "tokens"),
    "classify recomputed": (transformer("classify", "floats", recompute=True), "floats"),
    "mlp relu": (Mlp(inputs=6, hidden=(5, 4), outputs=3, dropout=0.3), "floats"),
    "mlp gelu": (Mlp(inputs=6, hidden=(5,), outputs=3, activation="gelu"), "floats"),
    "mlp linear": (Mlp(inputs=6, hidden=(), outputs=3), "floats"),
}


def evaluate_loss(name, output):
    rng = np.random.default_rng(2)
    weights = rng.integers(0, 3, output.shape[:-1]).astype(np.float64)
    if name.startswith("forecast"):
        targets = rng.standard_normal(output.shape)
        return squared_error(output, targets, total_weight=7.0, weights=np.repeat(weights[:, None], 3, axis=1))
    targets = rng.integers(0, 3, output.shape[:-1])
    return cross_entropy(output, targets, total_weight=7.0, weights=weights, label_smoothing=0.1)


@pytest.mark.parametrize(("batch", "time"), [(3, 2), (1, 1), (0, 2)])
@pytest.mark.parametrize("name", MODELS)
def test_model_with_its_loss(name, batch, time):
    model, kind = MODELS[name]
    if name.startswith("mlp"):
        time = 2
    x, params, context = model_inputs(kind, batch, time), make_params(model, scale=0.7), context_for(batch)
    grads = params.zeros_like()
    output, cache = model.forward(params, x, context)
    model.backward(params, cache, evaluate_loss(name, output).dout, grads)
    if batch == 0:
        assert output.shape == ((0, time, output.shape[-1]) if name.startswith("lm") else (0, 3))
        assert not grads.flat.any()
        return

    def loss():
        return evaluate_loss(name, model.forward(params, x, context)[0]).loss_sum / 7.0

    for param in params:
        check_directions(loss, params[param], grads[param])


def test_a_slice_of_layers_passes_the_gradient_on():
    model, _ = MODELS["classify floats"]
    stages = Chain(model.layers[:3]), Chain(model.layers[3:])
    params, x, context = make_params(model), model_inputs("floats", 3, 4), context_for(3)
    grads, staged = params.zeros_like(), params.zeros_like()
    output, cache = model.forward(params, x, context)
    model.backward(params, cache, np.ones_like(output), grads)
    middle, cache0 = stages[0].forward(params, x, context)
    staged_output, cache1 = stages[1].forward(params, middle, context)
    assert np.array_equal(staged_output, output)
    stages[0].backward(params, cache0, stages[1].backward(params, cache1, np.ones_like(output), staged), staged)
    assert np.array_equal(staged.flat, grads.flat)
