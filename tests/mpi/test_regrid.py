"""Runs that go on on another grid, and steps that one stage alone must reject."""

import itertools
import json
import shutil

import numpy as np
import pytest
from mpi4py import MPI

from mpitrain.comm.agreement import gather
from mpitrain.comm.grid import Axis, ProcessGrid
from mpitrain.config.load import resolve
from mpitrain.errors import CheckpointError, ConfigError
from mpitrain.partition import GridShape
from mpitrain.train.run import train
from mpitrain.train.session import Session
from tests.mpi.test_grids import GRIDS, Training, resolved

WORLD = MPI.COMM_WORLD.Get_size()
PAIRS = [*itertools.pairwise([*GRIDS, GRIDS[0]])] if WORLD > 1 else []
"""Every grid is left once and reached once; the arithmetic of all pairs up to eight ranks has tests without ranks."""
if WORLD != 4:
    PAIRS = PAIRS[:2]
MODEL = {"task": "lm", "layers": 2, "d_model": 60, "heads": 60, "d_ff": 60, "tied": True, "dropout": 0.1}
RUN = {
    "model": MODEL,
    "data": {"kind": "text", "stations": 8, "window": 8, "stride": 4000, "placement": "shuffled"},
    "train": {"batch_size": 11, "eval_every": 0},
    "exchange": {"codec": "raw"},
}


def settings(folder, shape, steps, **sections):
    tree = {**RUN, "run": {"folder": str(folder)}, "checkpoint": {"every": 0}}
    for name, table in sections.items():
        tree[name] = tree.get(name, {}) | table
    tree["train"] = tree["train"] | {"steps": steps}
    tree["optim"] = {"schedule": "constant"}
    tree["parallel"] = {"dp": shape.dp, "pp": shape.pp, "tp": shape.tp} | sections.get("parallel", {})
    return resolve(tree, "test", [])


def whole_model(parts):
    """Put every tensor together from the ranks that count it."""
    result = {}
    for name in sorted(parts.part.sizes):
        here = name in parts.params and parts.grid.data.rank == 0 and parts.shared.counts(name)
        shape = next(filter(None, gather(parts.grid.world, place_of(parts, name))))
        total = np.zeros(shape, np.float32)
        if here:
            spec = next(spec for spec in parts.params.layout.specs if spec.name == name)
            total[spec.place.slices] = parts.params[name]
        parts.grid.world.comm.Allreduce(MPI.IN_PLACE, total)
        result[name] = total
    return result


def place_of(parts, name):
    return next((list(spec.place.global_shape) for spec in parts.params.layout.specs if spec.name == name), None)


@pytest.fixture
def loaded(monkeypatch):
    """Whole models and optimizers, as they were right after every load."""
    models = []
    load = Session.load

    def recorded(session, resume):
        found = load(session, resume)
        models.append(whole_model(session.parts))
        return found

    monkeypatch.setattr(Session, "load", recorded)
    return models


def losses(folder):
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("before", "after"), PAIRS, ids=str)
def test_go_on_on_another_grid(world, folder, loaded, before, after):
    """Parameters and optimizer come back bit for bit, and the next steps are those of the run that stayed."""
    train(settings(folder / "a", before, 2), world)
    if world.rank == 0:
        shutil.copytree(folder / "a", folder / "b")
    world.Barrier()
    train(settings(folder / "a", before, 4), world, resume="newest")
    train(settings(folder / "b", after, 4), world, resume="newest")
    world.Barrier()
    stayed = losses(folder / "a")
    assert losses(folder / "b")[:2] == stayed[:2]
    assert losses(folder / "b")[2:] == pytest.approx(stayed[2:], rel=1e-6)
    assert loaded[0].keys() == loaded[1].keys()
    assert all(np.array_equal(loaded[0][name], loaded[1][name]) for name in loaded[0])
    assert losses(folder / "b")[2] != stayed[1]


@pytest.mark.parametrize("shape", GRIDS[::2] if WORLD == 4 else GRIDS[-2:], ids=str)
def test_resumed_is_unbroken_with_every_memory(world, folder, shape):
    """Residuals of gradients and references of activations are part of a checkpoint."""
    memories = {
        "exchange": {"codec": "int8", "memory": "residual"},
        "parallel": {"codec": "int8", "memory": "delta", "reference_mb": 0.02, "micro_batches": 3},
        "data": RUN["data"] | {"stride": 40000},
    }
    unbroken = train(settings(folder / "a", shape, 6, **memories), world)
    train(settings(folder / "b", shape, 3, **memories), world)
    resumed = train(settings(folder / "b", shape, 6, **memories), world, resume="newest")
    assert resumed["param_sha256"] == unbroken["param_sha256"]


@pytest.mark.parametrize("shape", [shape for shape in GRIDS if shape.pp > 1], ids=str)
def test_one_stage_rejects_for_all(comm, shape):
    """T15: infinity on one rank of the second stage: every rank skips the step, and the counters stay equal."""
    with ProcessGrid(comm, shape) as grid:
        bad = shape.tp  # the first rank of stage 1
        training = Training(resolved("tied", shape), grid, faults=f"inf:rank={bad},step=3")
        before = None
        for step in range(1, 5):
            row = training.step()
            if step == 2:
                before = training.parts.params.flat.copy()
            if step == 3:
                assert np.array_equal(training.parts.params.flat, before)
                assert row["grad_norm"] is None
        everywhere = gather(grid.world, [training.loop.counters.step, training.loop.counters.skipped])
        assert everywhere == [[4, 1]] * grid.world.size
        assert not np.array_equal(training.parts.params.flat, before)
        training.close()


@pytest.mark.skipif(WORLD != 4, reason="one number of ranks says it all; the gate sees that it ran")
def test_m15_grids_by_the_thousand(world):
    """Communicators are freed: MPI has a few thousand of them."""
    for _ in range(3000):
        with ProcessGrid(world, GridShape(2, 2, 1)) as grid:
            assert grid.among(grid.pipeline, [0, 1], "tied") is not None
    assert Axis(world).size == 4


def test_first_weights_of_another_run(world, folder, loaded):
    """train.init takes the whole model of a run on any grid, and no other model; a resumed run keeps its origin."""
    before, after = GRIDS[0], GRIDS[-1]
    base = train(settings(folder / "base", before, 3), world)
    init = RUN["train"] | {"init": str(folder / "base")}
    tuned = train(settings(folder / "tuned", after, 2, train=init), world)
    assert tuned["loss"] < base["loss"] + 0.1  # not from the start again
    for wrong, message in (
        ({"layers": 1}, r"it holds params/blocks\.1"),
        ({"layers": 3}, r"it lacks params/blocks\.2"),
        ({"tied": False}, r"it lacks params/head\.weight"),
    ):
        other = settings(folder / "other", after, 2, model=MODEL | wrong, train=init)
        with pytest.raises(CheckpointError, match=message):
            train(other, world, overwrite=True)
    with pytest.raises(CheckpointError, match=r"train\.init"):
        train(settings(folder / "tuned", after, 4), world, resume="newest")
    with pytest.raises(ConfigError, match="not a run folder"):
        train(settings(folder / "other", after, 2, train=RUN["train"] | {"init": str(folder)}), world, overwrite=True)


def test_the_yardstick_follows_the_grid(world, folder):
    """The bytes of a float32 ring add up over the grids that a run has had."""
    one, other = GridShape(WORLD), GridShape(1, WORLD)
    first = train(settings(folder, one, 2), world)
    second = train(settings(folder, other, 4), world, resume="newest")
    third = train(settings(folder, one, 6), world, resume="newest")
    assert (
        second["fp32_ring_bytes_total"] == first["fp32_ring_bytes_total"] == first["num_parameters"] * 16 * (WORLD - 1)
    )
    assert third["fp32_ring_bytes_total"] == 2 * first["fp32_ring_bytes_total"]
    if WORLD > 1:
        assert third["ratio"] == pytest.approx(first["ratio"])
