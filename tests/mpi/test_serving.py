"""Whole runs through servers, in-process: the bits of sums, of several servers, of a resumed run; faults."""

import json

import pytest
from mpi4py import MPI

from mpitrain.config.load import resolve
from mpitrain.errors import ConfigError, DivergedError, StoppedEarlyError
from mpitrain.optim.schedule import Schedule
from mpitrain.train.run import train
from tests.mpi.test_train import MLP, TRANSFORMER

SERVER = {"when": "server"}
RAW = {"codec": "raw", "memory": "none"}
WIDE = MLP | {"model": {"kind": "mlp", "hidden": [60, 60]}}
"""Enough buckets for two servers."""


def run(comm, path, base, *, resume=None, **sections):
    """Train; returns the summary and the rows of metrics."""
    tree = {name: dict(table) for name, table in base.items()}
    for name, table in sections.items():
        tree[name] = tree.get(name, {}) | table
    tree["run"] = {"folder": str(path)}
    summary = train(resolve(tree, "test", []), comm, overwrite=resume is None, resume=resume)
    return summary, [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def apart(world, ranks):
    """Split off the first ranks; the others get a communicator that is not used."""
    return world.Split(int(world.rank >= ranks), world.rank)


@pytest.mark.parametrize("base", [MLP, TRANSFORMER], ids=["mlp", "transformer"])
def test_raw_pushes_make_the_steps_of_a_raw_sum(world, folder, base):
    """A server adds up in the order of workers, as direct does: the same weights, bit for bit."""
    if world.size < 2:
        return
    train_ = {"train": base["train"] | {"steps": 5, "clip_norm": 0}}
    raw = RAW | {"server_codec": "raw"}
    through, rows = run(world, folder / "server", base, exchange=SERVER | raw, **train_)
    direct = apart(world, world.size - 1)
    if world.rank < world.size - 1:
        alone, steps = run(direct, folder / "direct", base, exchange=RAW, **train_)
        assert through["param_sha256"] == alone["param_sha256"]
        assert [row["loss"] for row in rows] == [row["loss"] for row in steps]
        assert [row["lr"] for row in rows] == [row["lr"] for row in steps]
        assert [row["grad_norm"] for row in rows] == pytest.approx([row["grad_norm"] for row in steps])
    direct.Free()
    assert through["replicas_identical"] is True
    assert through["staleness"] == {"mean": 0, "max": 0}


@pytest.mark.parametrize("axis", ["pp", "tp"])
def test_a_split_model_has_a_server_for_each_part(world, folder, axis):
    """4 ranks: one worker in two parts, and two servers; the bits of the same two parts alone."""
    if world.size != 4:
        return
    base = TRANSFORMER | {"train": TRANSFORMER["train"] | {"steps": 4, "clip_norm": 0}, "parallel": {axis: 2}}
    through, _ = run(world, folder / "server", base, exchange=SERVER | RAW | {"server_codec": "raw"})
    pair = apart(world, 2)
    if world.rank < 2:
        alone, _ = run(pair, folder / "alone", base, exchange=RAW)
        assert through["param_sha256"] == alone["param_sha256"]
    pair.Free()
    clipped = {"train": base["train"] | {"clip_norm": 0.01}}
    for mode in ({"mode": "sync"}, {"mode": "async", "window": 2}, {"mode": "ssp", "staleness": 2}):
        summary, _ = run(world, folder / "clipped", base | clipped, exchange=SERVER | mode)
        assert summary["replicas_identical"] is True


@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_two_servers_are_one(world, folder, codec):
    if world.size < 3:
        return
    exchange = SERVER | {"codec": codec, "bucket_mb": 0.001}
    train_ = {"train": MLP["train"] | {"steps": 6, "clip_norm": 0.5}}
    two, rows = run(world, folder / "two", WIDE, exchange=exchange | {"servers": 2}, **train_)
    fewer = apart(world, world.size - 1)
    if world.rank < world.size - 1:
        one, expected = run(fewer, folder / "one", WIDE, exchange=exchange, **train_)
        assert two["param_sha256"] == one["param_sha256"]
        for name in ("loss", "lr", "grad_norm"):
            assert [row[name] for row in rows] == [row[name] for row in expected]
    fewer.Free()


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("memory", ["residual", "delta"])
def test_a_resumed_run_takes_the_same_steps(world, folder, servers, memory):
    """The optimizer comes back from the servers, the memories of the pushes from both ends."""
    if world.size <= servers:
        return
    base = WIDE | {"optim": {"schedule": "constant"}, "checkpoint": {"every": 4}}
    exchange = SERVER | {"codec": "int4", "memory": memory, "servers": servers, "bucket_mb": 0.001}

    def steps(number):
        return {"train": MLP["train"] | {"steps": number}, "exchange": exchange}

    whole, rows = run(world, folder / "whole", base, **steps(8))
    run(world, folder / "parts", base, **steps(4))
    resumed, again = run(world, folder / "parts", base, resume="newest", **steps(8))
    assert resumed["param_sha256"] == whole["param_sha256"]
    assert [row["loss"] for row in again] == [row["loss"] for row in rows]
    assert [worker["pushed"] for worker in resumed["workers"]] == [8] * (world.size - servers)


@pytest.mark.parametrize(
    "mode",
    [
        {"mode": "sync"},
        {"mode": "ssp", "staleness": 2},
        {"mode": "async", "delay_compensation": "adaptive", "staleness_lr": "inverse"},
        {"mode": "async", "window": 3, "delay_compensation": "fixed"},
    ],
    ids=["sync", "ssp", "async", "window"],
)
def test_every_mode_accounts_for_every_push(world, folder, mode):
    """Evaluations and checkpoints end rounds; the bound of staleness holds over all of them."""
    if world.size < 2:
        return
    train_ = {"train": MLP["train"] | {"steps": 11, "eval_every": 4}, "checkpoint": {"every": 3}}
    summary, rows = run(world, folder / "run", MLP, exchange=SERVER | mode, **train_)
    assert [row["step"] for row in rows] == list(range(1, 12))
    assert [row["step"] for row in rows if "test_loss" in row] == [4, 8, 11]
    assert all(row["grad_norm"] > 0 for row in rows)
    for worker in summary["workers"]:
        assert (worker["pushed"], worker["applied"]) == (11, 11)
        assert sum(worker["staleness"].values()) == 11
    if mode["mode"] != "async":
        assert summary["staleness"]["max"] <= mode.get("staleness", 0)
    assert summary["staleness"]["max"] == max(row["staleness_max"] for row in rows)
    assert summary["replicas_identical"] is True


def test_what_servers_keep_is_accounted_for(world, folder):
    """The weights of every worker on the server, twice (the next ones are written beside them); the worker's own."""
    if world.size < 2:
        return
    found = {}
    for codec in ("raw", "int8"):
        summary, _ = run(world, folder / "run", MLP, exchange=SERVER | RAW | {"server_codec": codec})
        found[codec] = [rank["memories_bytes"] for rank in summary["per_rank"]]
    params = [rank["params_bytes"] for rank in summary["per_rank"]]
    assert found["raw"] == [0] * world.size
    assert found["int8"] == [2 * size for size in params[:-1]] + [2 * params[-1] * (world.size - 1)]
    optimizers = [rank["optimizer_bytes"] for rank in summary["per_rank"]]
    assert optimizers == [0] * (world.size - 1) + [2 * params[-1]]


def test_the_servers_count_drives_the_rate(world, folder):
    """P08: the rate follows the updates that were made, whoever made them; with async, one is a part of a step."""
    if world.size < 2:
        return
    workers, steps = world.size - 1, 6
    schedule = Schedule(kind="linear", lr=1e-3, total_steps=steps, warmup_steps=2)
    optim = {"optim": {"schedule": "linear", "warmup_steps": 2}, "train": MLP["train"] | {"steps": steps}}
    _, rows = run(world, folder / "sync", MLP, exchange=SERVER, **optim)
    assert [row["lr"] for row in rows] == [schedule(step) for step in range(steps)]
    _, rows = run(world, folder / "async", MLP, exchange=SERVER | {"mode": "async"}, **optim)
    rates = [schedule(update / workers) / workers for update in range(steps * workers)]
    assert sum(row["lr"] for row in rows) == pytest.approx(sum(rates) / workers)


def test_fewer_workers_go_on_at_the_same_place_of_the_schedule(world, folder):
    """With async, updates are parts of a step: of as many as there were workers when they were made."""
    if world.size < 3:
        return
    steps = 6
    schedule = Schedule(kind="linear", lr=1e-3, total_steps=steps, warmup_steps=2)
    base = MLP | {"optim": {"schedule": "linear", "warmup_steps": 2}, "exchange": SERVER | {"mode": "async"}}
    run(world, folder / "run", base | {"checkpoint": {"every": 3}}, train=base["train"] | {"steps": steps})
    (folder / "run" / "summary.json").unlink(missing_ok=True)
    fewer, workers = apart(world, world.size - 1), world.size - 2
    if world.rank < world.size - 1:
        again = base | {"checkpoint": {"every": 3}}
        _, rows = run(fewer, folder / "run", again, resume=3, train=base["train"] | {"steps": steps})
        rates = [schedule(3 + update / workers) / workers for update in range((steps - 3) * workers)]
        assert sum(row["lr"] for row in rows[3:]) == pytest.approx(sum(rates) / workers)
    fewer.Free()


@pytest.mark.parametrize("late", ["apply", "drop"])
def test_late_gradients_are_counted_and_do_not_wear_out_the_rate(world, folder, monkeypatch, late):
    """P09: with a reserve of workers, one of them slow: every push is accounted for, and the last step has its rate."""
    if world.size < 4:
        return
    monkeypatch.setenv("MPITRAIN_FAULT", "slow:rank=1,seconds=0.03")
    steps = 12
    train_ = {"train": MLP["train"] | {"steps": steps, "eval_every": 4}, "optim": {"schedule": "linear"}}
    exchange = SERVER | {"aggregate": world.size - 2, "late": late}
    summary, rows = run(world, folder / "run", MLP, exchange=exchange, **train_)
    for worker in summary["workers"]:
        assert worker["pushed"] == worker["applied"] + worker["dropped"] + worker["rejected"] == steps
    dropped = sum(worker["dropped"] for worker in summary["workers"])
    assert dropped > 0 if late == "drop" else dropped == 0
    assert rows[-1]["lr"] == Schedule(kind="linear", lr=1e-3, total_steps=steps, warmup_steps=0)(steps - 1) > 0


def test_a_lost_answer_and_a_gradient_that_is_not_finite(world, folder, monkeypatch):
    if world.size < 2:
        return
    monkeypatch.setenv("MPITRAIN_FAULT", "drop:rank=0,step=3;nan:rank=0,step=7")
    train_ = {"train": MLP["train"] | {"steps": 10}}
    summary, rows = run(world, folder / "run", MLP, exchange=SERVER, **train_)
    assert summary["replicas_identical"] is True
    first = summary["workers"][0]
    # The weights of step 4 and 5 are too old: the loss of the answer is seen in the one after it.
    assert (first["pushed"], first["applied"], first["rejected"]) == (10, 7, 3)
    assert all(worker["applied"] == 10 for worker in summary["workers"][1:])
    assert rows[-1]["skipped"] == 1 + 2 * (world.size == 2)


def test_a_stop_ends_all_in_step(world, folder, monkeypatch):
    """A wish of one worker in the middle of a round; the run goes on from the checkpoint."""
    if world.size < 2:
        return
    monkeypatch.setenv("MPITRAIN_FAULT", "stop:rank=0,step=3")
    train_ = {"train": MLP["train"] | {"steps": 12}, "exchange": SERVER | {"mode": "ssp", "staleness": 2}}
    with pytest.raises(StoppedEarlyError):
        run(world, folder / "run", MLP, **train_)
    monkeypatch.delenv("MPITRAIN_FAULT")
    summary, rows = run(world, folder / "run", MLP, resume="auto", **train_)
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert summary["steps"] == 12


def test_divergence_ends_the_run(world, folder):
    """P04: a rate far too high, with momentum and late gradients."""
    if world.size < 2:
        return
    high = {"optim": {"kind": "sgd", "lr": 1e4, "warmup_steps": 200}, "checkpoint": {"every": 10}}
    train_ = {"train": MLP["train"] | {"steps": 400, "clip_norm": 0, "diverge": 3.0}}
    with pytest.raises(DivergedError):
        run(world, folder / "run", MLP, exchange=SERVER | {"mode": "async"}, **train_, **high)


def test_impossible_roles_are_refused(world, folder):
    """P13: the key and the numbers."""
    for exchange, words in (
        (SERVER | {"servers": 0}, "exchange.servers = 0"),
        (SERVER | {"servers": world.size}, f"start {world.size + 1} ranks"),
        *([(SERVER | {"servers": 2}, "it has 1 bucket")] if world.size > 2 else []),
    ):
        with pytest.raises(ConfigError, match=words):
            run(world, folder / "run", MLP, exchange=exchange)
    if world.size == 1:
        with pytest.raises(ConfigError, match="start 2 ranks"):
            run(MPI.COMM_SELF, folder / "run", MLP, exchange=SERVER)
