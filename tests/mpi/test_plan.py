"""What `mpitrain plan` predicts is what a run counts: bytes and messages of every rank, and what it remembers."""

import itertools

import numpy as np
import pytest
from mpi4py import MPI

from mpitrain.checkpoint.store import CheckpointStore
from mpitrain.codecs.registry import CODECS, make_codec
from mpitrain.collectives.base import Transport
from mpitrain.collectives.predicted import Sent
from mpitrain.collectives.registry import make_reducer
from mpitrain.comm.grid import ProcessGrid
from mpitrain.config.load import resolve
from mpitrain.config.validate import refusal
from mpitrain.data.open import open_dataset
from mpitrain.data.profiles import PROFILES
from mpitrain.nn.layer import Context
from mpitrain.nn.loss import cross_entropy
from mpitrain.nn.models import Mlp, Transformer
from mpitrain.parallel.cuts import cut_shapes, cuts, stage_layers
from mpitrain.parallel.loss import vocab_parallel_cross_entropy
from mpitrain.parallel.pipeline import Pipeline, PipelineSettings
from mpitrain.parallel.prediction import Replica, activation_bytes, pipeline_sent, reference_bytes, tensor_sent
from mpitrain.parallel.tensor import TensorParallel
from mpitrain.parallel.units import CountingSplit, units
from mpitrain.params import Layout, Params
from mpitrain.partition import GridShape
from mpitrain.train.buckets import BucketSums, group_of
from mpitrain.train.layouts import Costs
from mpitrain.train.predicted import predict_exchange, predict_memories
from mpitrain.train.predicted_servers import predict_orders, predict_served
from mpitrain.train.run import train

WORLD = MPI.COMM_WORLD.Get_size()
STEPS = 2
CLASSES = len(PROFILES)
BASE = {
    "data": {"stations": 6, "samples": 60, "test_samples": 12, "window": 4},
    "train": {"steps": STEPS, "batch_size": 12, "eval_every": 0},
    "checkpoint": {"every": 0},
}
MODELS = {
    "mlp": ({"kind": "mlp", "hidden": [40, 24]}, Mlp(inputs=20, hidden=(40, 24), outputs=len(PROFILES))),
    "transformer": (
        {"layers": 1, "d_model": 32, "heads": 2},
        Transformer(
            task="classify", time=4, d_model=32, blocks=1, heads=2, d_ff=128, outputs=len(PROFILES), features=5
        ),
    ),
}
EXCHANGES = [
    {"collective": collective, "codec": codec, "memory": memory}
    for collective, codec, memory in itertools.product(
        ["native", "ring", "direct", *(["server"] if WORLD > 1 else [])],
        CODECS,
        ["none", "residual", "delta"],
    )
    if refusal(collective, codec, memory) is None
]
SEVERAL = [{"collective": "server", "servers": servers, "bucket_mb": 0.01} for servers in range(2, WORLD)]
"""Server exchanges with more than one server, as many as the ranks at hand allow."""

RULED = {
    "codec": "int8",
    "memory": "delta",
    "bucket_mb": 0.005,
    "segment_kb": 1,
    "rule": [{"match": "*.bias", "codec": "raw"}],
}

LOWRANK = {"codec": "lowrank-3", "factor_codec": "int8", "bucket_mb": 0.005}
"""Needs matrices of some size; tests/mpi/test_lowrank.py has more."""


def assert_about(sent, predicted):
    """Of codecs whose bytes depend on the values: the messages are exact, the bytes never more than raw, and near."""
    assert [one.messages for one in sent] == [one.messages for one in predicted]
    for one, typical in zip(sent, predicted, strict=True):
        assert typical.nbytes / 2 <= one.nbytes <= 2 * typical.nbytes, (sent, predicted)


@pytest.mark.parametrize("model", MODELS)
def test_a_training_sends_what_is_predicted(world, folder, monkeypatch, model):
    monkeypatch.setattr(CheckpointStore, "save", lambda store, snapshot: None)
    table, chain = MODELS[model]
    for exchange in [*EXCHANGES, *SEVERAL, RULED] if model == "mlp" else [{}, *SEVERAL, RULED, LOWRANK]:
        tree = BASE | {"model": table, "exchange": exchange, "run": {"folder": str(folder / "run")}}
        resolved = resolve(tree, "test", [])
        counted = train(resolved, world, overwrite=True)["per_rank"]
        predicted = predict_exchange(chain.specs(), resolved.config.exchange, world.size)
        sent = [Sent(one["sent_bytes"], one["messages"]) for one in counted]
        if any(one.about for one in predicted):
            assert_about(sent, [one * STEPS for one in predicted])
            continue
        assert sent == [one * STEPS for one in predicted], exchange
        costs = Costs(resolved.config, open_dataset(resolved.config.data, "classify", resolved.config.train.seed))
        servers = resolved.config.exchange.servers
        shape = GridShape(world.size - servers, servers=servers)
        assert sum(sent, Sent()) == costs.of(shape).configured * STEPS, exchange


def test_steps_that_travel_raw_cost_what_is_predicted(world, folder, monkeypatch):
    monkeypatch.setattr(CheckpointStore, "save", lambda store, snapshot: None)
    table, chain = MODELS["mlp"]
    for ends in ({"warmup_steps": 1}, {"raw_last_steps": 1}):
        tree = BASE | {"model": table, "exchange": RULED | ends, "run": {"folder": str(folder / "run")}}
        resolved = resolve(tree, "test", [])
        counted = train(resolved, world, overwrite=True)["per_rank"]
        kinds = [
            predict_exchange(chain.specs(), resolved.config.exchange, world.size, raw=raw) for raw in (True, False)
        ]
        sent = [Sent(one["sent_bytes"], one["messages"]) for one in counted]
        assert sent == [raw + coded for raw, coded in zip(*kinds, strict=True)]
        costs = Costs(resolved.config, open_dataset(resolved.config.data, "classify", resolved.config.train.seed))
        data = costs.of(GridShape(world.size)).axes["data"]
        assert [sum(kind, Sent()) for kind in kinds] == [data.uncompressed, data.configured]


LOCAL = [
    {"h": 2},
    {"h": 4, "codec": "int4", "memory": "delta", "bucket_mb": 0.002, "fragments": 3, "delay": 1},
    {"h": 1, "outer_momentum": 0.0, "codec": "raw", "collective": "ring", "segment_kb": 1},
    *([{"h": 2, "collective": "server", "fragments": 2, "bucket_mb": 0.002}] if WORLD > 1 else []),
]


@pytest.mark.parametrize("exchange", LOCAL, ids=str)
def test_local_steps_cost_what_is_predicted(world, folder, monkeypatch, exchange):
    """An exchange a round, whatever its fragments; the plan spreads it over the steps."""
    monkeypatch.setattr(CheckpointStore, "save", lambda store, snapshot: None)
    table, chain = MODELS["transformer"]
    h = exchange["h"]
    tree = BASE | {"model": table, "exchange": exchange | {"when": "local"}, "run": {"folder": str(folder / "run")}}
    tree |= {"train": BASE["train"] | {"steps": 2 * h}, "data": BASE["data"] | {"placement": "shuffled"}}
    config = resolve(tree, "test", [])
    counted = train(config, world, overwrite=True)["per_rank"]
    sent = [Sent(one["sent_bytes"], one["messages"]) for one in counted]
    predicted = predict_exchange(chain.specs(), config.config.exchange, world.size)
    assert sent == [one * 2 for one in predicted]
    servers = config.config.exchange.servers
    costs = Costs(config.config, open_dataset(config.config.data, "classify", config.config.train.seed))
    cost = costs.of(GridShape(world.size - servers, servers=servers))
    together = sum(predicted, Sent())
    assert cost.configured == Sent(-(-together.nbytes // h), -(-together.messages // h))
    largest = max(counted, key=lambda one: one["array_bytes"])
    assert {name: largest[f"{KEPT[name]}_bytes"] for name in cost.memory} == cost.memory


SERVED = [
    {"mode": "sync"},
    {"mode": "ssp", "staleness": 2, "codec": "int4", "memory": "delta", "server_codec": "raw"},
    {"mode": "async", "window": 2, "codec": "fp16", "server_codec": "fp16", "bucket_mb": 0.005},
    {"mode": "async", "codec": "raw", "memory": "none", "delay_compensation": "adaptive"},
]
GRIDS = [
    shape
    for shape in itertools.starmap(GridShape, itertools.product(*[range(1, WORLD)] * 4))
    if shape.size == WORLD and shape.tp <= 2 and (shape.servers == 1 or shape.pp * shape.tp == 1)
]


def test_servers_cost_what_is_predicted(world, folder, monkeypatch):
    """Pushes and answers of all ranks in two rounds, whatever the order in which they came."""
    monkeypatch.setattr(CheckpointStore, "save", lambda store, snapshot: None)
    steps, rounds = 6, 2
    # Every way to be served on three ranks, and every grid on all.
    cases = [*(itertools.product(GRIDS[:1], SERVED) if WORLD == 3 else []), *zip(GRIDS, itertools.cycle(SERVED))]
    for shape, exchange in cases:
        axes = {"dp": shape.dp, "pp": shape.pp, "tp": shape.tp}
        tree = BASE | {
            "model": MODELS["transformer"][0] | {"dropout": 0.1},
            "data": BASE["data"] | {"placement": "shuffled"},
            "train": BASE["train"] | {"steps": steps, "eval_every": steps // rounds},
            "parallel": axes,
            "exchange": exchange | {"when": "server", "servers": shape.servers},
            "run": {"folder": str(folder / "run")},
        }
        resolved = resolve(tree, "test", [])
        config = resolved.config
        counted = train(resolved, world, overwrite=True)["per_rank"]
        costs = Costs(config, open_dataset(config.data, "classify", config.train.seed))
        cost, case = costs.of(shape), (shape, exchange)
        sent = sum((Sent(one["sent_bytes"], one["messages"]) for one in counted), Sent())
        assert sent == cost.configured * steps + at_round_ends(costs, shape) * rounds, case
        largest = max(counted, key=lambda one: one["array_bytes"])
        assert {name: largest[f"{KEPT[name]}_bytes"] for name in cost.memory} == cost.memory, case


def at_round_ends(costs, shape):
    """What all ranks send more in the last step of a round than in the others: weights, and no changes of them."""
    replica, exchange = costs.divider.replica(shape), costs.config.exchange
    more = Sent()
    for place in itertools.product(range(shape.pp), range(shape.tp)):
        served = predict_served(replica.specs(*place), exchange, shape.dp, replica.holders(*place))
        more += sum(served.refreshes, Sent()) + sum(served.replies, Sent()) * -1
    others = shape.servers * shape.pp * shape.tp - 1
    orders = [predict_orders(exchange, shape.dp, others, last=last) for last in (True, False)]
    return more + orders[0] + orders[1] * -1


def test_an_exchange_remembers_what_is_predicted(axis):
    for exchange in [*EXCHANGES, *SEVERAL, RULED]:
        config = resolve({"exchange": exchange}, "test", []).config.exchange
        for _, chain in MODELS.values():
            grads = Params(Layout(chain.specs(), group_of(config)))
            state = BucketSums(
                make_reducer(config.collective, axis, servers=config.servers), grads, config, seed=0
            ).state()
            held = sum(buffer.current.nbytes + buffer.next.nbytes for buffer in state.values())
            assert held == predict_memories(chain.specs(), config, axis.size)[axis.rank], exchange


TOKENS = 11
FORMS = [
    {"model": "lm"},
    {"model": "lm", "sequence": True, "dropout": 0.5, "schedule": "afab"},
    {"model": "lm", "recompute": True, "tied": True, "codec": "int8", "memory": "delta", "tensor_codec": "fp16"},
    {"model": "classify", "schedule": "interleaved", "chunks": 2, "dropout": 0.5, "codec": "fp16"},
    {"model": "mlp", "dropout": 0.5, "codec": "fp16", "tensor_codec": "int8"},
    {"model": "mlp", "schedule": "interleaved", "chunks": 2, "samples": 2},
    {"model": "classify", "samples": 0, "memory": "delta", "codec": "int8"},
]


def model_of(form, split, stages):
    """A model with enough units, whose sizes the tensor axis divides where it must."""
    tp = split.size
    rates = {"dropout": form.get("dropout", 0.0), "split": split}
    if form["model"] == "mlp":
        return Mlp(inputs=20, hidden=(12 * tp,) * (2 * stages), outputs=3, **rates), (20,), np.float32
    rates |= {"recompute": form.get("recompute", False), "tied": form.get("tied", False)}
    shape = {"time": 7, "d_model": 8 * tp, "blocks": stages, "heads": 2 * tp, "d_ff": 12 * tp}
    if form["model"] == "lm":
        return Transformer(task="lm", vocabulary=TOKENS, outputs=TOKENS, **shape, **rates), (7,), np.int64
    return Transformer(task="classify", features=20, outputs=3, **shape, **rates), (7, 20), np.float32


def predicted_replica(form, shape, chunks):
    """As the command does it: a split that exchanges nothing, for every tensor rank."""
    found = []
    for place in range(shape.tp):
        split = CountingSplit(place, shape.tp, sequence=form.get("sequence", False))
        chain, sample, dtype = model_of(form, split, shape.pp * chunks)
        found.append(units(chain, sample, dtype, split))
    return Replica(
        units=found,
        cuts=cuts(found[0], shape.pp * chunks),
        stages=shape.pp,
        chunks=chunks,
        schedule=form.get("schedule", "1f1b"),
        micro_batches=3,
        split_loss=form["model"] == "lm",
    )


@pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(map(str, form.values())))
def test_a_replica_sends_and_keeps_what_is_predicted(world, form):
    for pp in (n for n in range(1, world.size + 1) if world.size % n == 0):
        with ProcessGrid(world, GridShape(1, pp, world.size // pp)) as grid:
            check_replica(form, grid)


def check_replica(form, grid):
    chunks, samples, shape = form.get("chunks", 1), form.get("samples", 5), grid.shape
    replica = predicted_replica(form, shape, chunks)
    stage, place = grid.pipeline.rank, grid.tensor.rank
    codec, memory, tensor_codec = form.get("codec", "raw"), form.get("memory", "none"), form.get("tensor_codec", "raw")
    split = TensorParallel(grid.tensor, Transport(30), tensor_codec, sequence=form.get("sequence", False))
    chain, sample, dtype = model_of(form, split, shape.pp * chunks)
    mine = stage_layers(chain, replica.units[place], replica.cuts, shape.pp, chunks)[stage]
    pipeline = Pipeline(
        grid.pipeline,
        mine,
        PipelineSettings(
            schedule=replica.schedule,
            micro_batches=replica.micro_batches,
            codec=codec,
            gradient_codec="fp16",
            memory=memory,
            reference_bytes=10_000,
            num_samples=40,
        ),
        cut_shapes=cut_shapes(replica.units[place], replica.cuts),
        transport=Transport(30),
    )
    params = Params(Layout(replica.specs(stage, place)))
    params.initialize(1)
    y = np.arange(samples * 7).reshape(samples, 7) % TOKENS if form["model"] == "lm" else np.arange(samples) % 3

    def loss(output, part):
        if form["model"] != "lm":
            return cross_entropy(output, y[part], total_weight=5.0)
        return vocab_parallel_cross_entropy(output, y[part], total_weight=5.0, split=split, vocabulary=TOKENS)

    x = np.ones((samples, *sample), dtype) if stage == 0 else None
    context = Context(train=True, samples=np.arange(samples))
    pipeline.run(params, params.zeros_like(), x, context, loss=loss)

    sent = Sent(pipeline.traffic.sent_bytes, pipeline.traffic.messages)
    codecs = make_codec(codec), make_codec("fp16")
    assert sent == pipeline_sent(replica, samples, *codecs, memory)[stage][place], shape
    sent = Sent(split.traffic.sent_bytes, split.traffic.messages)
    assert sent == tensor_sent(replica, samples, make_codec(tensor_codec))[stage][place], shape
    assert pipeline.peak_bytes == activation_bytes(replica, samples, stage, place), shape
    expected = reference_bytes(replica, samples, 40, 10_000, stage, place) if memory == "delta" else 0
    assert pipeline.reference_bytes == expected, shape


TOKEN_DATA = {"kind": "text", "stations": 8, "window": 8, "stride": 4000, "placement": "shuffled"}
SPLIT_RUNS = {
    "tied": {
        "model": {"task": "lm", "layers": 3, "d_model": 60, "heads": 60, "d_ff": 60, "tied": True, "dropout": 0.1},
        "data": TOKEN_DATA,
        "exchange": {"codec": "int8", "memory": "residual"},
        "parallel": {"codec": "int8", "gradient_codec": "fp16", "memory": "delta", "tensor_codec": "int4"},
    },
    "classify": {
        "model": {"layers": 3, "d_model": 60, "heads": 60, "d_ff": 60},
        "data": BASE["data"] | {"placement": "shuffled"},
        "exchange": {"codec": "int4", "memory": "delta", "collective": "ring", "bucket_mb": 0.01},
        "parallel": {"sequence": True, "recompute": True, "schedule": "afab"},
    },
    "local": {
        "model": {"layers": 3, "d_model": 60, "heads": 60, "d_ff": 60},
        "data": BASE["data"] | {"placement": "shuffled"},
        "exchange": {"when": "local", "h": 1, "codec": "int8", "memory": "residual", "fragments": 1},
        "parallel": {},
    },
}
KEPT = {
    "parameters": "params",
    "gradients": "grads",
    "optimizer": "optimizer",
    "memories": "memories",
    "activations": "activations",
    "outer": "outer",
}
SHAPES = [
    shape
    for shape in itertools.starmap(GridShape, itertools.product(range(1, 6), range(1, 6), range(1, 6), range(2)))
    if shape.size == WORLD
]


@pytest.mark.parametrize("name", SPLIT_RUNS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_split_training_costs_what_is_predicted(world, folder, monkeypatch, shape, name):
    """Bytes of all axes together, shared tensors among them, and the arrays of the largest rank."""
    monkeypatch.setattr(CheckpointStore, "save", lambda store, snapshot: None)
    tree = {**BASE, **SPLIT_RUNS[name], "run": {"folder": str(folder / "run")}}
    axes = {"dp": shape.dp, "pp": shape.pp, "tp": shape.tp}
    served = {"collective": "server"} if shape.servers else {}
    tree |= {"parallel": tree["parallel"] | axes, "exchange": tree["exchange"] | served}
    config = resolve(tree, "test", [])
    counted = train(config, world, overwrite=True)["per_rank"]
    task = config.config.model.task
    costs = Costs(config.config, open_dataset(config.config.data, task, config.config.train.seed)).of(shape)
    sent = sum((Sent(one["sent_bytes"], one["messages"]) for one in counted), Sent())
    assert sent == costs.configured * STEPS
    largest = max(counted, key=lambda one: one["array_bytes"])
    assert {name: largest[f"{KEPT[name]}_bytes"] for name in costs.memory} == costs.memory
