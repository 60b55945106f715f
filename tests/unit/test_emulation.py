"""What an emulation refuses, tells launchers, and recognizes as its own; no host is made here."""

import os
import signal
import subprocess
import sys
from functools import partial

import pytest

from mpitrain.comm.fault import unread_variables
from mpitrain.comm.hints import EMULATION
from mpitrain.emulate import agent, processes, settings
from mpitrain.emulate.command import describe
from mpitrain.emulate.emulation import Emulation
from mpitrain.emulate.host import needing
from mpitrain.errors import ConfigError, LaunchError
from mpitrain.kernels.storage import choose_folder
from mpitrain.topology.model import Constant, Direction, Link, Site, Topology

WAY = Direction(Constant(12.5e6), delay_s=0.01, queue_bytes=10**6)
PAIR = Topology(
    (Site("hub", slots=0), Site("one", slots=2), Site("two")),
    tuple(Link((name, "hub"), WAY, WAY) for name in ("one", "two")),
)


def sleeper(**variables):
    """Start a process that carries variables; it has begun when this returns."""
    script = "import sys, time; print(flush=True); time.sleep(1000)"
    process = subprocess.Popen([sys.executable, "-c", script], env=os.environ | variables, stdout=subprocess.PIPE)
    process.stdout.readline()
    return process


def test_refusals(monkeypatch):
    with pytest.raises(ConfigError, match="no links lead from hub to three; add some"):
        Emulation(Topology((*PAIR.sites, Site("three")), PAIR.links)).check()
    with pytest.raises(ConfigError, match="no site has slots"):
        Emulation(Topology(PAIR.sites[:1], ())).check()
    monkeypatch.setenv(EMULATION, processes.make_mark(os.getpid()))
    with pytest.raises(LaunchError, match="this is an emulated host already"):
        Emulation(PAIR).check()


def test_what_is_missing_is_said():
    message = "a TUN device cannot be had here: No such file or directory; modprobe tun"
    with pytest.raises(LaunchError, match=message), needing("a TUN device", "modprobe tun"):
        os.open("/dev/net/none", os.O_RDWR)


def test_environment_is_for_hosts_and_links(monkeypatch):
    """Who runs where is the emulation's; what is good for its links gives way to the user."""
    monkeypatch.setenv("OMPI_MCA_btl_tcp_sndbuf", "4711")
    monkeypatch.setenv("OMPI_MCA_orte_default_hostfile", "mine")
    found = Emulation(PAIR).environment()
    assert found[EMULATION] == processes.make_mark(os.getpid())
    assert (found["PRTE_MCA_prte_if_include"], found["OMPI_MCA_btl_tcp_if_include"]) == ("mt0", "mt0")
    assert found["OMPI_MCA_orte_default_hostfile"] == found["PRTE_MCA_prte_default_hostfile"] == "FOLDER/hostfile"
    assert "OMPI_MCA_btl_tcp_sndbuf" not in found
    assert int(found["OMPI_MCA_btl_tcp_eager_limit"]) > 500_000  # bytes under way: 12.5 MB/s times 40 ms there and back
    kept = settings.inherited({"SLURM_JOB_ID": "1", "PBS_NODEFILE": "x", "A": "b"})
    assert kept.pop("HOME")
    assert kept.pop("NUMBA_CACHE_DIR") == str(choose_folder())
    assert kept == {"A": "b"}
    assert unread_variables({EMULATION: "1:2"}) == []


def test_description(monkeypatch):
    lines = describe(Emulation(PAIR))
    assert lines[:3] == ["# hub: 10.77.0.1, 0 slots", "# one: 10.77.0.2, 2 slots", "# two: 10.77.0.3, 1 slots"]
    assert all(line.startswith("export ") for line in lines[3:])


def test_marks_name_a_process_for_good():
    with sleeper() as process:
        mark = processes.make_mark(process.pid)
        assert processes.is_alive(mark)
        assert not processes.is_alive(mark + "1")
        process.kill()
    assert not processes.is_alive(mark)
    assert not any(map(processes.is_alive, ["", "x", "1", "1:", ":1", "²:²"]))


def test_stale_processes_are_found_and_ended():
    """Those of an emulator that is gone, not those of one that lives; one that takes no wish is killed."""
    with sleeper() as gone:
        stale = processes.make_mark(gone.pid)
        gone.kill()
    own = processes.make_mark(os.getpid())
    deaf = sleeper(**{EMULATION: stale})
    os.kill(deaf.pid, signal.SIGSTOP)
    with deaf, sleeper(**{EMULATION: own}) as living:
        assert stale in processes.stale_marks()
        assert own not in processes.stale_marks()
        assert (processes.members(stale, ()), processes.members(own, ())) == ([deaf.pid], [living.pid])
        assert processes.end_all(partial(processes.members, stale, ())) == []
        assert deaf.wait() == -signal.SIGTERM
        assert living.poll() is None
        living.kill()


def test_agent_names_what_it_cannot_do(tmp_path, capsys):
    (tmp_path / agent.HOSTS).write_text('{"one": 4000000000}')
    for arguments, message in [
        (["two", "true"], "expected a host (one) and a command, got 'two true'"),
        (["-x", "one"], "expected a host (one) and a command, got 'one'"),
        ([], "expected a host (one) and a command, got ''"),
        (["one", "true"], "the host one has gone: No such file or directory"),
    ]:
        assert agent.main([str(tmp_path), *arguments]) == 5
        assert capsys.readouterr().err == f"mpitrain: emulate: {message}\n"
    assert agent.main([str(tmp_path / "none"), "one", "true"]) == 5
