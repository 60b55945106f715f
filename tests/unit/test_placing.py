"""Host files and topologies as places for ranks (S12), and whether hosts are reached."""

import os
import socket
import sys

import pytest

from mpitrain.comm import reaching
from mpitrain.comm.placing import Host, Placement, read_hostfile, topology_placement
from mpitrain.comm.reaching import check_reach, is_local, shell_reach
from mpitrain.errors import ConfigError, ExitCode, LaunchError
from mpitrain.topology.model import Constant, Direction, Link, Site, Topology

TEXT = """\
# our hosts
node1 slots=2   # the large one

node2:1
node1 slots=1 max_slots=4
"""


@pytest.fixture
def hostfile(tmp_path):
    path = tmp_path / "my hosts"
    path.write_text(TEXT)
    return path


def test_comments_blank_lines_and_hosts_that_come_twice(hostfile):
    placement = read_hostfile(hostfile)
    assert placement.hosts == (Host("node1", 3), Host("node2", 1))
    assert (placement.slots, placement.source) == (4, str(hostfile))


def test_more_ranks_than_slots(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("a slots=2\n\nb # one\n")
    with pytest.raises(ConfigError) as refused:
        read_hostfile(path).check(4)
    assert str(refused.value) == (
        f"{path}: 4 ranks, but 3 slots (3 < 4): a 2, b 1; start at most 3 ranks, or raise slots"
    )
    read_hostfile(path).check(3)
    assert read_hostfile(path).table(3, servers=1) == [
        "host  slots  ranks",
        "a         2  0-1",
        "b         1  2 (2 serves)",
    ]


@pytest.mark.parametrize(
    ("line", "number"),
    [
        ("node1 slots=two", 2),
        ("node1 slot=2", 2),
        ("node1:2 slots=2", 2),
        ("node1 slots=-1", 2),
        ("node1:", 2),
        ("-x", 2),
        ("node1 node2", 2),
        ("node1 slots=²", 2),
        ("fe80::1", 2),
    ],
)
def test_lines_that_are_no_hosts(tmp_path, line, number):
    path = tmp_path / "hosts"
    path.write_text(f"good\n{line}\n")
    with pytest.raises(ConfigError) as refused:
        read_hostfile(path)
    assert str(refused.value).startswith(f"{path}:{number}: expected `host1`")
    assert f"got `{line}`" in str(refused.value)


@pytest.mark.parametrize("text", ["", "\n# none\n", "a slots=0\n"])
def test_files_without_slots(tmp_path, text):
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(ConfigError, match="got no slot at all"):
        read_hostfile(path)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        read_hostfile(tmp_path / "none")
    (tmp_path / "odd").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_hostfile(tmp_path / "odd")


def test_hosts_are_filled_one_after_the_other():
    placement = Placement((Host("a", 2), Host("b", 3), Host("c", 1)), "here")
    assert placement.ranks(4) == [range(2), range(2, 4), range(4, 4)]
    assert placement.used(4) == "a:2,b:3"
    assert placement.table(4)[-1] == "c         1  -"
    assert [len(ranks) for ranks in placement.ranks(6)] == [2, 3, 1]


def star():
    way = Direction(Constant(1e7), 0.01)
    sites = (Site("cell0", host="10.0.0.1"), Site("cell1", slots=2), Site("core", slots=0))
    return Topology(sites, (Link(("cell0", "core"), way, way), Link(("cell1", "core"), way, way)), source="star.toml")


def test_sites_of_a_topology_are_hosts():
    placement = topology_placement(star())
    assert placement.hosts == (Host("10.0.0.1", 1, "cell0"), Host("cell1", 2, "cell1"))
    assert [str(host) for host in placement.hosts] == ["cell0 (10.0.0.1)", "cell1"]
    assert [host.name for host in topology_placement(star(), emulate=True).hosts] == ["cell0", "cell1"]
    with pytest.raises(ConfigError, match=r"topology star.toml: 4 ranks, but 3 slots \(3 < 4\): cell0 \(10.0.0.1\) 1"):
        placement.check(4)


def test_launchers_take_no_ipv6_address_with_slots():
    with pytest.raises(ConfigError, match="fe80::1"):
        Placement((Host("fe80::1", 2),), "here").used(1)


# Reach.


def test_this_machine_is_always_reached():
    def never(name):
        raise AssertionError(name)

    for name in ("localhost", socket.gethostname(), "127.0.0.1", "127.3.2.1"):
        assert is_local(name)
        check_reach([Host(name, 1)], "nothing", never)
    assert not is_local("192.0.2.1")


def test_hosts_that_are_not_reached_are_all_named():
    hosts = [Host("a", 1), Host("10.9.9.9", 1, "b"), Host("c", 1)]
    answers = {"a": "Could not resolve hostname", "10.9.9.9": "timed out", "c": ""}
    with pytest.raises(LaunchError) as refused:
        check_reach(hosts, "do something", answers.get)
    assert str(refused.value) == (
        "launch: no remote shell reaches a (Could not resolve hostname), b (10.9.9.9) (timed out); do something"
    )
    assert refused.value.exit_code == ExitCode.MPI
    check_reach(hosts[2:], "do something", answers.get)


def agent(tmp_path, code):
    script = tmp_path / "my agent.py"
    script.write_text(code)
    return f"{sys.executable} '{script}'"


@pytest.mark.parametrize("variable", reaching.AGENTS)
def test_the_remote_shell_of_the_launcher_is_tried(tmp_path, variable):
    code = "import sys; assert sys.argv[1:] == ['far away', 'true']"
    assert shell_reach({variable: agent(tmp_path, code)})("far away") == ""


def test_a_shell_that_fails_is_quoted(tmp_path, monkeypatch):
    code = "import sys; print('one\\nPermission denied', file=sys.stderr); sys.exit(255)"
    assert shell_reach({reaching.AGENTS[0]: agent(tmp_path, code)})("a") == "Permission denied"
    assert "ended with 3" in shell_reach({reaching.AGENTS[0]: agent(tmp_path, "exit(3)")})("a")
    assert shell_reach({reaching.AGENTS[0]: "/no/such/shell"})("a") == "/no/such/shell: No such file or directory"
    monkeypatch.setattr(reaching, "PATIENCE_S", 0.2)
    assert shell_reach({reaching.AGENTS[0]: "cat /dev/zero; :"})("a")  # never waits for a terminal


def test_a_shell_that_says_nothing_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(reaching, "PATIENCE_S", 0.2)
    code = "import os; os.read(os.pipe()[0], 1)"
    assert shell_reach({reaching.AGENTS[0]: agent(tmp_path, code)})("a") == "no answer for 0.2 s"


def test_ssh_never_asks(monkeypatch):
    asked = []
    monkeypatch.setattr(reaching.subprocess, "run", lambda command, **_: asked.append(command) or Done)
    shell_reach({})("a")
    assert asked == [["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5", "a", "true"]]


class Done:
    returncode, stderr = 0, ""


def test_the_environment_of_this_process_counts(tmp_path, monkeypatch):
    monkeypatch.setitem(os.environ, reaching.AGENTS[0], agent(tmp_path, "exit(0)"))
    check_reach([Host("far", 1)], "nothing")
