"""Sums of matrices by their factors, on several ranks: the same bits everywhere, those of numpy, and nothing lost."""

import numpy as np
import pytest
from mpi4py import MPI

from mpitrain.checkpoint.store import CheckpointStore
from mpitrain.collectives.predicted import Sent
from mpitrain.collectives.registry import make_reducer
from mpitrain.config.load import resolve
from mpitrain.data.profiles import PROFILES
from mpitrain.nn.models import Mlp
from mpitrain.params import Layout, Params, ParamSpec
from mpitrain.train.buckets import group_of
from mpitrain.train.hashing import params_sha256
from mpitrain.train.loop import Loop
from mpitrain.train.lowrank import LowRankSums
from mpitrain.train.predicted import predict_exchange, predict_memories
from mpitrain.train.run import train

WORLD = MPI.COMM_WORLD.Get_size()
WAYS = [
    ("native", "raw"),
    *[(collective, codec) for collective in ("ring", "direct") for codec in ("raw", "fp16", "int8", "ecq-4")],
    *([("server", "fp16"), ("server", "int8")] if WORLD > 1 else []),
]
M, N, RANK = 50, 70, 3
SPECS = [ParamSpec("a", (M, N)), ParamSpec("a.bias", (N,)), ParamSpec("b", (30, 2, 40)), ParamSpec("c", (60, 30))]
MATRICES = {"a": (M, N), "b": (30, 80), "c": (60, 30)}


def addend(step, rank, name):
    """The gradient of a rank, which every other one can draw."""
    rng = np.random.default_rng([step, rank, *name.encode()])
    return rng.standard_normal(next(spec.shape for spec in SPECS if spec.name == name)).astype(np.float32)


def make(axis, collective, codec, **more):
    tree = {"codec": f"lowrank-{RANK}", "collective": collective, "factor_codec": codec, "segment_kb": 1} | more
    config = resolve({"exchange": tree}, "test", []).config.exchange
    values = Params(Layout(SPECS, group_of(config)))
    reducer = make_reducer(collective, axis, servers=config.servers)
    return values, LowRankSums(reducer, values, config, seed=5)


def step(sums, values, number, rank):
    for name in values:
        values[name][...] = addend(number, rank, name)
    sums.begin(number)
    for name in list(values)[::-1]:
        sums.finished([name])
    summed = sums.finish()
    (sums.commit if summed.finite else sums.rollback)()
    return summed


def over_ranks(comm, values):
    total = np.empty(values.shape, np.float64)
    comm.Allreduce(values.astype(np.float64), total)
    return total


@pytest.mark.parametrize(("collective", "codec"), WAYS)
def test_the_same_everywhere_and_nothing_lost(axis, world, everywhere, collective, codec):
    """The sum and all residuals are the addends and all residuals before; of raw factors, the sum is numpy's."""
    values, sums = make(axis, collective, codec)
    before = {name: np.zeros(shape) for name, shape in MATRICES.items()}
    guesses = {name: sums.state()[f"{name}.guess"].current.astype(np.float64) for name in MATRICES}
    for number in range(1, 4):
        assert step(sums, values, number, axis.rank).finite
        assert everywhere(values.flat)
        state = sums.state()
        for name, (m, n) in MATRICES.items():
            assert everywhere(state[f"{name}.guess"].current)
            total = before[name] + sum(addend(number, rank, name).reshape(m, n) for rank in range(world.size))
            after = over_ranks(world, state[f"{name}.residual"].current).reshape(m, n)
            np.testing.assert_allclose(values[name].reshape(m, n) + after, total, atol=2e-4)
            if codec == "raw":
                left = np.linalg.qr(total @ guesses[name].reshape(RANK, n).T)[0]
                np.testing.assert_allclose(values[name].reshape(m, n), left @ (left.T @ total), atol=2e-4)
            before[name], guesses[name] = after, state[f"{name}.guess"].current.astype(np.float64)
    np.testing.assert_allclose(
        values["a.bias"], sum(addend(3, rank, "a.bias") for rank in range(world.size)), atol=0.02
    )


def test_who_is_not_finite_is_rejected_everywhere(axis, everywhere):
    values, sums = make(axis, "direct", "fp16")
    step(sums, values, 1, axis.rank)
    before = {name: memory.current.copy() for name, memory in sums.state().items()}
    sums.begin(2)
    values.flat[:] = 1
    if axis.rank == axis.size - 1:
        values["b"][3, 1, 5] = np.nan
    sums.finished(list(values))
    assert not sums.finish().finite
    assert sums.not_finite() == ["b"] * (axis.rank == axis.size - 1)
    sums.rollback()
    assert all((memory.current == before[name]).all() for name, memory in sums.state().items())
    assert step(sums, values, 3, axis.rank).finite
    assert everywhere(values.flat)


BASE = {
    "model": {"kind": "mlp", "hidden": [40, 24]},
    "data": {"stations": 6, "samples": 60, "test_samples": 12, "window": 8},
    "train": {"steps": 4, "batch_size": 12, "eval_every": 0},
    "checkpoint": {"every": 0},
}
TRAININGS = [
    {},
    {"factor_codec": "int8", "memory": "none", "bucket_mb": 0.004},
    {"collective": "ring", "warmup_steps": 1, "raw_last_steps": 1},
    {"collective": "native", "factor_codec": "raw"},
    {"codec": "int8", "rule": [{"match": "*0.weight", "codec": "lowrank-2"}]},
    {"factor_codec": "int8", "rounding": "stochastic", "overlap": False},
    *([{"collective": "server", "segment_kb": 1}] if WORLD > 1 else []),
]


def run(world, folder, exchange, *overrides, resume=None):
    tree = BASE | {"exchange": {"codec": "lowrank-3"} | exchange, "run": {"folder": str(folder / "run")}}
    resolved = resolve(tree, "test", list(overrides))
    return resolved.config, train(resolved, world, overwrite=resume is None, resume=resume)


@pytest.mark.parametrize("exchange", TRAININGS, ids=str)
def test_a_training_costs_what_is_predicted(world, folder, monkeypatch, exchange):
    """Bytes, messages and memories, and every rank has the same weights."""
    monkeypatch.setattr(CheckpointStore, "save", lambda store, snapshot: None)
    hashes, take = [], Loop.round

    def recorded(loop):
        result = take(loop)
        hashes.append(params_sha256(loop.parts.params))
        return result

    monkeypatch.setattr(Loop, "round", recorded)
    config, summary = run(world, folder, exchange)
    assert len(set(hashes)) == 4
    assert set(world.allgather(hashes[-1])) == {hashes[-1]}
    assert summary["replicas_identical"] is True
    specs = Mlp(inputs=8 * 5, hidden=(40, 24), outputs=len(PROFILES)).specs()
    raw = config.exchange.warmup_steps + config.exchange.raw_last_steps
    ways = [(True, raw), (False, 4 - raw)]
    kinds = [
        [one * times for one in predict_exchange(specs, config.exchange, world.size, raw=way)] for way, times in ways
    ]
    sent = [Sent(one["sent_bytes"], one["messages"]) for one in summary["per_rank"]]
    assert sent == [first + second for first, second in zip(*kinds, strict=True)]
    memories = predict_memories(specs, config.exchange, world.size)
    assert [one["memories_bytes"] for one in summary["per_rank"]] == memories


def test_neither_resume_nor_overlap_changes_anything(world, folder):
    for exchange in ({"factor_codec": "int8"}, {"memory": "none", "collective": "ring"}):
        settings = ("train.steps=6", "optim.schedule=constant", "exchange.overlap=false")
        _, whole = run(world, folder, exchange, *settings)
        run(world, folder, exchange, "train.steps=3", "optim.schedule=constant")
        _, parts = run(world, folder, exchange, "train.steps=6", "optim.schedule=constant", resume="newest")
        assert parts["param_sha256"] == whole["param_sha256"]


@pytest.mark.parametrize("axis_name", ["tp", "pp"])
@pytest.mark.skipif(WORLD != 4, reason="two replicas of two ranks")
def test_parts_of_a_model(world, folder, axis_name):
    """Every rank sums its own part of a matrix; a tied embedding is held by both stages, with the same bits."""
    table = {"kind": "transformer", "task": "lm", "tied": True, "d_model": 32, "layers": 2, "heads": 2}
    tree = BASE | {
        "model": table,
        "data": {"kind": "text", "window": 16, "placement": "shuffled", "stride": 512},
        "parallel": {"dp": 2, axis_name: 2},
        "exchange": {"codec": "lowrank-2"},
        "run": {"folder": str(folder / "run")},
    }
    summary = train(resolve(tree, "test", []), world, overwrite=True)
    assert summary["replicas_identical"] is True
