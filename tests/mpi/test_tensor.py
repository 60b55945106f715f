"""Models split over a tensor axis against the same models on one rank, in float64 and bit for bit between ranks."""

import zlib

import numpy as np
import pytest

from mpitrain.codecs.registry import make_codec
from mpitrain.collectives.base import Traffic, Transport
from mpitrain.collectives.predicted import sent_for_sum
from mpitrain.comm.frame import HEADER_BYTES
from mpitrain.comm.grid import Axis
from mpitrain.errors import ConfigError, DataError
from mpitrain.nn.layer import EVALUATE, Context
from mpitrain.nn.loss import cross_entropy, squared_error
from mpitrain.nn.models import Mlp, Transformer
from mpitrain.parallel.loss import vocab_parallel_cross_entropy
from mpitrain.parallel.tensor import TensorParallel
from mpitrain.params import Layout, Params
from mpitrain.partition import bounds, split_sizes

VOCABULARY = 101
BATCH = 5


@pytest.fixture
def tensor(comm):
    return Axis(comm, "tensor")


def make_split(axis, codec="raw", *, sequence=False, dtype=np.float64):
    return TensorParallel(axis, Transport(30.0), codec, sequence=sequence, dtype=dtype)


def make_transformer(ranks, task="classify", *, tokens=False, time=7, **options):
    inputs = {"vocabulary": VOCABULARY} if tokens else {"features": 3}
    outputs = VOCABULARY if task == "lm" else 4
    heads = 2 * ranks
    sizes = {"time": time, "d_model": 2 * heads, "blocks": 2, "heads": heads, "d_ff": 3 * ranks, "outputs": outputs}
    return Transformer(task=task, dropout=0.3, **sizes, **inputs, **options)


def make_mlp(ranks, layers, **options):
    widths = (12 * ranks, 9, 8 * ranks, 7)[:layers]
    return Mlp(inputs=12, hidden=widths, outputs=4, dropout=0.3, **options)


def inputs_of(model, time=7):
    rng = np.random.default_rng(1)
    if isinstance(model, Mlp):
        return rng.standard_normal((BATCH, 4, 3))
    if "embedding.weight" in {spec.name for spec in model.specs()}:
        return rng.integers(0, VOCABULARY, (BATCH, time))
    return rng.standard_normal((BATCH, time, 3))


def train_context(batch=BATCH):
    return Context(train=True, key=2**63 + 5, samples=np.arange(batch) * 7 + 3)


def fill(params, *, bias=None):
    """Draw every parameter from its name: a rank's part is the part of one rank's tensor."""
    for spec in params.layout.specs:
        shape = spec.shard.global_shape if spec.shard else spec.shape
        rng = np.random.default_rng(zlib.crc32(spec.name.encode()))
        values = 0.4 * rng.standard_normal(shape)
        if bias is not None and spec.name.endswith("bias"):
            values[...] = bias
        params[spec.name][...] = values[spec.shard.slices] if spec.shard else values


def start(model, dtype=np.float64, **options):
    params = Params(Layout(model.specs()), dtype)
    fill(params, **options)
    return params, params.zeros_like()


def loss_of(task, output, split=None):
    """Return the loss of (a part of) the outputs against the same targets everywhere."""
    rng = np.random.default_rng(2)
    leading = output.shape[:-1]
    if task == "forecast":
        return squared_error(output, rng.standard_normal(output.shape), total_weight=7.0)
    options = {"total_weight": 7.0, "weights": rng.integers(0, 3, leading).astype(float), "label_smoothing": 0.1}
    if task != "lm":
        return cross_entropy(output, rng.integers(0, 4, leading), **options)
    targets = rng.integers(0, VOCABULARY, leading)
    if split is None:
        return cross_entropy(output, targets, **options)
    return vocab_parallel_cross_entropy(output, targets, split=split, vocabulary=VOCABULARY, **options)


def run(model, params, grads, x, task, context, split=None):
    output, cache = model.forward(params, x, context)
    loss = loss_of(task, output, split)
    model.backward(params, cache, loss.dout, grads)
    return output, loss


def assert_close(actual, expected, what=""):
    np.testing.assert_allclose(actual, expected, rtol=1e-10, atol=1e-10 * np.abs(expected).max(initial=0), err_msg=what)


def check_against_one_rank(split, everywhere, whole, mine, *, task, time=7, bias=None):
    """Compare output, loss and the gradient of every tensor."""
    x, context = inputs_of(whole, time), train_context()
    params, grads = start(whole, bias=bias)
    expected, expected_loss = run(whole, params, grads, x, task, context)
    my_params, my_grads = start(mine, bias=bias)
    output, loss = run(mine, my_params, my_grads, x, task, context, split)

    assert_close(output, expected[..., slice(*split.bounds(VOCABULARY))] if task == "lm" else expected, "output")
    assert_close(loss[:3], expected_loss[:3], "loss")
    assert everywhere(np.array(loss[:3]))
    names = {spec.name: spec for spec in whole.specs()}
    assert [spec.name for spec in mine.specs()] == list(names)
    for spec in mine.specs():
        grad, one = my_grads[spec.name], grads[spec.name]
        assert np.any(one), spec.name
        if spec.shard:
            assert_close(grad, one[spec.shard.slices], spec.name)
        elif spec.partial:
            assert_close(split.total(grad, exact=True), one, spec.name)
        else:
            assert_close(grad, one, spec.name)
            assert everywhere(grad), spec.name
    if split.size == 1:
        assert my_grads.flat.tobytes() == grads.flat.tobytes()
        assert split.traffic == Traffic()
    return my_params, my_grads


MODELS = {
    "classify": {},
    "classify causal": {"causal": True},
    "classify tokens": {"tokens": True},
    "forecast": {"task": "forecast"},
    "lm": {"task": "lm", "tokens": True},
    "lm tied": {"task": "lm", "tokens": True, "tied": True},
}


@pytest.mark.parametrize("sequence", [False, True], ids=["whole time", "sliced time"])
@pytest.mark.parametrize(
    ("name", "recompute"), [*((name, False) for name in MODELS), ("classify causal", True), ("lm tied", True)]
)
def test_transformer(tensor, everywhere, name, recompute, sequence):
    split = make_split(tensor, sequence=sequence)
    whole = make_transformer(tensor.size, **MODELS[name])
    mine = make_transformer(tensor.size, **MODELS[name], split=split, recompute=recompute)
    check_against_one_rank(split, everywhere, whole, mine, task=MODELS[name].get("task", "classify"))
    partial = {spec.name for spec in mine.specs() if spec.partial}
    inside = {f"blocks.{i}.{part}" for i in (0, 1) for part in ("norm1.gain", "norm1.bias", "norm2.gain", "norm2.bias")}
    inside |= {f"blocks.{i}.{part}.out.bias" for i in (0, 1) for part in ("attention", "mlp")}
    assert partial == (inside if split.sequence else set())


@pytest.mark.parametrize("layers", range(5))
def test_mlp(tensor, everywhere, layers):
    split = make_split(tensor)
    whole, mine = make_mlp(tensor.size, layers), make_mlp(tensor.size, layers, split=split)
    check_against_one_rank(split, everywhere, whole, mine, task="classify")
    sharded = [spec.name for spec in mine.specs() if spec.shard]
    assert len(sharded) == (3 * ((layers + 1) // 2) if tensor.size > 1 else 0)


@pytest.mark.parametrize("time", [1, 2])
def test_fewer_time_steps_than_ranks(tensor, everywhere, time):
    split = make_split(tensor, sequence=True)
    whole = make_transformer(tensor.size, time=time)
    mine = make_transformer(tensor.size, time=time, split=split)
    check_against_one_rank(split, everywhere, whole, mine, task="classify", time=time)


@pytest.mark.parametrize("sequence", [False, True])
def test_biases_count_once(tensor, everywhere, sequence):
    """T10: biases of 10 would show if they were added on every rank, or their gradients divided."""
    split = make_split(tensor, sequence=sequence)
    whole, mine = make_transformer(tensor.size), make_transformer(tensor.size, split=split)
    check_against_one_rank(split, everywhere, whole, mine, task="classify", bias=10)
    split = make_split(tensor)
    whole, mine = make_mlp(tensor.size, 3), make_mlp(tensor.size, 3, split=split)
    check_against_one_rank(split, everywhere, whole, mine, task="classify", bias=10)


def test_parts_together_are_the_whole(tensor, comm):
    """Initial values do not depend on the split; every element is on exactly one rank."""
    whole = Params(Layout(make_transformer(tensor.size, "lm", tokens=True).specs()))
    whole.initialize(3)
    split = make_split(tensor, dtype=np.float32)
    mine = Params(Layout(make_transformer(tensor.size, "lm", tokens=True, split=split).specs()))
    mine.initialize(3)
    for name, values in whole.items():
        spec = mine.layout.segments[name].spec
        parts = comm.allgather((spec.shard and spec.shard.slices, mine[name]))
        together = np.full(values.shape, np.nan, values.dtype)
        for slices, part in parts:
            together[slices if slices else ...] = part
        assert together.tobytes() == values.tobytes(), name
        if spec.shard:
            assert sum(part.size for _, part in parts) == values.size


def test_an_empty_batch(tensor):
    for sequence in (False, True):
        split = make_split(tensor, sequence=sequence)
        model = make_transformer(tensor.size, "lm", tokens=True, split=split)
        params, grads = start(model)
        empty = np.zeros((0, 7), np.int64)
        output, cache = model.forward(params, empty, train_context(0))
        loss = loss_of("lm", output, split)
        model.backward(params, cache, loss.dout, grads)
        assert loss[:3] == (0, 0, 0)
        assert not grads.flat.any()


def test_a_sliced_sequence_has_one_length(tensor):
    split = make_split(tensor, sequence=True)
    model = make_transformer(tensor.size, time=7, split=split)
    params, _ = start(model)
    x = np.zeros((1, 6, 3))
    if tensor.size == 1:
        assert model.forward(params, x, EVALUATE)[0].shape == (1, 4)
        return
    with pytest.raises(ConfigError, match=r"a sequence has 6 time steps.*the 7 that"):
        model.forward(params, x, EVALUATE)


# Compression.


@pytest.mark.parametrize("codec", ["fp16", "int8"])
@pytest.mark.parametrize("sequence", [False, True])
def test_compressed_exchanges_leave_the_same_bits(tensor, everywhere, codec, sequence):
    results = {}
    for name in ("raw", codec):
        split = make_split(tensor, name, sequence=sequence, dtype=np.float32)
        model = make_transformer(tensor.size, "lm", tokens=True, split=split)
        params, grads = start(model, np.float32)
        x = inputs_of(model)
        evaluated = model.forward(params, x, EVALUATE)[0]
        evaluation, split.traffic = split.traffic, Traffic()
        output, loss = run(model, params, grads, x, "lm", train_context(), split)
        assert everywhere(np.array(loss[:3]))
        assert output.dtype == loss.dout.dtype == np.float32
        replicated = [spec.name for spec in model.specs() if not spec.shard and not spec.partial]
        assert all(everywhere(grads[name]) for name in replicated)
        results[name] = evaluated, output, split.traffic.sent_bytes, evaluation.sent_bytes
    raw, lossy = results["raw"], results[codec]
    assert raw[0].tobytes() == lossy[0].tobytes(), "an evaluation travels raw"
    assert raw[3] == lossy[3]
    if tensor.size > 1:
        assert raw[1].tobytes() != lossy[1].tobytes()
        assert lossy[2] < raw[2]
    np.testing.assert_allclose(lossy[1], raw[1], atol=0.3 * np.abs(raw[1]).max(initial=0))


@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_exchanges_and_their_bytes(tensor, everywhere, codec):
    split = make_split(tensor, codec, dtype=np.float32)
    rank, ranks = tensor.rank, tensor.size
    if ranks == 1:
        assert split.enter() == split.leave() == split.enter(5) == split.leave(5) == split.split_time(5) == ()
        return
    coder = make_codec(codec)
    addends = [np.random.default_rng(r).standard_normal((2, 5, 70)).astype(np.float32) for r in range(ranks)]
    exact, tolerance = np.sum(addends, axis=0, dtype=np.float64), 1e-5 if codec == "raw" else 0.1 * ranks
    mine = slice(*split.bounds(5))

    total = split.total(addends[rank], exact=False)
    assert everywhere(total)
    np.testing.assert_allclose(total, exact, atol=tolerance)
    assert split.traffic.sent_bytes == sent_for_sum("direct", coder, "none", 700, ranks)[rank].nbytes

    split.traffic = Traffic()
    part = split.scatter_slices(addends[rank], exact=False)
    np.testing.assert_allclose(part, exact[:, mine], atol=tolerance)
    sizes = [140 * (stop - begin) for begin, stop in bounds(split_sizes(5, ranks))]
    assert split.traffic.messages == ranks - 1
    assert split.traffic.sent_bytes == sum(HEADER_BYTES + coder.nbytes(s) for r, s in enumerate(sizes) if r != rank)

    split.traffic = Traffic()
    whole = split.gather_slices(part, 5, exact=False)
    assert everywhere(whole)
    np.testing.assert_allclose(whole[:, mine], part, atol=tolerance)
    np.testing.assert_allclose(whole, exact, atol=2 * tolerance)
    assert split.traffic.sent_bytes == (ranks - 1) * (HEADER_BYTES + coder.nbytes(sizes[rank]))
    if codec == "raw":
        in_order = addends[0].copy()
        for addend in addends[1:]:
            in_order += addend
        for result, expected in ((total, in_order), (part, in_order[:, mine]), (whole, in_order)):
            assert result.tobytes() == expected.tobytes()
    for result in (total, part, whole):
        assert result.flags.c_contiguous
        assert result.dtype == np.float32


def test_exchanges_of_many_shapes_keep_few_buffers(tensor):
    split = make_split(tensor)
    if tensor.size == 1:
        return
    split.total(np.ones(1000), exact=True)
    one = split.held_bytes
    for size in (*range(1, 40), *range(1, 40)):
        assert (split.total(np.full(size, 1.0), exact=True) == tensor.size).all()
    assert split.held_bytes < one


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_becomes_nan_on_all_ranks(tensor, bad):
    split = make_split(tensor, "fp16")
    if tensor.size == 1:
        return
    for culprit in (0, tensor.size - 1):
        x = np.ones((2, 10, 3))
        if tensor.rank == culprit:
            x[0, 0, 1] = bad  # of the slice of rank 0
        assert np.isnan(split.total(x, exact=False)).all()
        part = split.scatter_slices(x, exact=False)
        assert np.isnan(part).all() == (tensor.rank in (0, culprit))
        assert np.isnan(part).any() == np.isnan(part).all()
        mine = np.full(part.shape, bad if tensor.rank == culprit else 1.0)
        assert np.isnan(split.gather_slices(mine, 10, exact=False)).all()
        assert (split.total(np.ones(5), exact=False) == tensor.size).all()


# The loss.


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("vocabulary", [1, 2, 3, 16, 101])
def test_loss_over_a_split_vocabulary(tensor, everywhere, vocabulary, smoothing):
    split = make_split(tensor)
    rng = np.random.default_rng(vocabulary)
    mine = slice(*split.bounds(vocabulary))
    for scale, shape in ((1.0, (4, 5)), (300.0, (6,)), (0.0, (3,)), (1.0, (0, 5))):
        logits = scale * rng.standard_normal((*shape, vocabulary))
        targets = rng.integers(0, vocabulary, shape)
        for weights in (None, rng.integers(0, 3, shape).astype(float)):
            options = {"total_weight": 5.0, "weights": weights, "label_smoothing": smoothing}
            one = cross_entropy(logits, targets, **options)
            part = logits[..., mine].copy()
            got = vocab_parallel_cross_entropy(part, targets, split=split, vocabulary=vocabulary, **options)
            assert_close(got[:3], one[:3])
            assert_close(got.dout, one.dout[..., mine])
            assert everywhere(np.array(got[:3]))
            assert np.array_equal(part, logits[..., mine])


def test_equal_logits_predict_the_lowest_token(tensor):
    """Ties between ranks go to the lower one, as the first of equal logits on one rank."""
    split = make_split(tensor)
    logits = np.zeros((1, VOCABULARY))
    for tied in ((0, 100), (40, 60, 99), (100,)):
        logits[...] = -1
        logits[0, list(tied)] = 2
        for target in tied:
            got = vocab_parallel_cross_entropy(
                logits[:, slice(*split.bounds(VOCABULARY))],
                np.array([target]),
                total_weight=1.0,
                split=split,
                vocabulary=VOCABULARY,
            )
            assert got.metric_sum == (target == tied[0])


def test_targets_outside_of_the_vocabulary(tensor):
    split = make_split(tensor)
    logits = np.zeros((2, split.bounds(VOCABULARY)[1] - split.bounds(VOCABULARY)[0]))
    for weights, refused in (([1.0, 1.0], True), ([1.0, 0.0], False)):
        targets, options = np.array([3, VOCABULARY]), {"total_weight": 1.0, "weights": np.array(weights)}
        if refused:
            with pytest.raises(DataError, match="0 to 100"):
                vocab_parallel_cross_entropy(logits, targets, split=split, vocabulary=VOCABULARY, **options)
        else:
            got = vocab_parallel_cross_entropy(logits, targets, split=split, vocabulary=VOCABULARY, **options)
            assert got.loss_sum == pytest.approx(np.log(VOCABULARY))
