"""Whole runs, in-process: replicas stay the same bits, and the number of ranks changes nothing but the rounding."""

import itertools
import pickle

import numpy as np
import pytest
from mpi4py import MPI

from mpitrain.checkpoint.store import CheckpointStore
from mpitrain.codecs.registry import CODECS
from mpitrain.comm.agreement import gather
from mpitrain.comm.grid import Axis, ProcessGrid
from mpitrain.config.codec_names import KINDS
from mpitrain.config.load import resolve
from mpitrain.config.validate import refusal
from mpitrain.errors import ConfigError
from mpitrain.params import Params
from mpitrain.partition import GridShape
from mpitrain.train.hashing import params_sha256
from mpitrain.train.loop import Loop
from mpitrain.train.run import train

MLP = {
    "model": {"kind": "mlp", "hidden": [20]},
    "data": {"stations": 6, "samples": 60, "test_samples": 12, "window": 4},
    "train": {"steps": 2, "batch_size": 12, "eval_every": 0},
    "checkpoint": {"every": 0},
}
TRANSFORMER = MLP | {
    "model": {"kind": "transformer", "layers": 1, "d_model": 8, "heads": 2, "dropout": 0.1},
    "data": MLP["data"] | {"placement": "shuffled"},
    "exchange": {"codec": "raw"},
}
SUMS = ["ring", "direct", *(["server"] if MPI.COMM_WORLD.Get_size() > 1 else [])]
"""Collectives of the package itself that the ranks at hand allow."""

EVERY_STREAM = [
    (collective, codec, *rest)
    for collective, codec, *rest in itertools.product(
        ["native", *SUMS],
        list(CODECS),
        ["none", "residual", "delta"],
        ["nearest", "stochastic"],
    )
    # A server is `direct` with other owners: all streams on three ranks, one codec on the others.
    if collective != "server" or codec == "int8" or MPI.COMM_WORLD.size == 3
]


class Recorder:
    """Looks at every step of every run: the hash of the weights, the row of metrics, the plan of buckets.

    Nothing is saved: checkpoints wait for the disk, and have tests of their own.
    """

    def __init__(self, monkeypatch):
        self.hashes, self.rows, self.sizes, self.params = [], [], [], None
        take = Loop.round

        def recorded(loop):
            result = take(loop)
            self.hashes.append(params_sha256(loop.parts.params))
            self.rows += result[0]
            self.sizes = loop.parts.exchange.sizes()
            self.params = loop.parts.params
            return result

        monkeypatch.setattr(Loop, "round", recorded)
        monkeypatch.setattr(CheckpointStore, "save", lambda store, snapshot: None)

    def run(self, comm, folder, base, **sections):
        """Train; returns the summary. What was recorded of earlier runs goes."""
        self.hashes, self.rows = [], []
        tree = {name: dict(table) for name, table in base.items()}
        for name, table in sections.items():
            tree[name] = tree.get(name, {}) | table
        tree["run"] = {"folder": str(folder)}
        return train(resolve(tree, "test", []), comm, overwrite=True)

    def column(self, name):
        return [row[name] for row in self.rows]


@pytest.fixture
def recorder(monkeypatch):
    return Recorder(monkeypatch)


def same_hashes(comm, recorder, steps):
    """Whether all ranks had the same weights after each of the steps, and the weights moved."""
    everywhere = gather(Axis(comm), recorder.hashes)
    mine = recorder.hashes
    return len(set(mine)) == len(mine) == steps and all(other == mine for other in everywhere)


def ways(codec):
    """Count the memories and roundings with which a codec is trained; coarse ones have no delta."""
    kind = KINDS[codec]
    return 1 if codec == "raw" else (2 if kind.coarse else 3) * (2 if kind.stochastic else 1)


def test_every_combination(world, folder, recorder):
    """C10: collective × codec × memory: two steps with the same bits on all ranks, or the table's reason."""
    trained: dict[tuple[str, ...], str] = {}
    for collective, codec, memory, rounding in EVERY_STREAM:
        answers = {"collective": collective, "codec": codec, "memory": memory, "rounding": rounding}
        reason = refusal(**answers)
        if reason is not None:
            with pytest.raises(ConfigError) as caught:
                recorder.run(world, folder, MLP, exchange=answers)
            assert str(caught.value) == reason
            continue
        everything = {"rule": [{"match": "*", "codec": codec}]}  # small tensors would travel as fp16
        result = recorder.run(world, folder, MLP, exchange=answers | everything)
        assert same_hashes(world, recorder, 2), answers
        assert result["replicas_identical"] is True
        assert result["param_sha256"] == recorder.hashes[-1]
        assert all(0 < loss < 100 for loss in recorder.column("loss")), answers
        trained[collective, codec, memory, rounding] = result["param_sha256"]
    # Native raw; the others with all ways of every codec, or with those of int8 alone.
    whole = [collective for collective in SUMS if collective != "server" or world.size == 3]
    assert ways("fp16") + ways("int8") + ways("sign") == 3 + 6 + 2
    assert len(trained) == 1 + len(whole) * sum(map(ways, CODECS)) + (len(SUMS) - len(whole)) * ways("int8")
    for (*answers, rounding), sha256 in trained.items():
        if rounding == "stochastic" and world.size > 1:
            assert sha256 != trained[*answers, "nearest"], answers


def test_one_rank_or_many(world, folder, recorder):
    """Shuffled placement trains on the same samples, dropout and all, on any number of ranks."""
    steps = {"train": MLP["train"] | {"steps": 20}}
    recorder.run(MPI.COMM_SELF, folder / f"alone{world.rank}", TRANSFORMER, **steps)
    alone = {name: recorder.column(name) for name in ("loss", "grad_norm", "samples", "epoch", "lr")}
    recorder.run(world, folder / "together", TRANSFORMER, **steps)
    for name in ("samples", "epoch", "lr"):
        assert recorder.column(name) == alone[name]
    assert np.allclose(recorder.column("loss"), alone["loss"], rtol=1e-5, atol=0)
    assert np.allclose(recorder.column("grad_norm"), alone["grad_norm"], rtol=1e-4, atol=0)
    assert same_hashes(world, recorder, 20)


@pytest.mark.parametrize("exchange", [{"codec": "int8"}, {"codec": "raw", "collective": "ring", "bucket_mb": 0.001}])
def test_overlap_changes_nothing(world, folder, recorder, exchange):
    """M16: overlap decides when buckets leave, never what they hold; how much it hides is told."""
    found = []
    for overlap in (True, False):
        settings = exchange | {"overlap": overlap}
        share = recorder.run(world, folder, TRANSFORMER, exchange=settings, train={"steps": 4})["hidden_share"]
        assert 0 <= share <= 1 if overlap and world.size > 1 else share is None
        found.append((recorder.hashes, recorder.column("sent_bytes"), recorder.column("messages")))
    assert found[0] == found[1]


def test_steps_pickle_nothing(world, folder, recorder, monkeypatch):
    """M25: arrays and control data alike travel as buffers."""
    calls = []

    def dumps(value, *args):
        calls.append(value)
        return pickle.dumps(value, *args)

    take = Loop.round
    during = []

    def watched(loop):
        before = len(calls)
        result = take(loop)
        during.append(len(calls) - before)
        return result

    monkeypatch.setattr(Loop, "round", watched)
    MPI.pickle.__init__(dumps, pickle.loads)
    try:
        world.allgather("proof that this counts")
        assert calls == ["proof that this counts"]
        for collective in ("native", *SUMS):
            recorder.run(world, folder, TRANSFORMER, exchange={"collective": collective}, train={"steps": 10})
    finally:
        MPI.pickle.__init__()
    assert during == [0] * 10 * (1 + len(SUMS))


def test_impossible_numbers_of_servers(world, folder, recorder):
    """P13: no rank left to train; before anything is built, on all ranks."""
    for servers in (world.size, world.size + 1):
        with pytest.raises(ConfigError, match=rf"exchange.servers.*\+ {servers}.*but {world.size} rank"):
            recorder.run(world, folder, MLP, exchange={"collective": "server", "servers": servers})
    with pytest.raises(ConfigError, match=r"exchange.servers = 0; set exchange.servers = 1"):
        recorder.run(world, folder, MLP, exchange={"collective": "server", "servers": 0})


def test_a_server_has_no_samples(world, folder, recorder):
    """Its memories are those of a replica, its time goes into sums; what it has counts once in the summary."""
    if world.size == 1:
        return  # refused, see above
    result = recorder.run(world, folder, TRANSFORMER, exchange={"collective": "server"}, train={"steps": 3})
    assert same_hashes(world, recorder, 3)
    assert result["replicas_identical"] is True
    assert result["grid"] == {"dp": world.size - 1, "pp": 1, "tp": 1, "servers": 1}
    assert recorder.column("samples") == [12, 12, 12]
    *workers, server = result["per_rank"]
    assert server["activations_bytes"] < min(worker["activations_bytes"] for worker in workers)
    assert server["sent_bytes"] == sum(worker["sent_bytes"] for worker in workers)
    # A ring of those that train, and nothing to compare with where only one does.
    assert result["fp32_ring_bytes_total"] == 3 * 2 * (world.size - 2) * 4 * result["num_parameters"]
    assert (result["ratio"] is None) == (world.size == 2)


def test_messages_of_a_step(world, folder, recorder):
    """C18: two messages a peer and bucket, however many tensors; fusing them changes no bit of raw."""
    hashes = set()
    for bucket_mb in (1e-6, 0.001, 1.0):
        exchange = {"collective": "direct", "bucket_mb": bucket_mb}
        recorder.run(world, folder, TRANSFORMER, exchange=exchange, train={"steps": 2})
        assert recorder.column("messages") == [2 * (world.size - 1) * len(recorder.sizes)] * 2
        hashes.add(recorder.hashes[-1])
    assert len(recorder.sizes) == 1
    if world.size <= 2:  # a sum of two is the same in any order; which chunk an element is in sets the order of more
        assert len(hashes) == 1


def test_fewer_samples_than_ranks_in_a_step(world, folder, recorder):
    """D01: 2 samples a step, the last of an epoch ragged; ranks without any take part, and nobody waits for ever."""
    base = TRANSFORMER | {"train": MLP["train"] | {"batch_size": 2, "steps": 14}}
    data = {"samples": 13, "test_samples": 1}
    recorder.run(MPI.COMM_SELF, folder / f"alone{world.rank}", base, data=data)
    alone = recorder.column("loss")
    recorder.run(world, folder / "together", base, data=data)
    assert recorder.column("samples") == 2 * [2, 2, 2, 2, 2, 2, 1]
    assert np.allclose(recorder.column("loss"), alone, rtol=1e-5, atol=0)
    for exchange in ({"codec": "int8"}, {"codec": "fp16", "memory": "delta", "collective": "ring"}):
        recorder.run(world, folder / "together", base, data=data, exchange=exchange, train={"steps": 7})
        assert same_hashes(world, recorder, 7)


@pytest.mark.parametrize("task", ["classify", "forecast"])
def test_unequal_shares_weigh_by_sample(comm, folder, recorder, task):
    """D04: one rank has 4 samples, the others 1; the update is that of one process on them all."""
    ranks = max(comm.size, 2)
    sections = {
        "model": {"task": task},
        "data": {"stations": ranks, "samples": ranks + 3, "skew": 8.0, "placement": "station"},
        "train": {"batch_size": ranks + 3, "steps": 1},
        "optim": {"kind": "sgd", "lr": 0.5, "schedule": "constant"},
        "exchange": {"codec": "raw"},
    }
    recorder.run(MPI.COMM_SELF, folder / f"alone{comm.rank}", MLP, **sections)
    alone, weights = recorder.rows[0], recorder.params.flat.copy()
    recorder.run(comm, folder / "together", MLP, **sections)
    assert recorder.rows[0]["samples"] == alone["samples"] == ranks + 3
    assert recorder.rows[0]["loss"] == pytest.approx(alone["loss"], rel=1e-6)
    assert recorder.rows[0]["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-6)
    assert np.allclose(recorder.params.flat, weights, rtol=1e-5, atol=1e-6)


def test_grids_are_freed(world):
    """M15: a thousand grids in one process, none of which keeps a communicator."""
    shape = GridShape(world.size, 1, 1)
    for _ in range(1000 if world.size < 5 else 250):
        with ProcessGrid(world, shape) as grid:
            assert grid.data.size == world.size
        assert grid.data.comm == grid.world.comm == MPI.COMM_NULL


@pytest.mark.parametrize("exchange", [{"memory": "residual"}, {"memory": "delta"}, {"collective": "ring"}])
def test_a_skipped_step_leaves_everything_as_it_was(world, folder, recorder, monkeypatch, exchange):
    """C03: weights, moments and memories, also on the ranks that saw nothing; the next step counts."""
    found = []
    take = Loop.round

    def state(loop):
        memories = {name: memory.current.tobytes() for name, memory in loop.parts.exchange.state().items()}
        moments = {name: buffer.flat.tobytes() for name, buffer in loop.parts.exchange.weights.state.buffers.items()}
        return memories, moments, loop.parts.exchange.weights.state.step, loop.parts.params.flat.tobytes()

    def watched(loop):
        before = state(loop)
        result = take(loop)
        found.append(before == state(loop))
        return result

    monkeypatch.setattr(Loop, "round", watched)
    monkeypatch.setenv("MPITRAIN_FAULT", f"nan:rank={world.size - 1},step=3;inf:rank=0,step=4")
    recorder.run(world, folder, MLP, exchange={"codec": "int8"} | exchange, train={"steps": 5})
    assert found == [False, False, True, True, False]
    assert recorder.column("skipped") == [0, 0, 1, 2, 2]
    assert all(hashes == recorder.hashes for hashes in gather(Axis(world), recorder.hashes))


def test_replicas_start_equal(world, folder, recorder, monkeypatch):
    """D06: whatever the ranks draw, rank 0's weights are everyone's before the first step."""
    first = []
    initialize, take = Params.initialize, Loop.round

    def watched(loop):
        first.append(params_sha256(loop.parts.params))
        return take(loop)

    monkeypatch.setattr(Params, "initialize", lambda params, seed: initialize(params, seed + world.rank))
    monkeypatch.setattr(Loop, "round", watched)
    result = recorder.run(world, folder, MLP)
    assert set(gather(Axis(world), first[0])) == {first[0]}
    assert result["replicas_identical"] is True


CODED = {"codec": "int8", "rule": [{"match": "*", "codec": "int8"}]}


class Remembered:
    """The memories of the exchange after every step."""

    def __init__(self, monkeypatch):
        self.halves = []
        take = Loop.round

        def watched(loop):
            result = take(loop)
            self.halves.append({name: half.copy() for name, half in loop.parts.exchange.local().items()})
            return result

        monkeypatch.setattr(Loop, "round", watched)

    @property
    def empty(self):
        return [not any(half.any() for half in step.values()) for step in self.halves]


@pytest.mark.parametrize("memory", ["residual", "delta"])
@pytest.mark.parametrize("collective", SUMS)
def test_both_ends_travel_raw(world, folder, recorder, monkeypatch, collective, memory):
    """C21: the first and the last steps are those of raw, to the byte and bit; memories begin between them."""
    remembered, eight = Remembered(monkeypatch), {"train": MLP["train"] | {"steps": 8}}
    recorder.run(world, folder, MLP, exchange={"codec": "raw", "collective": collective}, **eight)
    raw, raw_bytes = recorder.hashes, recorder.column("sent_bytes")
    exchange = CODED | {"collective": collective, "memory": memory}
    recorder.run(world, folder, MLP, exchange=exchange, **eight)
    coded_bytes = recorder.column("sent_bytes")
    remembered.halves.clear()
    recorder.run(world, folder, MLP, exchange=exchange | {"warmup_steps": 3, "raw_last_steps": 2}, **eight)
    assert recorder.column("sent_bytes") == raw_bytes[:3] + coded_bytes[3:6] + raw_bytes[6:]
    assert recorder.hashes[:3] == raw[:3]
    assert same_hashes(world, recorder, 8)
    assert remembered.empty[:3] == [True] * 3
    # What one worker alone has coded, its server can code again without loss.
    exact = collective == "server" and memory == "residual" and world.size == 2 and world.rank == 1
    assert exact or remembered.empty[3:] == [world.size == 1] * 5
    if world.size > 1:
        assert max(coded_bytes) < min(raw_bytes)
        assert recorder.hashes[3] != raw[3]
    for name, half in remembered.halves[5].items():
        assert remembered.halves[7][name].tobytes() == half.tobytes()


@pytest.mark.parametrize("step", [2, 5, 7])
def test_a_resume_knows_how_its_steps_travel(world, folder, step):
    """Within the warm-up, after it, and among the last steps: the same bits as without a break."""
    ends = {"warmup_steps": 3, "raw_last_steps": 2, "reset_every": 2}
    tree = MLP | {"exchange": CODED | ends, "run": {"folder": str(folder / "run")}}
    tree |= {"train": MLP["train"] | {"steps": 8}, "checkpoint": {"every": 1, "keep": 9}}
    config = resolve(tree, "test", [])
    whole = train(config, world)
    again = train(config, world, resume=str(step))
    assert again["param_sha256"] == whole["param_sha256"]
    assert again["sent_bytes_total"] == whole["sent_bytes_total"]


def test_residuals_are_reset(world, folder, recorder, monkeypatch):
    """Zeroing them at every step is to have none; else they live until the next multiple."""
    remembered, six, found = Remembered(monkeypatch), {"train": MLP["train"] | {"steps": 6}}, {}
    cases = {every: {"reset_every": every} for every in (0, 1, 2)} | {"none": {"memory": "none"}}
    for every, case in cases.items():
        remembered.halves.clear()
        recorder.run(world, folder, MLP, exchange=CODED | case, **six)
        assert same_hashes(world, recorder, 6)
        found[every] = recorder.hashes
        if every in (0, 2):
            assert remembered.empty == [world.size == 1 or (every == 2 and step % 2 == 0) for step in range(1, 7)]
    assert found[1] == found["none"]
    assert found[2][:2] == found[0][:2]
    if world.size > 1:
        assert found[2][2] != found[0][2]
        assert found[1][1] != found[0][1]
