"""Workers and servers that die: everyone ends, somebody is named, and the run goes on from its checkpoint."""

import re

import pytest

from mpitrain.errors import ExitCode
from tests.system.helpers import gone, rows, summary, train, write_config

SERVER = ("--set", "exchange.when=server", "--set", "checkpoint.every=4")


@pytest.mark.parametrize(("mode", "rank"), [("sync", 2), ("ssp", 1)], ids=["sync-server", "ssp-worker"])
def test_a_killed_rank_ends_the_run(tmp_path, mode, rank):
    """P01: rank 2 serves. The launcher names who died; a restart takes the steps that are left."""
    config, run = write_config(tmp_path, steps=8)
    options = (*SERVER, "--set", f"exchange.mode={mode}")
    killed = train(3, config, *options, fault=f"kill:rank={rank},step=6")
    assert killed.returncode != 0
    assert f"process rank {rank} " in killed.stderr
    assert gone(str(config), 15)
    assert not (run / "summary.json").exists()
    resumed = train(3, config, *options, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert [row["step"] for row in rows(run)] == list(range(1, 9))
    assert summary(run)["replicas_identical"] is True
    assert [worker["pushed"] for worker in summary(run)["workers"]] == [8, 8]


def test_a_server_that_raises_is_named(tmp_path):
    config, _ = write_config(tmp_path, steps=8)
    result = train(3, config, *SERVER, fault="raise:rank=2,step=3,message=broken on purpose")
    assert result.returncode == ExitCode.INTERNAL, result.stderr
    assert gone(str(config), 15)
    assert "mpitrain: rank 2, step 3: " in result.stderr
    assert result.stderr.count("broken on purpose") == 1


def test_a_busy_server_is_waited_for(tmp_path):
    """P11: nothing that a worker does needs the server to be in a call of MPI at the same time."""
    config, run = write_config(tmp_path, steps=4)
    options = (*SERVER, "--set", "exchange.mode=async", "--set", "network.peer_timeout_s=20")
    result = train(3, config, *options, fault="delay:rank=2,step=2,seconds=3")
    assert result.returncode == 0, result.stderr
    assert summary(run)["replicas_identical"] is True


@pytest.mark.parametrize(("mode", "worker"), [("sync", 1), ("async", 0)])
def test_the_others_go_on_without_a_worker_that_dies(tmp_path, mode, worker):
    """P01, under ULFM: the round is finished and saved, and fewer ranks go on from there."""
    config, run = write_config(tmp_path, steps=8)
    options = (*SERVER, "--set", f"exchange.mode={mode}")
    stopped = train(4, config, *options, fault=f"kill:rank={worker},step=6", survive=True)
    assert stopped.returncode == ExitCode.STOPPED, stopped.stderr
    told = f"mpitrain: stopped after step 8 by the death of worker {worker}, with a checkpoint; go on with --resume"
    assert stopped.stderr.count(told) == 1
    assert [row["step"] for row in rows(run)] == list(range(1, 9))
    assert not (run / "summary.json").exists()
    resumed = train(3, config, *options, "--set", "train.steps=10", "--resume", "auto")
    assert resumed.returncode == 0, resumed.stderr
    assert [row["step"] for row in rows(run)] == list(range(1, 11))
    assert summary(run)["replicas_identical"] is True


def test_a_dead_server_is_named_by_the_workers(tmp_path):
    config, _ = write_config(tmp_path, steps=8)
    result = train(3, config, *SERVER, fault="kill:rank=2,step=3", survive=True)
    assert result.returncode == ExitCode.MPI, result.stderr
    assert re.search(r"server 0 \(rank 2 of all\)[^:]*: the peer has died", result.stderr), result.stderr
    assert gone(str(config), 15)


def test_a_death_in_a_ring_ends_also_those_that_do_not_talk_to_the_dead(tmp_path):
    """Under ULFM, only the neighbours are told; one of them ends the others, who would wait until the time limit."""
    config, _ = write_config(tmp_path, steps=8)
    result = train(4, config, "--set", "exchange.collective=ring", fault="kill:rank=2,step=3", survive=True)
    assert result.returncode == ExitCode.MPI, result.stderr
    assert "rank 2 of the data axis (rank 2 of all): the peer has died" in result.stderr
    assert "no message for" not in result.stderr
    assert gone(str(config), 15)
