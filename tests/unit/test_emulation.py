"""What an emulation refuses, tells launchers, and recognizes as its own; no host is made here."""

import os
import resource
import signal
import socket
import subprocess
import sys
from functools import partial

import pytest

from mpitrain.comm.fault import unread_variables
from mpitrain.comm.hints import EMULATION
from mpitrain.comm.signals import StopRequest
from mpitrain.emulate import agent, command, emulation, processes, settings, warden
from mpitrain.emulate.command import describe
from mpitrain.emulate.counts import Counts, RelayLoad
from mpitrain.emulate.emulation import Emulation
from mpitrain.emulate.host import needing
from mpitrain.errors import ConfigError, LaunchError
from mpitrain.kernels.storage import choose_folder
from mpitrain.topology.dump import dump_topology
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
    many = Topology(tuple(Site(f"s{number}") for number in range(961)), (), name="many")
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    with pytest.raises(ConfigError, match="topology many: expected at most 960 sites .*, got 961; leave some out"):
        Emulation(many).check()
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, 4096))
    with pytest.raises(ConfigError, match="at most 192 sites .*, got 961; raise ulimit -n, which is 256, or leave"):
        Emulation(many).check()
    monkeypatch.undo()
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


@pytest.mark.parametrize(
    ("said", "version", "transport"),
    [
        ("mpirun (Open MPI) 4.1.6", (4, 1, 6), "self,vader,tcp"),
        ("mpirun (Open MPI) 5.0.11", (5, 0, 11), "self,sm,tcp"),
        ("HYDRA build details: Version: 4.2.3", (5, 0), "self,sm,tcp"),
    ],
)
def test_settings_are_those_of_the_installed_open_mpi(said, version, transport, tmp_path, monkeypatch):
    launcher = tmp_path / "mpirun"
    launcher.write_text(f"#!/bin/sh\necho '{said}'\n")
    launcher.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert settings.open_mpi_version.__wrapped__() == version
    assert settings.wishes(PAIR, version, {})["OMPI_MCA_btl"] == transport


def test_a_host_that_hangs_is_named(monkeypatch):
    monkeypatch.setattr(warden, "HOST_S", 0.01)
    ours, theirs = socket.socketpair()
    with theirs, pytest.raises(LaunchError, match="the host one did not come up within 0.01 s"):
        warden._receive(ours, "one")


def test_a_child_is_waited_for_and_killed_if_it_hangs():
    """Whatever was inherited of SIGCHLD: where it is ignored, the kernel keeps no dead children."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        for body, limit_s in ((lambda: None, 60.0), (signal.pause, 0.01)):
            child = warden.fork(body)
            warden.join(child, limit_s)
            with pytest.raises(ChildProcessError):
                os.waitpid(child, 0)
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_stale_folders_may_go_meanwhile(monkeypatch, tmp_path):
    """Two emulators clear up at once: the other one has removed what this one has just seen."""
    monkeypatch.setattr(emulation, "_plain_folder", lambda: tmp_path)
    monkeypatch.setattr(processes, "end_stale", lambda: 0)
    folders = [tmp_path / f"{emulation.PREFIX}{mark}.x" for mark in ("1-0", "2-0")]
    for folder in folders:
        folder.mkdir()

    def is_alive(mark):
        if mark == "1:0":
            folders[0].rmdir()
        return False

    monkeypatch.setattr(processes, "is_alive", is_alive)
    emulation.end_stale()
    assert list(tmp_path.iterdir()) == []


def test_counts_that_cannot_be_written_keep_the_exit_code(monkeypatch, tmp_path, capsys):
    file = tmp_path / "pair.toml"
    file.write_text(dump_topology(PAIR))
    for name, replacement in {
        "__enter__": lambda self: self,
        "__exit__": lambda self, *error: None,
        "run": lambda self, words, **rest: 3,
        "counts": lambda self: Counts([], RelayLoad(0, 0, 0, 0, 1.0, 0.0, 0.0, 0.0, 0.0, 0, 0, "none")),
    }.items():
        monkeypatch.setattr(Emulation, name, replacement)
    assert command.main(file, ["true"], output=tmp_path, show=False, stop=StopRequest()) == 3
    assert f"mpitrain: --json: cannot write {tmp_path}: Is a directory; name another" in capsys.readouterr().err


def test_description(monkeypatch):
    lines = describe(Emulation(PAIR))
    first = max(number for number, line in enumerate(lines) if line == "#")  # tables before, hosts after
    assert lines[0].startswith("# topology topology: 3 sites, 3 slots, 2 links, a tree below hub")
    lines = lines[first + 1 :]
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
