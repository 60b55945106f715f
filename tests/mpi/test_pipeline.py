"""The pipeline on any number of ranks against one rank that holds the whole model."""

import hashlib
from dataclasses import replace

import numpy as np
import pytest

from mpitrain.codecs.registry import CODECS, make_codec
from mpitrain.collectives.base import Traffic, Transport
from mpitrain.comm.agreement import gather
from mpitrain.comm.frame import HEADER_BYTES
from mpitrain.comm.grid import Axis
from mpitrain.config.codec_names import is_coarse
from mpitrain.errors import PeerLostError, ProtocolError
from mpitrain.nn.activation import Relu
from mpitrain.nn.layer import Chain
from mpitrain.nn.linear import Linear
from mpitrain.nn.loss import squared_error
from mpitrain.parallel.pipeline import Pipeline, PipelineSettings
from mpitrain.params import Layout, Params
from mpitrain.partition import split_sizes
from tests.mpi.pipelines import MODELS, Cut, batch, distance, whole

SCHEDULES = [("1f1b", 1), ("afab", 1), ("interleaved", 2)]
LOSSY = sorted(set(CODECS) - {"raw"})
BOUNDS = {"fp16": 0.02, "bf16": 0.2, "int8": 0.2, "int4": 2.0, "ecq": 2.0, "int8-rans": 0.2, "int4-rans": 2.0}
"""Of the gradients' errors; coarse codecs, which lose most of an activation, have none."""


def digest(arrays):
    return {name: hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest() for name, values in arrays.items()}


def to_zero(output, part):
    return squared_error(output, np.zeros_like(output), total_weight=10.0)


@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
@pytest.mark.parametrize("model", MODELS)
def test_gradients_are_those_of_one_rank(comm, model, schedule, chunks):
    """T01, T03, T04, T06: uneven layers, any number of micro-batches, uneven and empty ones; scaled once."""
    expected = {size: whole(model, batch(model, size)) for size in (8, 5, 2, 0)}
    for size, micro in [*((8, m) for m in range(1, 7)), (5, 4), (2, 5), (0, 4)]:
        cut, data = Cut(comm, model, schedule=schedule, chunks=chunks, micro_batches=micro), batch(model, size)
        told, early = [], []
        sums = cut.step(data, finished=told.extend, forward_done=early.append)
        grads, loss = expected[size]
        assert distance(cut.grads, grads) <= 1e-10, (size, micro)
        np.testing.assert_allclose(sums, loss[:3] if cut.last else (0, 0, 0), rtol=1e-12)
        assert early == [sums]
        assert sorted(told) == sorted(cut.params)
        assert cut.pipeline.current_bytes == 0
        assert not cut.pipeline.nonfinite


def test_finished_gradients_do_not_change_any_more(comm):
    for schedule, chunks in SCHEDULES:
        cut = Cut(comm, "classify", schedule=schedule, chunks=chunks, micro_batches=4)
        told = {}

        def finished(names, cut=cut, told=told):
            told.update({name: cut.grads[name].copy() for name in names})

        def forward_done(sums, told=told):
            assert not told

        cut.step(batch("classify", 8), finished=finished, forward_done=forward_done)
        assert digest(told) == digest(cut.grads)


def test_a_tensor_in_two_chunks_is_finished_once(comm):
    """A tied tensor gets the gradients of both layers that use it, and leaves when the last one is done."""
    chains = [Chain([Linear(f"tied.{piece % comm.size}", 4, 4)]) for piece in range(2 * comm.size)]
    mine = chains[comm.rank :: comm.size]
    settings = PipelineSettings(schedule="interleaved", micro_batches=2)
    pipeline = Pipeline(Axis(comm, "pipeline"), mine, settings, cut_shapes=[(4,)] * (len(chains) - 1), dtype=np.float64)
    params = Params(Layout(mine[0].specs()), np.float64)
    params.initialize(3)
    params.flat *= 20
    grads, told = params.zeros_like(), []
    data = batch("classify", 4)
    x = data.x[:, :, 0]

    def finished(names):
        told.append(names)
        assert np.any(grads[names[0]])

    pipeline.run(params, grads, x, data.context, loss=to_zero, finished=finished)
    everything = Params(Layout([spec for chain in chains[: comm.size] for spec in chain.specs()]), np.float64)
    everything.initialize(3)
    everything.flat *= 20
    expected, one = everything.zeros_like(), Chain(chains)
    output, cache = one.forward(everything, x, data.context)
    one.backward(everything, cache, to_zero(output, slice(None)).dout, expected)
    assert distance(grads, expected) <= 1e-10
    assert told == [list(params)]


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("codec", LOSSY)
def test_lossy_channels_stay_within_their_error(comm, codec, dtype):
    """Every message counted to the byte, every tensor near the exact gradient."""
    data = batch("classify", 7, dtype)
    cut = Cut(comm, "classify", micro_batches=3, codec=codec, gradient_codec=codec, dtype=np.dtype(dtype))
    cut.step(data)
    grads, _ = whole("classify", data, np.dtype(dtype))
    error = distance(cut.grads, grads)
    assert is_coarse(codec) or error <= BOUNDS[codec]
    here, there = (np.concatenate([tensors[name].reshape(-1) for name in cut.grads]) for tensors in (cut.grads, grads))
    assert np.isfinite(here).all()
    # Zeros would be within int4's bound.
    assert is_coarse(codec) or here @ there > 0.9 * np.linalg.norm(here) * np.linalg.norm(there)
    assert (error > 1e-9) == (comm.size > 1) or dtype == "f4"

    def nbytes(index):
        elements = int(np.prod(cut.cut_shapes[index]))
        sizes = [size * elements for size in split_sizes(7, 3)]
        return sum(HEADER_BYTES + make_codec(codec).nbytes(size) for size in sizes)

    right = [] if cut.last else [nbytes(comm.rank)]
    left = [] if cut.first else [nbytes(comm.rank - 1)]
    traffic = cut.pipeline.traffic
    if CODECS[codec].fixed_size:
        assert traffic.sent_bytes == traffic.received_bytes == sum(right + left)
    assert traffic.messages == 3 * len(right + left)


@pytest.mark.parametrize("codec", LOSSY)
def test_delta_keeps_both_ends_equal_and_learns_the_samples(comm, codec):
    """Two batches by turns: the more often a sample was sent, the nearer it arrives."""
    cut = Cut(comm, "classify", codec=codec, memory="delta", num_samples=400, micro_batches=3)
    batches = [batch("classify", size, first=first) for size, first in ((7, 0), (4, 1))]
    exact = [whole("classify", data)[0] for data in batches]
    errors = []
    for _ in range(4):
        for data, grads in zip(batches, exact, strict=True):
            cut.step(data)
            cut.pipeline.commit()
            equal_ends(cut)
            errors.append(distance(cut.grads, grads))
    worst = np.max(gather(cut.axis, errors), axis=0)
    learned = all(after < before / 10 for before, after in zip(worst[:2], worst[-2:], strict=True))
    assert comm.size == 1 or learned or is_coarse(codec), worst
    hits, misses = cut.pipeline.hits, cut.pipeline.misses
    assert (hits, misses) == ((0, 0) if cut.last else (3 * 11, 11))


def test_delta_of_a_rejected_step_never_was(comm):
    """Reference, slots and all that follows are as if the step had not been."""
    data, other = batch("classify", 6, "f4", 0), batch("classify", 5, "f4", 50)
    results = []
    for rejected in (False, True):
        cut = Cut(comm, "classify", dtype=np.float32, codec="int8", memory="delta", num_samples=400, micro_batches=2)
        cut.step(data)
        cut.pipeline.commit()
        if rejected:
            before = digest(cut.pipeline.state())
            cut.step(other)
            cut.step(data)
            cut.pipeline.rollback()
            assert digest(cut.pipeline.state()) == before
        cut.step(data)
        cut.pipeline.commit()
        equal_ends(cut)
        results.append((digest(cut.grads), digest(cut.pipeline.state())))
    assert results[0] == results[1]


def test_delta_within_a_small_budget_and_with_repeated_samples(comm):
    """Three samples have room; of one that comes twice in a step, both ends keep the same."""
    data = batch("lm", 6, first=0)
    data = replace(data, context=replace(data.context, samples=np.array([4, 9, 4, 1, 2, 9])))
    cut = Cut(comm, "lm", codec="int8", memory="delta", num_samples=100, reference_bytes=3 * 4 * 8 * 8, micro_batches=4)
    for _ in range(3):
        cut.step(data)
        cut.pipeline.commit()
        equal_ends(cut)
    assert (cut.pipeline.hits, cut.pipeline.misses) == ((0, 0) if cut.last else (2 * 5, 6 + 2))
    assert distance(cut.grads, whole("lm", data)[0]) < 0.2
    slots = 3 * (4 * 8 * 8 + 8)
    ends = 2 - cut.first - cut.last
    assert ends * slots < cut.pipeline.reference_bytes + (comm.size == 1) <= 1 + ends * (slots + 6 * 4 * 8 * 8)


def test_delta_goes_on_from_a_checkpoint(comm):
    """The arrays of a state, written into another pipeline, give the same bits from there on."""
    data = batch("classify", 6, "f4")
    options = {"dtype": np.float32, "codec": "int8", "memory": "delta", "num_samples": 50, "micro_batches": 2}
    old, new = Cut(comm, "classify", **options), Cut(comm, "classify", **options)
    for _ in range(2):
        old.step(data)
        old.pipeline.commit()
    saved = {name: values.copy() for name, values in old.pipeline.state().items()}
    for name, values in new.pipeline.state().items():
        values[...] = saved[name]
    for cut in (old, new):
        cut.step(data)
        cut.pipeline.commit()
    assert digest(old.grads) == digest(new.grads)
    assert digest(old.pipeline.state()) == digest(new.pipeline.state())


@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
def test_evaluation_is_exact_and_leaves_no_trace(comm, schedule, chunks):
    options = {"codec": "int8", "memory": "delta", "num_samples": 100, "micro_batches": 3}
    cut = Cut(comm, "lm", schedule=schedule, chunks=chunks, **options)
    for size in (7, 2, 0):
        data = batch("lm", size)
        before = digest(cut.pipeline.state())
        sums = cut.evaluate(data)
        _, loss = whole("lm", replace(data, context=replace(data.context, train=False)))
        np.testing.assert_allclose(sums, loss[:3] if cut.last else (0, 0, 0), rtol=1e-12)
        assert digest(cut.pipeline.state()) == before
        assert not cut.grads.flat.any()


@pytest.mark.parametrize("codec", ["raw", *LOSSY])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_not_finite_reach_every_stage(comm, value, codec):
    """T15: one bad weight in the middle; nobody hangs, every stage sees it, and the next step is as good as new.

    Even a commit, which the caller owes nobody, leaves both ends of every channel equal.
    """
    memory = "none" if codec == "raw" else "delta"
    cut = Cut(comm, "classify", codec=codec, memory=memory, num_samples=400, micro_batches=3)
    good = cut.params.flat.copy()
    data = batch("classify", 5)
    if comm.rank == comm.size // 2:
        cut.params[next(iter(cut.params))].flat[0] = value
    with np.errstate(all="ignore"):
        cut.step(batch("classify", 4, first=102))
    assert not all(np.isfinite(cut.grads[name]).all() for name in cut.grads)
    assert cut.pipeline.nonfinite == (comm.size > 1)
    if np.isnan(value):
        cut.pipeline.rollback()
    else:
        cut.pipeline.commit()
    cut.params.flat[:] = good
    cut.step(data)
    cut.pipeline.commit()
    assert not cut.pipeline.nonfinite
    new = Cut(comm, "classify", codec=codec, memory=memory, num_samples=400, micro_batches=3)
    new.step(data)
    assert digest(cut.grads) == digest(new.grads)
    if memory == "delta":
        equal_ends(cut)


def test_1f1b_keeps_as_many_micro_batches_as_there_are_stages_behind(comm):
    """Its peak is that of afab with so few micro-batches, and nothing stays after a step."""

    def peak(schedule, micro):
        cut = Cut(comm, "mlp", schedule=schedule, micro_batches=micro)
        cut.step(batch("mlp", micro))
        assert cut.pipeline.current_bytes == 0
        return cut.pipeline.peak_bytes

    few = [peak("afab", micro) for micro in range(1, comm.size + 1)]
    assert peak("1f1b", 8) == few[comm.size - comm.rank - 1] < peak("afab", 8)


@pytest.mark.parametrize(("elements", "piece_bytes"), [(1, 4099), (1024, 4099), (16384, 65536), (2**18, 2**20)])
def test_large_messages_do_not_deadlock(comm, elements, piece_bytes):
    """M08: from 4 bytes to 1 MiB, far above any eager limit, both ways at once."""
    chains = [Chain([Relu()]) for _ in range(2 * comm.size)]
    for schedule, chunks in (("1f1b", 1), ("interleaved", 2)):
        pipeline = Pipeline(
            Axis(comm, "pipeline"),
            chains[:chunks],
            PipelineSettings(schedule=schedule, micro_batches=4),
            cut_shapes=[(elements,)] * (chunks * comm.size - 1),
            transport=Transport(30, piece_bytes),
        )
        x = np.random.default_rng(1).standard_normal((4, elements)).astype("f4")
        data = batch("lm", 4)
        sums = pipeline.run({}, {}, x, data.context, loss=to_zero)
        expected = np.sum(np.maximum(x, 0).astype("f8") ** 2) if comm.rank == comm.size - 1 else 0
        assert sums.loss_sum == pytest.approx(expected, rel=1e-5)


def test_costs_are_noted(comm):
    cut = Cut(comm, "classify", micro_batches=3, codec="fp16")
    cut.pipeline.events = events = []
    cut.step(batch("classify", 6))
    kinds = [what for what, _, _ in events]
    neighbours = 2 - cut.first - cut.last
    assert {kind: kinds.count(kind) for kind in ("forward", "backward", "encode", "decode")} == {
        "forward": 3,
        "backward": 3,
        "encode": 3 * neighbours,
        "decode": 3 * neighbours,
    }
    assert ("wait" in kinds) == (comm.size > 1)
    assert all(begin <= end for _, begin, end in events)
    cut.pipeline.traffic = Traffic()
    cut.evaluate(batch("classify", 6))
    assert cut.pipeline.traffic.messages == (0 if cut.last else 3)


def test_another_codec_at_the_other_end_is_found(comm):
    """The end that opens the message tells it; the others find their neighbour silent, by name."""
    if comm.size == 1:
        return
    codec = "int8" if comm.rank == 0 else "fp16"
    cut = Cut(comm, "mlp", codec=codec, transport=Transport(timeout_s=0.5))
    expected, message = (PeerLostError, r"no message for 0.5 s while waiting for rank \d of the pipeline axis")
    if comm.rank == 1:
        expected, message = ProtocolError, "rank 0 of the pipeline axis: expected format 1, got 2"
    with pytest.raises(expected, match=message):
        cut.step(batch("mlp", 1))


def test_shapes_that_do_not_fit_are_refused(comm):
    with pytest.raises(
        ValueError, match=f"{comm.size} pieces of a model have {comm.size - 1} cuts, got {comm.size} shapes"
    ):
        Pipeline(Axis(comm, "pipeline"), [Chain([Relu()])], PipelineSettings(), cut_shapes=[(1,)] * comm.size)


def equal_ends(cut):
    """Compare the references at both ends of every cut, bit for bit."""
    states = gather(cut.axis, digest(cut.pipeline.state()))
    everything = {name: value for state in states for name, value in state.items()}
    ends = [name for name in everything if ".out." in name]
    assert len(ends) == 2 * (cut.axis.size - 1)
    for name in ends:
        assert everything[name] == everything[name.replace(".out.", ".in.")], name
