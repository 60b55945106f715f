"""Split models without MPI: who declares what, tied tensors, noise of a part, recomputation."""

import numpy as np
import pytest

from mpitrain.errors import ConfigError
from mpitrain.nn.activation import Gelu
from mpitrain.nn.dropout import Dropout
from mpitrain.nn.layer import EVALUATE, Chain, Context, Recomputed
from mpitrain.nn.linear import Linear
from mpitrain.nn.models import Mlp, Transformer
from mpitrain.nn.split import WHOLE, TensorSplit
from mpitrain.params import Layout, Params, ParamSpec

SHAPE = {"time": 6, "d_model": 24, "blocks": 2, "dropout": 0.5}
RANKS = range(1, 9)


def transformer(ranks, split=WHOLE, *, task="lm", outputs=11, **options):
    if "features" not in options:
        options["vocabulary"] = 11
    sizes = {"d_model": 2 * ranks, "heads": ranks, "d_ff": 3 * ranks, "time": 6, "blocks": 2, "dropout": 0.5}
    return Transformer(task=task, outputs=outputs, split=split, **sizes, **options)


MODELS = {
    "lm": transformer,
    "lm tied": lambda ranks, split: transformer(ranks, split, tied=True, recompute=True),
    "classify": lambda ranks, split: transformer(ranks, split, task="classify", outputs=4, features=3),
    "mlp": lambda ranks, split: Mlp(inputs=18, hidden=(2 * ranks, 5, ranks), outputs=4, dropout=0.5, split=split),
    "mlp with a last layer alone": lambda ranks, split: Mlp(
        inputs=18, hidden=(2 * ranks, 5), outputs=4, dropout=0.5, split=split
    ),
}


def start(model, dtype=np.float64):
    params = Params(Layout(model.specs()), dtype)
    params.initialize(3)
    return params


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", MODELS)
def test_the_parts_cover_every_tensor_once(name, ranks, sequence):
    whole = MODELS[name](ranks, WHOLE).specs()
    assert all(spec.shard is None and not spec.partial for spec in whole)
    parts = [MODELS[name](ranks, TensorSplit(rank, ranks, sequence=sequence)).specs() for rank in range(ranks)]
    for specs in parts:
        assert [spec.name for spec in specs] == [spec.name for spec in whole]
    for one, held in zip(whole, zip(*parts, strict=True), strict=True):
        assert {(spec.std, spec.mean, spec.decay, spec.partial) for spec in held} == {
            (one.std, one.mean, one.decay, held[0].partial)
        }
        if held[0].shard is None:
            assert {(spec.shape, spec.shard) for spec in held} == {(one.shape, None)}
            continue
        assert ranks > 1
        assert not held[0].partial
        times = np.zeros(one.shape, int)
        for spec in held:
            assert spec.shard.global_shape == one.shape
            assert spec.shape == spec.shard.shape == times[spec.shard.slices].shape
            times[spec.shard.slices] += 1
        assert (times == 1).all()


def test_what_is_split_and_what_is_not():
    specs = {spec.name: spec for spec in transformer(2, TensorSplit(1, 2)).specs()}
    assert {name: spec.shape for name, spec in specs.items() if spec.shard} == {
        "embedding.weight": (5, 4),
        "blocks.0.attention.qkv.weight": (6, 4),
        "blocks.0.attention.qkv.bias": (6,),
        "blocks.0.attention.out.weight": (4, 2),
        "blocks.0.mlp.hidden.weight": (3, 4),
        "blocks.0.mlp.hidden.bias": (3,),
        "blocks.0.mlp.out.weight": (4, 3),
        "blocks.1.attention.qkv.weight": (6, 4),
        "blocks.1.attention.qkv.bias": (6,),
        "blocks.1.attention.out.weight": (4, 2),
        "blocks.1.mlp.hidden.weight": (3, 4),
        "blocks.1.mlp.hidden.bias": (3,),
        "blocks.1.mlp.out.weight": (4, 3),
        "head.weight": (5, 4),
        "head.bias": (5,),
    }
    assert specs["embedding.weight"].shard.start == (6, 0)


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_a_part_has_the_same_layers_and_runs_without_the_others(name, sequence):
    """For counting: the base class exchanges nothing, but shapes are right."""
    whole = MODELS[name](3, WHOLE)
    x = np.arange(12).reshape(2, 6) % 11 if name.startswith("lm") else np.ones((2, 6, 3))
    context = Context(train=True, key=1, samples=np.arange(2))
    for rank in range(3):
        split = TensorSplit(rank, 3, sequence=sequence)
        model = MODELS[name](3, split)
        assert len(model.layers) == len(whole.layers)
        assert [len(layer.specs()) for layer in model.layers] == [len(layer.specs()) for layer in whole.layers]
        params = start(model)
        output, cache = model.forward(params, x, context)
        width = split.bounds(11)[1] - split.bounds(11)[0] if name.startswith("lm") else 4
        assert output.shape == ((2, 6, width) if name.startswith("lm") else (2, width))
        assert model.backward(params, cache, output, params.zeros_like()).size == 0


def test_one_rank_is_not_split():
    assert not TensorSplit(sequence=True).sequence
    assert WHOLE.enter() == WHOLE.leave() == WHOLE.enter(4) == WHOLE.split_time(4) == WHOLE.gather_time(4) == ()


def test_refusals_name_the_ranks_that_work():
    with pytest.raises(
        ConfigError, match=r"^model.heads = 6 does not divide by parallel.tp = 4; set parallel.tp = 1, 2, 3 or 6$"
    ):
        Transformer(task="lm", vocabulary=9, outputs=9, heads=6, d_ff=24, split=TensorSplit(0, 4), **SHAPE)
    with pytest.raises(ConfigError, match=r"model.d_ff = 10 .*tp = 4; set parallel.tp = 1 or 2$"):
        Transformer(task="lm", vocabulary=9, outputs=9, heads=4, d_ff=10, split=TensorSplit(0, 4), **SHAPE)
    with pytest.raises(ConfigError, match=r"model.hidden\[2\] = 5 .*tp = 2; set parallel.tp = 1$"):
        Mlp(inputs=3, hidden=(4, 3, 5), outputs=2, split=TensorSplit(0, 2))
    Mlp(inputs=3, hidden=(4, 3), outputs=2, split=TensorSplit(0, 2))


# Tied tensors.


def test_a_tied_tensor_is_declared_once_and_its_gradients_add_up():
    tied, apart = transformer(2, tied=True), transformer(2)
    assert [spec.name for spec in tied.specs()] == [s.name for s in apart.specs() if s.name != "head.weight"]
    params, both = start(tied), start(apart)
    for name in params:
        both[name][...] = params[name]
    both["head.weight"][...] = params["embedding.weight"]
    grads, split = params.zeros_like(), both.zeros_like()
    tokens = np.arange(12).reshape(2, 6) % 11
    for model, values, into in ((tied, params, grads), (apart, both, split)):
        output, cache = model.forward(values, tokens, EVALUATE)
        model.backward(values, cache, np.cos(output), into)
    expected = split["head.weight"] + split["embedding.weight"]
    np.testing.assert_allclose(grads["embedding.weight"], expected, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_tied_tensor_is_finished_with_its_earliest_layer(ranks):
    model = transformer(2, TensorSplit(0, ranks), tied=True)
    params = start(model)
    grads = params.zeros_like()
    output, cache = model.forward(params, np.arange(12).reshape(2, 6) % 11, EVALUATE)
    reported = []

    def finished(names):
        reported.extend(names)

    model.backward(params, cache, output, grads, finished=finished)
    assert sorted(reported) == sorted(params)
    assert reported[0] == "head.bias"
    assert reported[-1] == "embedding.weight"


def test_a_stage_with_the_tied_head_alone_declares_the_tensor():
    layers = transformer(2, TensorSplit(1, 2), tied=True).layers
    first, last = Chain(layers[:1]), Chain(layers[-1:])
    assert [spec.name for spec in last.specs()] == ["embedding.weight", "head.bias"]
    assert first.specs() == last.specs()[:1]
    params = start(last)
    output, cache = last.forward(params, np.ones((1, 6, 4)), EVALUATE)
    reported = []
    last.backward(params, cache, output, params.zeros_like(), finished=reported.extend)
    assert reported == ["embedding.weight", "head.bias"]


def test_tensors_of_one_name_and_different_shapes_are_still_refused():
    chain = Chain([Linear("l", 2, 3), Linear("l", 3, 2)])
    with pytest.raises(ConfigError, match="share a name"):
        Layout(chain.specs())
    assert Chain([Linear("l", 2, 2), Gelu(), Linear("l", 2, 2)]).specs() == [
        ParamSpec("l.weight", (2, 2), std=0.02, decay=True),
        ParamSpec("l.bias", (2,)),
    ]


def test_tying_needs_a_vocabulary():
    for options in (
        {"task": "classify", "vocabulary": 9},
        {"task": "lm", "features": 3},
        {"task": "lm", "vocabulary": 8},
    ):
        with pytest.raises(ConfigError, match=r"tied = true needs task = \"lm\".*set tied = false"):
            Transformer(outputs=9, heads=2, d_ff=8, tied=True, **SHAPE, **options)


# The noise of a part.


@pytest.mark.parametrize("first", [0, 1, 2, 5, 8, 20])
@pytest.mark.parametrize("elements", [0, 1, 2, 7])
def test_dropout_of_a_part_is_a_part_of_the_dropout(first, elements):
    context = Context(train=True, key=5, samples=np.array([3, 2**40]))
    whole = Dropout("d", 0.4).forward({}, np.ones((2, 27)), context)[0]
    part, cache = Dropout("d", 0.4, first).forward({}, np.ones((2, elements)), context)
    assert np.array_equal(part, whole[:, first : first + elements])
    assert cache.keep.shape == (2, elements)


# Recomputation.


def test_recomputation_keeps_the_input_alone_and_changes_no_bit():
    layers = [Linear("a", 4, 4, std=1.0), Dropout("d", 0.5), Gelu(), Linear("b", 4, 3, std=1.0)]
    kept, again = Chain(layers), Recomputed(layers)
    params, x = start(kept), np.random.default_rng(0).standard_normal((5, 4))
    context = Context(train=True, key=9, samples=np.arange(5))
    results = []
    for chain in (kept, again):
        grads, reported = params.zeros_like(), []
        y, cache = chain.forward(params, x, context)
        dx = chain.backward(params, cache, np.cos(y), grads, finished=reported.append)
        results.append((y.tobytes(), dx.tobytes(), grads.flat.tobytes(), reported))
    assert results[0] == results[1]
    assert cache.caches == (x, context)
    assert results[1][3] == [["b.weight", "b.bias"], ["a.weight", "a.bias"]]


def test_a_recomputed_model_has_the_gradients_of_the_other():
    tokens = np.arange(12).reshape(2, 6) % 11
    context = Context(train=True, key=9, samples=np.arange(2))
    results = []
    for recompute in (False, True):
        model = transformer(2, recompute=recompute)
        assert [isinstance(layer, Recomputed) for layer in model.layers].count(True) == (2 if recompute else 0)
        params = start(model)
        grads = params.zeros_like()
        output, cache = model.forward(params, tokens, context)
        model.backward(params, cache, np.cos(output), grads)
        results.append((output.tobytes(), grads.flat.tobytes()))
    assert results[0] == results[1]
