"""Commands on emulated hosts: what they see, what the links carry, and that nothing is left of them."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from mpitrain.bench import traffic
from mpitrain.emulate.emulation import Emulation, end_stale
from mpitrain.errors import ExitCode
from mpitrain.topology.load import load_topology
from tests.system.emulated import (
    EMULATE,
    PAIR,
    Traces,
    emulate,
    require_hosts,
    start,
    write_topology,
)
from tests.system.helpers import HANG_S, as_nobody, environment, execute, gone, messages, processes

MARKED_S = str(10_000_000 + os.getpid())
"""Seconds that processes sleep which a test will look for."""


@pytest.fixture(scope="module", autouse=True)
def _possible(tmp_path_factory):
    require_hosts(tmp_path_factory.mktemp("possible"))


@pytest.fixture
def pair(tmp_path):
    return write_topology(tmp_path, PAIR)


def until(condition):
    deadline = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def part(emulation, site, role, *arguments):
    """Start one part of the traffic on a host; it is ready when this returns."""
    command = emulation.inside([sys.executable, "-m", "mpitrain.bench.traffic", role, *map(str, arguments)], site)
    process = subprocess.Popen(
        command,
        env=environment(**emulation.environment()),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "ready\n"
    return process


def result(process):
    output, _ = process.communicate("\n", timeout=HANG_S)
    assert process.returncode == 0
    return json.loads(output)


def test_what_a_command_sees(pair):
    """Its own name, names of the others, one interface, the working folder; words stay as they are, codes, too."""
    script = 'hostname; grep two /etc/hosts; ls /sys/class/net; pwd; echo "$1"; exit 7'
    done = emulate(pair, "sh", "-c", script, "sh", "a  b$c'd\"")
    assert done.returncode == 7
    assert done.stdout.splitlines() == ["one", "10.77.0.2 two", "lo", "mt0", str(pair.parent), "a  b$c'd\""]
    assert done.stderr.startswith("no link carried anything\nrelay: 0 packets")


def test_the_agent_stands_in_for_ssh(pair):
    """A shell reads its words, on the host that is named; options for ssh are passed over."""
    script = '"$PRTE_MCA_plm_ssh_agent" -x two hostname \\; echo \'$((6 * 7))\'; "$PRTE_MCA_plm_ssh_agent" three true'
    done = emulate(pair, "sh", "-c", script)
    assert done.returncode == ExitCode.MPI
    assert done.stdout.splitlines()[:2] == ["two", "42"]
    assert messages(done) == ["mpitrain: emulate: expected a host (one, two) and a command, got 'three true'"]


def test_delays_order_and_bytes(pair):
    """Packets take no less than delay and serialization, keep their order, and are counted with their headers."""
    with Emulation(load_topology(pair)) as emulation:
        taker = part(emulation, "two", "listen", 7000, 20)
        sent = result(part(emulation, "one", "probe", "two", 7000, 20))
        seen = result(taker)
        counts = emulation.counts()
    nbytes = 20 * (traffic.PROBE_BYTES + traffic.HEADERS)
    assert seen["numbers"] == list(range(20))
    assert min(seen["seconds"]) >= 0.005 + nbytes / 20 / 10e6
    assert sent == {"bytes": nbytes}
    forth, back = counts.links
    assert (forth.source, forth.dest, forth.arrived_packets, forth.arrived_bytes) == ("one", "two", 20, nbytes)
    assert (back.packets, counts.relay.refused_packets) == (0, 0)
    assert emulation.counts().links == counts.links


def test_a_stream_outlives_an_outage(tmp_path):
    """TCP that begins while the link is down, loses, doubles and overtakes packets brings every byte."""
    faults = "outages_s = [[0, 1.5]]\nloss_pct = 1\nduplicate_pct = 1\nreorder_pct = 1\njitter_ms = 1\n"
    with Emulation(load_topology(write_topology(tmp_path, PAIR + faults))) as emulation:
        taker = part(emulation, "two", "sink", 7000)
        sent = result(part(emulation, "one", "source", "two", 7000, 0.5))
        assert result(taker)["bytes"] == sent["bytes"] > 0
    forth, back = emulation.counts().links
    assert forth.arrived_bytes > sent["bytes"]
    assert forth.lost_packets + back.lost_packets > 0


HIDING = "setsid env -i sleep {0} & setsid sh -c 'trap \"\" TERM; sleep {0}; true' & echo up; "


def test_nothing_is_left(pair):
    """Processes that do not want to end, or hide, go with the command; so do namespaces and files."""
    script = HIDING.format(MARKED_S) + "while [ ! -e go ]; do sleep 0.02; done"
    with start(pair, "sh", "-c", script) as emulator:
        assert emulator.stdout.readline() == "up\n"
        with Traces(emulator.pid) as traces:
            assert len(traces.left()) >= 2 + 4 + 3  # hosts; sleeps and their shells; warden, relay, folder
            (pair.parent / "go").touch()
            assert emulator.wait(HANG_S) == 0
            assert traces.left() == []
    assert processes(MARKED_S) == []


@pytest.mark.parametrize("warden_too", [False, True])
def test_killed_emulators_leave_nothing(pair, warden_too):
    """Where the warden is killed, too, the next emulation clears up."""
    script = f"setsid env -u HOME sleep {MARKED_S} & echo up; sleep {MARKED_S}"
    with start(pair, "sh", "-c", script) as emulator:
        assert emulator.stdout.readline() == "up\n"
        with Traces(emulator.pid) as traces:
            assert len(traces.parts) == 3
            if warden_too:
                os.kill(traces.warden, signal.SIGKILL)
            emulator.kill()
            emulator.wait()
            if warden_too:
                end_stale()
            until(lambda: not traces.left())
    assert gone(MARKED_S)


def test_a_signal_goes_on(pair):
    """What the emulator is told reaches the command as launchers like it, and its code comes back."""
    script = "trap 'echo told; exit 75' USR1; echo up; while :; do sleep 0.05; done"
    with start(pair, "sh", "-c", script) as emulator:
        assert emulator.stdout.readline() == "up\n"
        emulator.terminate()
        out, _ = emulator.communicate(timeout=HANG_S)
    assert (emulator.returncode, out.splitlines()[0]) == (75, "told")


def test_ctrl_c_twice_ends_what_does_not_listen(pair):
    with start(pair, "sh", "-c", f"trap '' USR1 TERM; echo up; sleep {MARKED_S}; sleep {MARKED_S}") as emulator:
        assert emulator.stdout.readline() == "up\n"
        emulator.send_signal(signal.SIGINT)
        assert emulator.stderr.readline() == "\n"
        assert "Ctrl-C again ends at once" in emulator.stderr.readline()
        emulator.send_signal(signal.SIGINT)
        assert emulator.wait(HANG_S) == ExitCode.INTERRUPTED
    assert gone(MARKED_S)


def test_a_dead_relay_ends_the_command(pair):
    with start(pair, "sh", "-c", f"echo up; sleep {MARKED_S}") as emulator:
        assert emulator.stdout.readline() == "up\n"
        with Traces(emulator.pid) as traces:
            (relay,) = (each for each, name in traces.parts.items() if name == "mt-relay")
            os.kill(relay, signal.SIGKILL)
        _, err = emulator.communicate(timeout=HANG_S)
    assert emulator.returncode == ExitCode.MPI
    assert err.startswith("mpitrain: emulate: the relay between the hosts has ended: ")
    assert gone(MARKED_S)


def test_bad_input(pair):
    """Refused before anything starts."""
    done = emulate(pair, "no such command")
    assert done.returncode == ExitCode.CONFIG
    assert messages(done)[0].startswith("mpitrain: emulate: expected a command after --, got 'no such command'")
    done = execute([*EMULATE, pair], cwd=pair.parent)
    assert done.returncode == ExitCode.CONFIG
    assert "COMMAND" in messages(done)[0]


def test_print_starts_nothing(pair):
    done = emulate(pair, "sh", "-c", "exit 1", options=["--print"])
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    hosts = lines.index("# one: 10.77.0.1, 1 slots")
    assert lines[hosts + 1] == "# two: 10.77.0.2, 1 slots"
    assert all(line.startswith("#") for line in lines[:hosts])
    assert "export PRTE_MCA_plm_ssh_agent=FOLDER/agent" in lines
    assert lines[-1] == "sh -c 'exit 1'"


def test_counts_as_json(pair):
    done = emulate(pair, "true", options=["--json", pair.parent / "counts.json"])
    assert done.returncode == 0
    counts = json.loads((pair.parent / "counts.json").read_text())
    assert [(each["source"], each["dest"], each["bytes"]) for each in counts["links"]] == [
        ("one", "two", 0),
        ("two", "one", 0),
    ]
    assert counts["relay"]["delivered_packets"] == 0


DEVICE_FOR_ALL = """
import os, sys
from mpitrain.emulate import kernel
kernel.unshare(kernel.NEW_MOUNTS)
kernel.make_mounts_private()
os.mknod("tun", 0o20666, os.makedev(10, 200))
os.chmod("tun", 0o666)
kernel.bind("tun", kernel.TUN)
os.execvp(sys.argv[1], sys.argv[1:])
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="root takes another user's place here")
def test_without_root(tmp_path_factory):
    """Any user may have hosts, where /dev/net/tun can be opened: in a user namespace, under the same name."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o777)
        pair = write_topology(folder, PAIR)
        command = as_nobody(*EMULATE, pair, "--", "sh", "-c", "id -u; hostname; cat /sys/class/net/mt0/mtu")
        done = execute([sys.executable, "-c", DEVICE_FOR_ALL, *command], cwd=folder)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[:3] == ["65534", "one", "9000"]
        done = execute(as_nobody(*EMULATE, pair, "--", "true"), cwd=folder)
        if os.stat("/dev/net/tun").st_mode & 0o006 != 0o006:
            assert done.returncode == ExitCode.MPI
            assert "chmod 666 /dev/net/tun" in messages(done)[0]
