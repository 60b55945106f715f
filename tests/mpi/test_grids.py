"""Training on every grid, data × pipeline × tensor: gradients, losses and weights are those of one rank."""

import itertools

import numpy as np
import pytest
from mpi4py import MPI

from mpitrain.comm.agreement import gather
from mpitrain.comm.fault import FaultHook
from mpitrain.comm.grid import ProcessGrid
from mpitrain.comm.runtime import Position
from mpitrain.comm.signals import StopRequest
from mpitrain.config.load import resolve
from mpitrain.partition import GridShape
from mpitrain.train.build import build
from mpitrain.train.console import Narrator
from mpitrain.train.evaluate import evaluate
from mpitrain.train.hashing import fingerprint
from mpitrain.train.loop import Loop
from mpitrain.train.stopping import StopWish

WORLD = MPI.COMM_WORLD.Get_size()
GRIDS = [
    GridShape(dp, pp, tp)
    for dp, pp, tp in itertools.product(range(1, WORLD + 1), repeat=3)
    if dp * pp * tp == WORLD and pp <= 6
]
SERVED = [
    GridShape(dp, pp, tp, servers)
    for dp, pp, tp, servers in itertools.product(range(1, WORLD), repeat=4)
    if (dp + servers) * pp * tp == WORLD and (servers == 1 or pp * tp == 1)
]
"""Grids some rows of which only add up; none on one rank."""

RAW = {"codec": "raw"}
TRAIN = {"steps": 20, "batch_size": 11, "eval_every": 0, "clip_norm": 0.0}
STATIONS = {"stations": 9, "samples": 120, "test_samples": 20, "window": 6, "placement": "shuffled"}
TEXT = {"kind": "text", "stations": 8, "window": 8, "stride": 4000, "placement": "shuffled", "test_fraction": 0.05}


def widths(tp):
    """Sizes that ``tp`` divides."""
    return {"heads": 2 * tp if tp % 2 else tp, "d_model": 8 * tp, "d_ff": 12 * tp, "layers": 3, "dropout": 0.2}


def cases(tp):
    """Name every kind of model, with the settings that only some of them have."""
    return {
        "classify": {"model": widths(tp), "data": STATIONS},
        "forecast": {"model": widths(tp) | {"task": "forecast", "causal": True}, "data": STATIONS},
        "lm": {"model": widths(tp) | {"task": "lm", "layers": 2}, "data": TEXT},
        "tied": {"model": widths(tp) | {"task": "lm", "layers": 2, "tied": True}, "data": TEXT},
        "mlp": {"model": {"kind": "mlp", "hidden": [4 * tp] * 5, "dropout": 0.1}, "data": STATIONS},
    }


def resolved(case, shape, **sections):
    sums = {"collective": "server", "servers": shape.servers} if shape.servers else {}
    tree = {**cases(shape.tp)[case], "train": TRAIN, "exchange": RAW | sums}
    for name, table in sections.items():
        tree[name] = tree.get(name, {}) | table
    tree["parallel"] = {"dp": shape.dp, "pp": shape.pp, "tp": shape.tp} | sections.get("parallel", {})
    return resolve(tree, "test", [])


class Training:
    """A run without a folder, on ``grid``."""

    def __init__(self, resolved, grid, dtype=np.float32, faults=""):
        self.config = resolved.config
        self.parts = build(resolved.config, grid, dtype=dtype)
        self.parts.params.initialize(resolved.config.train.seed)
        hook = FaultHook(faults, grid.world.rank)
        narrator = Narrator(1, 0, bar=False)
        self.loop = Loop(self.parts, StopWish(StopRequest(), hook, resolved.config.run), narrator, hook, Position())

    def step(self):
        return self.loop.round()[0][-1]

    def close(self):
        self.parts.loader.close()


class Alone:
    """The same run on one rank: the first of ``comm`` takes the steps and tells the others."""

    def __init__(self, comm, case, shape, dtype=np.float32):
        one = {"dp": 1, "pp": 1, "tp": 1}
        config = resolved(case, shape, parallel=one)
        self.comm = comm
        self.training = Training(config, ProcessGrid(MPI.COMM_SELF, GridShape(1)), dtype)
        if comm.rank:
            self.training.close()

    def step(self):
        """Return loss and norm of the next step, and leave its gradients in ``grads``."""
        numbers = np.zeros(2)
        if self.comm.rank == 0:
            row = self.training.step()
            numbers[:] = row["loss"], row["grad_norm"]
        self.comm.Bcast(numbers)
        self.comm.Bcast(self.grads.flat)
        return numbers.tolist()

    @property
    def grads(self):
        return self.training.parts.grads

    def score(self):
        loss = np.zeros(1)
        if self.comm.rank == 0:
            loss[0] = evaluate(self.training.parts).loss
        self.comm.Bcast(loss)
        return float(loss[0])

    def close(self):
        if self.comm.rank == 0:
            self.training.close()


def differences(here, whole):
    """Compare what this rank holds of each tensor with the tensor of one rank, relative to its largest element."""
    for spec in here.layout.specs:
        expected = whole[spec.name][spec.place.slices]
        scale = np.abs(whole[spec.name]).max() or 1.0
        yield spec.name, float(np.abs(here[spec.name] - expected).max(initial=0.0)) / scale


SETTINGS = [
    {"micro_batches": 1},
    {"micro_batches": 2, "schedule": "afab", "sequence": True},
    {"micro_batches": 3, "recompute": True},
    {"micro_batches": 4, "schedule": "interleaved"},
    {"micro_batches": 5, "sequence": True, "recompute": True},
    {"micro_batches": 6, "schedule": "interleaved", "sequence": True},
]
MODELS = ["classify", "forecast", "lm", "tied", "mlp"]


def settings_of(case, shape):
    """Choose settings for a model on a grid, others for its neighbours; all of them meet every model on some grid."""
    settings = dict(SETTINGS[(MODELS.index(case) + GRIDS.index(shape) + WORLD) % len(SETTINGS)])
    units = 7 if case in ("classify", "forecast") else 6
    if case == "mlp":
        settings.pop("sequence", None)
    if 2 * shape.pp > units:
        settings.pop("schedule", None)
    return settings


@pytest.mark.parametrize("case", MODELS)
@pytest.mark.parametrize("shape", GRIDS, ids=str)
def test_gradients_of_every_grid(comm, shape, case):
    """T03, T04, T06: float64 gradients, norm and loss, with dropout, ragged batches and uneven stages."""
    reference = Alone(comm, case, shape, np.float64)
    with ProcessGrid(comm, shape) as grid:
        training = Training(resolved(case, shape, parallel=settings_of(case, shape)), grid, np.float64)
        for _ in range(2):
            row, expected = training.step(), reference.step()
            worst = max(differences(training.parts.grads, reference.grads), key=lambda pair: pair[1])
            found = gather(grid.world, [*worst, row["loss"], row["grad_norm"]])
            assert max(error for _, error, _, _ in found) < 1e-10, found
            assert all([loss, norm] == pytest.approx(expected, rel=1e-10) for _, _, loss, norm in found), found
        training.close()
    reference.close()


def test_gradients_through_servers(comm):
    """Rows that serve are replicas without samples: they end with the same gradients and weights as the others."""
    for shape, case in zip(SERVED, itertools.cycle(MODELS)):
        reference = Alone(comm, case, GridShape(shape.dp, shape.pp, shape.tp), np.float64)
        with ProcessGrid(comm, shape) as grid:
            training = Training(resolved(case, shape, parallel={"micro_batches": 2}), grid, np.float64)
            assert (len(training.parts.sampler.owned) == 0) == (grid.row >= shape.dp)
            for _ in range(2):
                row, expected = training.step(), reference.step()
                worst = max(differences(training.parts.grads, reference.grads), key=lambda pair: pair[1])
                found = gather(grid.world, [*worst, row["loss"], row["grad_norm"]])
                assert max(error for _, error, _, _ in found) < 1e-10, found
                assert all([loss, norm] == pytest.approx(expected, rel=1e-10) for _, _, loss, norm in found), found
                assert row["samples"] == TRAIN["batch_size"]
            assert fingerprint(grid.world, training.parts.params).differing == ""
            assert evaluate(training.parts).loss == pytest.approx(reference.score(), rel=1e-6)
            training.close()
        reference.close()


@pytest.mark.parametrize("placement", ["station", "shuffled"])
def test_ranks_without_samples_know_the_data(world, placement):
    """Scales of columns and weights of classes are found in the samples of those that have some."""
    for shape in SERVED:
        sections = {"data": {"placement": placement}, "train": {"class_weights": "balanced"}}
        with ProcessGrid(world, shape) as grid:
            parts = build(resolved("mlp", shape, **sections).config, grid)
            parts.loader.close()
            found = [*parts.learned.mean, *parts.learned.scale, *parts.loss.class_weights.tolist()]
            assert np.isfinite(found).all()
            assert all(other == found for other in gather(grid.world, found))


@pytest.mark.parametrize("shape", GRIDS, ids=str)
def test_twenty_steps_of_every_grid(world, shape):
    """Losses of 20 float32 steps, and the score, are those of one rank; all holders of a tensor hold the same bits."""
    case = ("classify", "tied")[GRIDS.index(shape) % 2]
    reference = Alone(world, case, shape)
    with ProcessGrid(world, shape) as grid:
        training = Training(resolved(case, shape), grid)
        losses = [(training.step()["loss"], reference.step()[0]) for _ in range(20)]
        assert all(here == pytest.approx(there, rel=1e-4) for here, there in losses), losses
        assert fingerprint(grid.world, training.parts.params).differing == ""
        assert evaluate(training.parts).loss == pytest.approx(reference.score(), rel=1e-4)
        training.close()
    reference.close()


@pytest.mark.parametrize("shape", GRIDS, ids=str)
def test_compressed_everywhere(world, shape):
    """T08, T13: with every channel compressed the holders of a tensor still hold the same bits, and training learns."""
    coded = {"codec": "int8", "tensor_codec": "int8", "memory": "delta", "sequence": True, "micro_batches": 2}
    with ProcessGrid(world, shape) as grid:
        settings = resolved(
            "tied", shape, exchange={"codec": "int8", "memory": "residual"}, parallel=coded, optim={"lr": 0.02}
        )
        training = Training(settings, grid)
        losses = [training.step()["loss"] for _ in range(20)]
        assert fingerprint(grid.world, training.parts.params).differing == ""
        assert losses[-1] < losses[0] - 0.5
        training.close()
