"""What the tables of `mpitrain bench` compare, what they make of runs, and times that are composed."""

import json
from dataclasses import replace

import pytest

from mpitrain.bench import convergence, stragglers
from mpitrain.bench.cells import Cell, parse_cell, parse_cells
from mpitrain.bench.composed import Link, Ran, composed_s, meetings, parse_link, ran
from mpitrain.bench.launcher import DIVERGED, Job, processes
from mpitrain.bench.paired import difference
from mpitrain.bench.stragglers import Slowness, own_s, simulated_run, variable
from mpitrain.comm.fault import FaultHook, slow_seconds
from mpitrain.config.load import load_config
from mpitrain.errors import ConfigError, DivergedError

CONFIG = """
[train]
steps = 8
eval_every = 4
batch_size = 8
[checkpoint]
every = 0
"""


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(CONFIG)
    return path


def loaded(path, *overrides):
    return load_config(path, list(overrides)).config


# Cells.


@pytest.mark.parametrize(
    ("text", "name", "overrides"),
    [
        ("raw", "raw", "when=sync codec=raw memory=none"),
        ("int8", "int8", "when=sync codec=int8 memory=residual"),
        ("int4:delta", "int4:delta", "when=sync codec=int4 memory=delta"),
        ("local-30/int4", "local-30/int4", "when=local h=30 codec=int4 memory=residual"),
        ("server-sync/raw", "server-sync/raw", "when=server mode=sync codec=raw memory=none"),
        ("ssp-4/int8", "ssp-4/int8", "when=server mode=ssp staleness=4 codec=int8 memory=residual"),
        (
            "async/int8:none+fp16",
            "async/int8:none+fp16",
            "when=server mode=async delay_compensation=none codec=int8 memory=none server_codec=fp16",
        ),
        (
            "dc=async-dca/raw",
            "dc",
            "when=server mode=async delay_compensation=adaptive codec=raw memory=none",
        ),
        ("async-dc/raw", "async-dc/raw", "when=server mode=async delay_compensation=fixed codec=raw memory=none"),
    ],
)
def test_cells(text, name, overrides):
    assert parse_cell(text) == Cell(name, tuple(f"exchange.{item}" for item in overrides.split()))


def test_cells_with_any_other_setting(config):
    assert parse_cell("int8,optim.lr=0.1,exchange.overlap=false") == Cell(
        "int8,optim.lr=0.1,exchange.overlap=false",
        (*parse_cell("int8").overrides, "optim.lr=0.1", "exchange.overlap=false"),
    )
    assert parse_cell("plain=optim.kind=sgd,optim.lr=1").overrides == ("optim.kind=sgd", "optim.lr=1")
    assert parse_cell("optim.kind=sgd") == Cell("optim.kind=sgd", ("optim.kind=sgd",))
    assert parse_cell("a b=ssp-2/int8:delta+raw").folder == "a-b"
    assert parse_cell("ssp-2/int8:delta+raw").folder == "ssp-2-int8-delta+raw"
    for text in ("local-7/int4", "ssp-3/int8+raw", "async-dca/int8:delta", "server-sync/fp16"):
        assert loaded(config, *parse_cell(text).overrides).exchange.codec in text


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("ssp/int8", "expected one of sync, local-H, .* in front of the slash, got 'ssp'"),
        ("local-x/int8", "got 'local-x'"),
        ("/int8", "got ''"),
        ("sync/", "expected CODEC.*, got ''"),
        ("int8+fp16", "sync has no server whose codec could be fp16"),
        ("local-3/int8+fp16", "local-3 has no server"),
        ("int8,lr=3", "expected section.key=value, got 'lr=3'"),
        ("int8,", "expected section.key=value, got ''"),
        ("name=", "expected section.key=value, got 'name='"),
        ("int8:a:b", "got 'int8:a:b'"),
    ],
)
def test_other_cells_are_refused(text, complaint):
    with pytest.raises(ConfigError, match=f"bench: --cell .*{complaint}"):
        parse_cell(text)


def test_cells_must_have_folders_of_their_own():
    assert [cell.name for cell in parse_cells(["raw", "int8"])] == ["raw", "int8"]
    with pytest.raises(ConfigError, match=r"--cell ssp-1-raw is there twice; give one of them a name"):
        parse_cells(["ssp-1/raw", "ssp-1-raw=ssp-1/raw"])


def test_servers_are_ranks_on_top(config):
    assert processes(config, 4, ()) == 4
    assert processes(config, 4, ("exchange.when=server",)) == 5
    assert processes(config, 4, ("exchange.when=server", "exchange.servers=3")) == 7
    assert processes(config, 4, ("exchange.collective=server", "parallel.pp=2")) == 6


# Runs.


class Script:
    """Stands for the processes of a run: writes what they would write."""

    def __init__(self, monkeypatch):
        self.made, self.diverge = [], ()
        script = self
        monkeypatch.setattr(Job, "run", lambda job: script.run(job) or 1.0)

    def run(self, job):
        self.made.append(job)
        job.folder.mkdir(parents=True)
        resolved = load_config(job.config, [*job.overrides, f"run.folder={json.dumps(str(job.folder))}"])
        (job.folder / "config.toml").write_text(resolved.to_toml())
        if any(item in self.diverge for item in job.overrides):
            raise DivergedError("it diverged")
        seed, lossy = resolved.config.train.seed, resolved.config.exchange.codec != "raw"
        row = {"compute_s": 0.01, "encode_s": 0.002, "decode_s": 0.0, "step_s": 0.5, "loss": 1.0}
        rows = [row | {"step": step, "time_s": 100 + 0.5 * step} for step in range(1, 26)]
        (job.folder / "metrics.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in rows))
        summary = {
            "replicas_identical": True,
            "metric": {"name": "accuracy", "value": 0.5},
            "loss": 1.0 + seed + 0.02 * lossy,
            "sent_bytes_total": 1000 - 750 * lossy,
            "replica_bytes_total": 0,
            "num_parameters": 100,
            "per_rank": [{"sent_bytes": 250 - 200 * lossy, "wait_s": 1.25}] * job.ranks,
            "wall_s": 3.0,
        } | ({"staleness": {"mean": 0.5, "max": 2}} if resolved.config.exchange.when == "server" else {})
        (job.folder / "summary.json").write_text(json.dumps(summary))


@pytest.fixture
def script(monkeypatch):
    return Script(monkeypatch)


def converge(config, tmp_path, cells, *, seeds=2, link=None, overrides=(), faults=""):
    out, runs = tmp_path / "out.json", tmp_path / "runs"
    code = convergence.main(config, 4, seeds, cells, list(overrides), runs, link=link, faults=faults, path=out)
    return code, json.loads(out.read_text()) if code == 0 else None


def test_a_table_of_convergence(config, tmp_path, script, capsys):
    code, records = converge(config, tmp_path, ["raw", "async/int8"], link="8:100")
    assert code == 0
    assert [job.ranks for job in script.made] == [1, 4, 4, 5, 5]
    table = " ".join(capsys.readouterr().out.split())
    assert "10 ms of computation a step" in table
    assert "links of 8 Mbit/s and 100 ms one way" in table
    assert "+1.33 … +1.33" in table  # 0.02 of losses 1 and 2: the same difference, in percent of their mean
    first, last = records[0], records[-1]
    assert (first["config"], first["seed"], first["bytes"], first["staleness_max"]) == ("small raw", 0, 1000, 0)
    assert (last["config"], last["seed"], last["bytes"], last["staleness_max"]) == ("small async/int8", 1, 250, 2)
    step_s, latencies_s, bytes_s = 0.012, 0.2, 250 / 8 / 1e6
    assert first["composed_s"] == pytest.approx(8 * (step_s + latencies_s + bytes_s))
    # Finished runs are not made again.
    assert converge(config, tmp_path, ["raw", "async/int8"], link="8:100") == (0, records)
    assert len(script.made) == 5
    # Without a link nothing is composed, and nothing measured for it.
    assert "composed_s" not in converge(config, tmp_path, ["raw"])[1][0]


def test_a_run_of_other_settings_is_not_taken_for_this_one(config, tmp_path, script, capsys):
    converge(config, tmp_path, ["raw"])
    assert converge(config, tmp_path, ["raw"], overrides=["exchange.h=5"])[0] == 0  # nothing reads it
    assert converge(config, tmp_path, ["raw"], overrides=["train.steps=9"])[0] == 2
    assert "holds a run with train.steps = 8, but this one has 9; give another --folder" in capsys.readouterr().err


def test_a_run_that_diverges_is_a_result(config, tmp_path, script, capsys):
    script.diverge = ("exchange.codec=int4", "train.seed=1")
    for _ in range(2):
        code, records = converge(config, tmp_path, ["raw", "int4", "int8"], seeds=3)
        assert code == 0
        assert [record["loss"] for record in records] == [1.0, None, 3.0, None, None, None, 1.02, None, 3.02]
        table = capsys.readouterr().out
        assert "raw (1 of 3 diverged)" in table
        assert "int4 (3 of 3 diverged)" in table
    assert len(script.made) == 9
    assert next((tmp_path / "runs").rglob(DIVERGED)).read_text() == "it diverged\n"


def test_what_goes_wrong_on_purpose_goes_wrong_in_all_runs(config, tmp_path, script, capsys):
    """Stale gradients need slow ranks; such runs are others than those without."""
    slow = "slow:rank=3,seconds=0.1"
    for faults in (slow, "", slow):
        assert converge(config, tmp_path, ["raw"], seeds=1, link="1:1", faults=faults)[0] == 0
    assert [(job.ranks, job.faults) for job in script.made] == [(1, ""), (4, slow), (1, ""), (4, "")]
    assert converge(config, tmp_path, ["raw"], faults="slowly")[0] == 2
    assert "MPITRAIN_FAULT: expected one of" in capsys.readouterr().err


def test_differences_are_paired_by_seed():
    losses = [[1.0, 2.0, None], [1.1, 2.2, 5.0]]
    base, mine = ([{"loss": value} for value in column] for column in losses)
    assert difference(mine, base, "loss") == "-32.35 … +52.35"  # 10 % ± 12.706 · 4.714 / sqrt(2)
    assert difference(mine[:1], base[:1], "loss") == "+10.00"
    assert difference(mine[2:], base[2:], "loss") == "-"


# Composed time.


LINK = Link(rate_bytes_s=1000.0, delay_s=0.5)


def run_of(config, *overrides, workers=(1600.0,) * 4, servers=()):
    return Ran(loaded(config, *overrides), list(workers), list(servers), num_parameters=25, step_s=0.25)


def test_links():
    assert parse_link("20:20") == Link(2.5e6, 0.02)
    assert parse_link("0.5:0") == Link(62500.0, 0.0)
    for text in ("20", "0:1", "-1:1", "1:-1", "a:b", "1:2:3", ""):
        with pytest.raises(ConfigError, match="bench: --link: expected MBIT_S:MS such as 20:20"):
            parse_link(text)


def test_time_of_sums(config):
    """8 steps of 0.25 s; 1.6 s of bytes; every message after the other costs half a second."""
    assert composed_s(run_of(config), LINK) == pytest.approx(8 * 0.25 + 1.6 + 8 * 2 * 0.5)
    assert composed_s(run_of(config, "exchange.collective=ring"), LINK) == pytest.approx(3.6 + 8 * 6 * 0.5)
    native = ("exchange.collective=native", "exchange.codec=raw")
    assert composed_s(run_of(config, *native), LINK) is None
    # One rank exchanges nothing.
    assert composed_s(run_of(config, workers=[0.0]), LINK) == pytest.approx(2.0)
    # All that goes through two servers, both ways: (4 · 1600 + 2 · 1000) / 2 bytes.
    served = run_of(config, "exchange.collective=server", "exchange.servers=2", servers=[1000.0] * 2)
    assert composed_s(served, LINK) == pytest.approx(2.0 + 4.2 + 8 * 2 * 0.5)


def test_time_of_local_steps(config):
    """Three rounds of 3, 3 and 2 steps; or two with two fragments each, of whose way a step's time is hidden."""
    local = ("exchange.when=local", "exchange.h=3")
    assert composed_s(run_of(config, *local), LINK) == pytest.approx(2.0 + 1.6 + 3 * 2 * 0.5)
    parts = ("exchange.when=local", "exchange.h=4", "exchange.fragments=2", "exchange.delay=1")
    assert composed_s(run_of(config, *parts), LINK) == pytest.approx(2.0 + 1.6 + 2 * 2 * (1.0 - 0.25))
    assert composed_s(run_of(config, *parts), Link(1e9, 0.01)) == pytest.approx(2.0, abs=1e-5)


def test_time_of_servers(config):
    """Two rounds of 4 steps; pushes of 200 bytes; weights of 100 bytes twice, the other answers are 25 bytes."""
    servers = [2 * 2 * 100.0 + 2 * 6 * 25.0]
    run = run_of(config, "exchange.when=server", workers=[1600.0] * 2, servers=servers)
    # Both pushes share the server's link, and the second one waits for the first; at the end of a round for both.
    expected = 8 * (0.25 + 0.5 + 2 * 0.2 + 0.5) + 6 * 0.025 + 2 * 2 * 0.1
    assert composed_s(run, LINK) == pytest.approx(expected)
    ahead = replace(run, config=loaded(config, "exchange.when=server", "exchange.mode=ssp", "exchange.staleness=3"))
    assert composed_s(ahead, LINK) < expected / 1.5
    two = run_of(config, "exchange.when=server", "exchange.servers=2", workers=[1600.0] * 2, servers=[350.0] * 2)
    assert composed_s(two, LINK) == pytest.approx(8 * 1.25 + (expected - 8 * 1.25) / 2)


def test_meetings(config):
    assert meetings(loaded(config)) == list(range(1, 9))
    assert meetings(loaded(config, "exchange.when=local", "exchange.h=3")) == [3, 6, 8]
    assert meetings(loaded(config, "exchange.when=server", "checkpoint.every=3")) == [3, 4, 6, 8]
    assert meetings(loaded(config, "exchange.when=server", "train.eval_every=0")) == [8]


def test_what_is_taken_from_a_summary(config):
    summary = {"per_rank": [{"sent_bytes": n} for n in (1, 2, 3)], "num_parameters": 7}
    taken = ran(loaded(config, "exchange.when=server"), summary, 0.5)
    assert (taken.workers, taken.servers, taken.num_parameters, taken.step_s) == ([1.0, 2.0], [3.0], 7, 0.5)
    assert ran(loaded(config), summary, 0.5).servers == []


# Stragglers.


def test_slowness_is_told_to_the_run_as_it_is_to_the_simulator():
    slowness = Slowness(0.05, 4.0, 0.15)
    for pattern in stragglers.PATTERNS:
        faults = slowness.faults(pattern, 4)
        text = variable(faults)
        assert [FaultHook(text, rank).faults for rank in range(5)] == [*([fault] for fault in faults), []]
    assert [fault.seconds for fault in slowness.faults("permanent", 3)] == [0.05, 0.05, 0.2]
    assert slowness.folder("rotating") == "rotating-0.05s-x4-p0.15"
    assert slowness.folder("permanent") == "permanent-0.05s-x4"


def test_the_simulated_run(config):
    faults = Slowness(1.0, 3.0, 0.0).faults("permanent", 2)
    assert simulated_run(loaded(config), faults, 0.5).makespan_s == 8 * 3.5
    rotating = Slowness(1.0, 4.0, 0.5).faults("rotating", 2)
    table = [[0.5 + slow_seconds(fault, rank, step) for step in range(1, 9)] for rank, fault in enumerate(rotating)]
    sync = sum(max(pair) for pair in zip(*table, strict=True))
    local = sum(max(sum(row[a:b]) for row in table) for a, b in ((0, 3), (3, 6), (6, 8)))
    assert simulated_run(loaded(config), rotating, 0.5).makespan_s == sync
    assert simulated_run(loaded(config, "exchange.when=local", "exchange.h=3"), rotating, 0.5).makespan_s == local
    free = ("exchange.when=server", "exchange.mode=async", "train.eval_every=0")
    assert simulated_run(loaded(config, *free), rotating, 0.5).makespan_s == max(map(sum, table)) < local < sync


def test_what_a_step_takes_by_itself():
    fault = Slowness(1.0, 4.0, 0.5).faults("rotating", 1)[0]
    rows = [
        {"step": step, "compute_s": slow_seconds(fault, 0, step) + 0.01 * step, "encode_s": 0.25, "decode_s": 0.5}
        for step in range(1, 6)
    ]
    assert own_s(rows, fault) == pytest.approx(0.78)
    assert own_s([{"step": 1, "compute_s": 0.0, "encode_s": 0.0, "decode_s": 0.0}], fault) == 0.0


def test_a_table_of_stragglers(config, tmp_path, script, capsys):
    arguments = (config, 2, 2, ["server-sync/raw", "async/int8"], [], tmp_path / "runs")
    out = tmp_path / "out.json"
    for _ in range(2):
        assert stragglers.main(*arguments, slowness=(0.25, 3.0, 0.5), path=out) == 0
    assert len(script.made) == 8
    assert {job.ranks for job in script.made} == {3}
    assert "rank=1,seconds=0.75" in script.made[-1].faults
    assert all("train.eval_every=0" in job.overrides for job in script.made)
    records = json.loads(out.read_text())
    assert [(record["pattern"], record["cell"]) for record in records] == [
        (pattern, cell) for pattern in ("rotating", "permanent") for cell in ("server-sync/raw", "async/int8")
    ]
    for record in records:
        assert record["steps_per_s"] == pytest.approx(2.0)
        assert record["of_sim"] == pytest.approx(2.0 / record["sim_per_s"])
        assert record["gain"] == pytest.approx(1.0)
        assert record["waiting"] == pytest.approx(0.1)
        assert (record["stale_mean"], record["stale_max"]) == (0.5, 2)
    assert records[0]["sim_gain"] == records[2]["sim_gain"] == records[3]["sim_gain"] == 1.0  # nothing helps the last
    assert records[1]["sim_gain"] > 1.1
    assert records[3]["loss_vs_pct"] == "+1.33 … +1.33"
    assert records[2]["sim_per_s"] == pytest.approx(1 / 0.75)  # 0.012 s of a step are less than it sleeps
    script.diverge = ("exchange.codec=int4",)
    assert stragglers.main(config, 2, 1, ["int4"], [], tmp_path / "runs", slowness=(0.25, 3.0, 0.5), path=None) == 2
    assert "bench: int4, seed 0 has diverged" in capsys.readouterr().err
