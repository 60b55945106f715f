"""The twin that torch trains for `mpitrain bench step` is the same model; only where torch is installed."""

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install torch==2.13.0", exc_type=ImportError)

import torch

from mpitrain.bench import ddp
from mpitrain.config.load import resolve
from mpitrain.config.schema import ModelConfig
from mpitrain.nn.layer import EVALUATE
from mpitrain.nn.loss import cross_entropy, squared_error
from mpitrain.nn.models import Transformer
from mpitrain.params import Layout, Params

TIME, FEATURES, OUTPUTS = 6, 3, 5


def pair(task, *, causal=False):
    """Build our model and its twin, with the same weights."""
    tokens = task == "lm"
    ours = Transformer(
        task=task,
        time=TIME,
        d_model=8,
        blocks=2,
        heads=2,
        d_ff=12,
        outputs=OUTPUTS,
        features=None if tokens else FEATURES,
        vocabulary=OUTPUTS if tokens else None,
        causal=causal,
    )
    params = Params(Layout(ours.specs()))
    params.initialize(3)
    rng = np.random.default_rng(1)
    params.flat += 0.1 * rng.standard_normal(params.flat.shape).astype(np.float32)
    model = ModelConfig(task=task, d_model=8, layers=2, heads=2, d_ff=12, causal=causal)
    twin = ddp.Transformer(model, time=TIME, inputs=OUTPUTS if tokens else FEATURES, outputs=OUTPUTS, tokens=tokens)
    ddp.copy_weights(twin, params)
    return ours, params, twin


def batch(task):
    rng = np.random.default_rng(2)
    if task == "lm":
        return rng.integers(0, OUTPUTS, (4, TIME)), rng.integers(0, OUTPUTS, (4, TIME))
    x = rng.standard_normal((4, TIME, FEATURES)).astype(np.float32)
    if task == "forecast":
        return x, rng.standard_normal((4, OUTPUTS)).astype(np.float32)
    return x, rng.integers(0, OUTPUTS, 4)


@pytest.mark.parametrize(
    ("task", "causal"), [("classify", False), ("classify", True), ("forecast", False), ("lm", True)]
)
def test_loss_and_all_gradients_are_those_of_our_model(task, causal):
    ours, params, twin = pair(task, causal=causal)
    x, y = batch(task)
    output, cache = ours.forward(params, x, EVALUATE)
    if task == "forecast":
        result = squared_error(output, y, total_weight=y.size)
    else:
        result = cross_entropy(output, y, total_weight=y.size)
    grads = params.zeros_like()
    ours.backward(params, cache, result.dout, grads)
    loss = ddp.loss_of(task, twin(torch.from_numpy(x)), torch.from_numpy(y))
    loss.backward()
    assert loss.item() == pytest.approx(result.loss_sum / result.weight, rel=1e-5)
    found = {ddp.our_name(name): values.grad.numpy() for name, values in twin.named_parameters()}
    assert found.keys() == set(params)
    for name, grad in grads.items():
        np.testing.assert_allclose(found[name], grad, rtol=1e-3, atol=2e-6, err_msg=name)


def test_a_model_of_other_sizes_is_no_twin():
    _, params, _ = pair("classify")
    model = ModelConfig(d_model=8, layers=2, heads=2, d_ff=16)
    other = ddp.Transformer(model, time=TIME, inputs=FEATURES, outputs=OUTPUTS, tokens=False)
    with pytest.raises(RuntimeError, match="the models differ"):
        ddp.copy_weights(other, params)


def test_settings_that_the_twin_does_not_have_are_refused():
    tree = {"model": {"kind": "transformer", "dropout": 0.1}, "train": {"class_weights": "balanced"}}
    config = resolve(tree, "test", []).config
    assert ddp.refusals(config) == ["model.dropout = 0", 'train.class_weights = "equal"']
    assert ddp.refusals(resolve({}, "test", []).config) == []
