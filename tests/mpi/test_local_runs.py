"""Whole runs of local steps: against sync, against plain training, and against themselves after a resume."""

import json
import shutil

import numpy as np
import pytest
from mpi4py import MPI

from mpitrain.comm.agreement import gather
from mpitrain.comm.grid import Axis, ProcessGrid
from mpitrain.config.load import resolve
from mpitrain.errors import ConfigError, DivergedError
from mpitrain.partition import GridShape
from mpitrain.train.hashing import fingerprint
from mpitrain.train.outer import GlobalWeights
from mpitrain.train.run import train
from mpitrain.train.session import Session
from tests.mpi.test_grids import GRIDS, Training
from tests.mpi.test_grids import resolved as grid_config

WORLD = MPI.COMM_WORLD.Get_size()
GRIDS_OF_REPLICAS = [shape for shape in GRIDS if shape.dp > 1 or WORLD < 3]
MLP = {
    "model": {"kind": "mlp", "hidden": [40, 40, 40]},
    "data": {"stations": 6, "samples": 60, "test_samples": 12, "window": 4},
    "train": {"batch_size": 12, "eval_every": 0, "clip_norm": 0.0},
    "optim": {"schedule": "constant"},
    "checkpoint": {"every": 0},
}
PLAIN = {"kind": "sgd", "momentum": 0.0, "lr": 0.1, "weight_decay": 0.1}
MEAN = {"when": "local", "h": 1, "outer_lr": 1.0, "outer_momentum": 0.0}
STREAM = {"when": "local", "h": 6, "codec": "int8", "fragments": 3, "delay": 1, "merge": 0.5, "bucket_mb": 1e-6}


def config(**sections):
    tree = {name: dict(table) for name, table in MLP.items()}
    for name, table in sections.items():
        tree[name] = tree.get(name, {}) | table
    return resolve(tree, "test", [])


class Trained:
    """Rounds of a run without a folder, with what the model was after each of them."""

    def __init__(self, comm, resolved, steps, faults="", shape=None, dtype=np.float32):
        self.models, self.rows, self.differing = [], [], []
        with ProcessGrid(comm, shape or GridShape(comm.size)) as grid:
            training = Training(resolved, grid, dtype, faults)
            self.exchange, self.parts = training.parts.exchange, training.parts
            try:
                while training.loop.counters.step < steps:
                    self.rows += training.loop.round()[0]
                    with self.exchange.model():
                        self.models.append(training.parts.params.flat.copy())
                        self.differing.append(fingerprint(grid.world, training.parts.params).differing)
            finally:
                training.close()

    def column(self, name):
        return [row[name] for row in self.rows]


@pytest.mark.parametrize("collective", ["direct", "ring", "native"])
def test_rounds_of_one_step_are_sync(comm, collective):
    """Plain SGD, the mean itself as new weights, ragged shares that weigh by sample."""
    data = {"stations": max(6, comm.size), "samples": 67, "skew": 3.0, "placement": "station"}
    sections = {"data": data, "optim": PLAIN, "train": {"steps": 6}}
    raw = {"codec": "raw", "collective": collective}
    sync = Trained(comm, config(**sections, exchange=raw), 6)
    local = Trained(comm, config(**sections, exchange=raw | MEAN), 6)
    assert np.allclose(local.models, sync.models, rtol=1e-6, atol=1e-6)
    assert not np.allclose(sync.models[0], sync.models[-1], rtol=1e-3, atol=1e-3)
    assert local.column("loss") == pytest.approx(sync.column("loss"), rel=1e-5)
    assert local.column("sent_bytes") == sync.column("sent_bytes")
    assert local.differing == [""] * 6


def test_rounds_through_a_server(world):
    """A rank that only adds up has no samples, takes no step, and holds the same model."""
    if world.size == 1:
        with pytest.raises(ConfigError, match="exchange.servers"):
            GridShape.fit(1, None, 1, 1, servers=1)
        return
    shape = GridShape(world.size - 1, servers=1)
    exchange = {"codec": "raw", "collective": "server"}
    sync = Trained(world, config(optim=PLAIN, exchange=exchange, train={"steps": 4}), 4, shape=shape)
    local = Trained(world, config(optim=PLAIN, exchange=exchange | MEAN, train={"steps": 4}), 4, shape=shape)
    assert np.allclose(local.models, sync.models, rtol=1e-6, atol=1e-6)
    assert local.differing == [""] * 4
    assert gather(Axis(world), local.exchange.weights.state.step) == [4] * shape.dp + [0]


@pytest.mark.parametrize("h", [1, 3])
@pytest.mark.parametrize("optim", [PLAIN, {"kind": "adamw"}])
def test_one_replica_is_plain_training(h, optim):
    """To the bit, with the mean itself as new weights: whatever the codec, since nothing travels."""
    sections = {"optim": optim, "train": {"steps": 9, "clip_norm": 1.0}}
    sync = Trained(MPI.COMM_SELF, config(**sections), 9)
    local = Trained(MPI.COMM_SELF, config(**sections, exchange=MEAN | {"h": h}), 9)
    assert np.array_equal(local.models, sync.models[h - 1 :: h])
    assert local.column("loss") == sync.column("loss")
    assert local.column("grad_norm") == sync.column("grad_norm")


@pytest.mark.parametrize("fragments", [1, 3])
@pytest.mark.parametrize("collective", ["direct", "ring"])
def test_bytes_of_a_round_are_those_of_a_step(comm, collective, fragments):
    """At whatever steps its fragments leave; the short last round sends as much."""
    exchange = {"codec": "int4", "collective": collective, "bucket_mb": 1e-6}
    sync = Trained(comm, config(exchange=exchange, train={"steps": 1}), 1)
    streamed = exchange | {"when": "local", "h": 4, "fragments": fragments}
    local = Trained(comm, config(exchange=streamed, train={"steps": 10}), 10)
    for name in ("sent_bytes", "received_bytes", "messages"):
        column = local.column(name)
        assert [sum(column[start : start + 4]) for start in (0, 4, 8)] == sync.column(name) * 3
        busy = {1: [4, 8, 10], 3: [2, 3, 4, 6, 7, 8, 10]}[fragments]
        assert [step for step in range(1, 11) if column[step - 1]] == (busy if comm.size > 1 else [])
    assert local.differing == [""] * 3


@pytest.mark.parametrize("exchange", [{}, {"fragments": 3, "delay": 1, "merge": 0.5}, {"collective": "ring"}])
def test_replicas_share_the_model_after_every_round(comm, exchange):
    common = {"when": "local", "h": 6, "codec": "int4", "memory": "delta", "bucket_mb": 1e-6}
    run = Trained(comm, config(exchange=common | exchange, train={"steps": 16}), 16)
    assert run.differing == [""] * 3
    assert len({model.tobytes() for model in run.models}) == 3
    assert np.isfinite(run.models).all()


def test_a_gradient_that_is_not_finite_costs_one_replica_its_step(world, monkeypatch):
    """The others take theirs; the change of the replica counts by the samples that it did use."""
    bad = world.size - 1
    counted = []
    count = GlobalWeights.count

    def watched(common, used, due):
        counted.append((used, due))
        count(common, used, due)

    monkeypatch.setattr(GlobalWeights, "count", watched)
    run = Trained(
        world,
        config(exchange=MEAN | {"h": 2, "codec": "raw"}, optim=PLAIN, train={"steps": 4}),
        4,
        faults=f"nan:rank={bad},step=2",
    )
    assert gather(Axis(world), run.parts.exchange.weights.state.step) == [4] * bad + [3]
    assert [row["grad_norm"] is None for row in run.rows] == [False, world.rank == bad, False, False]
    shares = [run.parts.sampler.indices(step).size * (step != 1 or world.rank != bad) for step in range(4)]
    assert counted == list(zip(shares, run.column("samples"), strict=True))
    assert run.column("skipped")[-1] == 1
    assert run.differing == ["", ""]
    assert np.isfinite(run.models).all()


def test_a_change_that_is_not_finite_resets_all_replicas(world):
    """Steps so large that the weights of one replica overflow: all begin the next round where they began this one."""
    optim = PLAIN | {"lr": 1.0, "weight_decay": 0.0}
    big = f"const:rank={world.size - 1},step=3,value=3e38;const:rank={world.size - 1},step=4,value=3e38"
    settings = config(exchange=MEAN | {"h": 2, "codec": "int8"}, optim=optim, train={"steps": 6})
    run = Trained(world, settings, 6, faults=big)
    assert np.array_equal(run.models[0], run.models[1])
    assert not np.array_equal(run.models[1], run.models[2])
    assert np.isfinite(run.models).all()
    assert run.rows[3]["grad_norm"] is None
    assert run.column("skipped")[-1] == world.size
    assert run.differing == [""] * 3


def test_changes_that_are_never_finite(world):
    faults = ";".join(f"const:rank=0,step={step},value=3e38" for step in range(1, 9))
    optim = PLAIN | {"lr": 1.0, "weight_decay": 0.0}
    settings = config(exchange=MEAN | {"h": 2}, optim=optim, train={"steps": 8, "max_skips": 2, "diverge": 0.0})
    with pytest.raises(DivergedError, match=r"step 6: 3 exchanges in a row had changes of weights that are not finite"):
        Trained(world, settings, 8, faults=faults)


def test_fewer_samples_than_replicas_in_a_step(world):
    """A replica without samples takes no step: its moments do not decay, and its change weighs nothing."""
    data = {"samples": 26, "test_samples": 1, "placement": "shuffled"}
    settings = config(exchange={"when": "local", "h": 3}, data=data, train={"batch_size": 2, "steps": 12})
    run = Trained(world, settings, 12)
    steps = gather(Axis(world), run.parts.exchange.weights.state.step)
    assert steps == [12, 12, *[0] * world.size][: world.size]
    assert run.column("samples") == [2] * 12
    assert run.differing == [""] * 4
    assert len({model.tobytes() for model in run.models}) == 4


@pytest.mark.parametrize("shape", GRIDS_OF_REPLICAS, ids=str)
def test_rounds_of_one_step_are_sync_on_every_grid(world, shape):
    found = []
    for exchange in ({}, MEAN):
        settings = grid_config("tied", shape, exchange=exchange, optim=PLAIN)
        found.append(Trained(world, settings, 3, shape=shape, dtype=np.float64))
    sync, local = found
    assert np.allclose(local.models, sync.models, rtol=1e-10, atol=1e-12)
    assert not np.array_equal(sync.models[0], sync.models[2])
    assert local.column("loss") == pytest.approx(sync.column("loss"), rel=1e-10)


@pytest.mark.parametrize("shape", GRIDS_OF_REPLICAS, ids=str)
def test_holders_of_a_tensor_share_it_after_every_round(comm, shape):
    """In fragments, with tied tensors and such that the tensor axis does not split, all of which change together."""
    exchange = {"when": "local", "h": 4, "fragments": 2, "delay": 1, "codec": "int8", "memory": "residual"}
    run = Trained(comm, grid_config("tied", shape, exchange=exchange, optim={"lr": 0.01}), 20, shape=shape)
    assert run.differing == [""] * 5
    assert len({model.tobytes() for model in run.models}) == 5


def run(comm, folder, steps, exchange, **others):
    settings = config(exchange=exchange, train={"steps": steps}, run={"folder": str(folder)})
    return train(settings, comm, **others)


@pytest.mark.parametrize(
    ("exchange", "others"),
    [(STREAM, {}), ({"when": "local", "h": 6, "memory": "delta", "bucket_mb": 1.0}, {"segment_kb": 1})],
    ids=["streaming", "other-segments"],
)
def test_resume_changes_nothing(world, folder, exchange, others):
    """Twelve steps and twelve more are twenty-four, to the bit: moments, momentum, memories and own weights.

    Memories do not depend on how chunks are cut into messages; only headers tell.
    """
    whole = run(world, folder / "whole", 24, exchange)
    run(world, folder / "parts", 12, exchange)
    parts = run(world, folder / "parts", 24, exchange | others, resume="newest")
    assert parts["param_sha256"] == whole["param_sha256"]
    assert parts["replicas_identical"] is whole["replicas_identical"] is True
    assert (parts["sent_bytes_total"] > whole["sent_bytes_total"]) is bool(others and WORLD > 1)
    rows = [(folder / name / "metrics.jsonl").read_text().splitlines() for name in ("whole", "parts")]
    assert [json.loads(row)["loss"] for row in rows[0]] == [json.loads(row)["loss"] for row in rows[1]]


def test_resume_on_another_number_of_ranks(world, folder, monkeypatch):
    """Global weights and outer momentum go on; inner moments and own weights start anew."""
    loaded = []
    load = Session.load

    def watched(session, resume):
        exchange = session.parts.exchange
        for buffer in exchange.weights.state.buffers.values():
            buffer.flat[:] = 1  # as an attempt at a damaged step might leave them
        found = load(session, resume)
        loaded.append(exchange.tensors()["outer"].flat.copy())
        assert not any(buffer.flat.any() for buffer in exchange.weights.state.buffers.values())
        assert exchange.weights.state.step == 0
        return found

    if world.rank == 0:
        run(MPI.COMM_SELF, folder / "run", 12, STREAM)
        shutil.copytree(folder / "run", folder / "alone")
    world.Barrier()
    if world.size == 1:
        return
    monkeypatch.setattr(Session, "load", watched)
    result = run(world, folder / "run", 18, STREAM, resume="newest")
    assert result["replicas_identical"] is True
    assert loaded[0].any()
    assert len({momentum.tobytes() for momentum in loaded}) == 1


def test_more_fragments_than_buckets(world):
    with pytest.raises(ConfigError, match=r"exchange.fragments = 6, but .* leaves in \d part"):
        Trained(world, config(exchange={"when": "local", "h": 30, "fragments": 6, "bucket_mb": 1.0}), 1)
