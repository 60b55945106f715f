"""Hosts, interfaces, variables and threads, from the options of launch to the ranks."""

import json
import sys

import pytest

from mpitrain.comm.launching import launcher
from mpitrain.comm.network import Wishes
from mpitrain.comm.placing import Host, Placement
from mpitrain.errors import ExitCode
from tests.system.helpers import ROOT, drive, environment, execute, summary, train, write_config

STAR = str(ROOT / "jobs" / "topologies" / "star.toml")
FLAGS = ("--allow-root", "--oversubscribe")

CASES = {
    "interface that does not exist": (
        ["--interface", "nope0", "-n", "3"],
        ["nope0", "this machine has", "lo 127.0.0.1"],
    ),
    "more ranks than slots of a file": (["--hostfile", "{hosts}", "-n", "4"], ["4 ranks", "(3 < 4)", "a 2, b 1"]),
    "more ranks than slots of sites": (["--topology", STAR, "-n", "6"], ["star.toml", "(5 < 6)", "cell0 1"]),
    "grid of four on three": (
        ["-n", "3", "--set", "parallel.dp=2", "--set", "parallel.pp=2"],
        ["dp*pp*tp = 2*2*1 = 4, but 3 ranks run"],
    ),
    "grid and servers": (
        ["-n", "4", "--set", "parallel.dp=4", "--set", "exchange.when=server"],
        ["(4 + 1)*1*1, but 4 ranks run; start 5 ranks"],
    ),
    "no number of ranks": ([], ["how many ranks", "-n"]),
    "emulation of nothing": (["--emulate", "-n", "2"], ["--emulate", "--topology FILE"]),
    "no such host file": (["--hostfile", "none.txt"], ["none.txt", "No such file"]),
    "a value that is wrong": (["-n", "2", "--set", "train.steps=none"], ["train.steps", "none"]),
    "a variable without a name": (["-n", "2", "--env", "=1"], ["--env", "NAME=VALUE"]),
}
"""Refused before anything starts: M19, S05, S12."""


@pytest.fixture(scope="module")
def refusals(tmp_path_factory):
    folder = tmp_path_factory.mktemp("refused")
    config, run = write_config(folder)
    (folder / "hosts").write_text("# ours\na slots=1\n\nb:1\na slots=1\n")
    lines = [
        ["launch", str(config), *FLAGS, *(word.format(hosts=folder / "hosts") for word in options)]
        for options, _ in CASES.values()
    ]
    found = [reports[0] for reports in drive(folder, lines, 1)]
    assert not run.exists()
    return dict(zip(CASES, found, strict=True))


@pytest.mark.parametrize("case", CASES)
def test_refused_before_anything_starts(refusals, case):
    found = refusals[case]
    assert found["code"] == ExitCode.CONFIG, found
    assert found["stderr"].startswith("mpitrain: ")
    assert len(found["stderr"].splitlines()) == 1
    for word in CASES[case][1]:
        assert word in found["stderr"]
    assert not found["stdout"]


def test_sites_that_nobody_reaches(tmp_path):
    """The remote shell is asked first: mpirun would wait for it, or for ever."""
    config, run = write_config(tmp_path)
    command = [sys.executable, "-m", "mpitrain", "launch", config, "--topology", STAR, *FLAGS]
    env = environment(PRTE_MCA_plm_ssh_agent="false")
    result = execute(command, cwd=tmp_path, env=env)
    assert result.returncode == ExitCode.MPI, result.stderr
    assert "no remote shell reaches cell0 (false ended with 1), cell1" in result.stderr
    assert 'set host = "ADDRESS" for these sites' in result.stderr
    assert "--emulate" in result.stderr
    assert len(result.stderr.splitlines()) == 1
    shown = execute([*command, "--print"], cwd=tmp_path, env=env)
    assert shown.returncode == 0, shown.stderr
    assert "--host cell0:1,cell1:1,cell2:1,cell3:1,core:1" in shown.stdout
    assert "core       1  4" in shown.stdout
    assert not run.exists()


def test_hosts_of_a_file_and_an_interface(tmp_path):
    """M19, S12: ``lo`` on one host with three ranks trains; the table says where they are."""
    config, run = write_config(tmp_path, steps=2)
    hosts = tmp_path / "my hosts"
    hosts.write_text("localhost slots=2 # this one\n\nlocalhost slots=1\n")
    command = [sys.executable, "-m", "mpitrain", "launch", config, "--hostfile", hosts, "--interface", "lo", *FLAGS]
    result = execute(command, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "localhost      3  0-2" in result.stdout
    assert "--host localhost:3" in result.stdout
    assert "--mca btl_tcp_if_include lo" in result.stdout
    assert summary(run)["ranks"] == 3


def test_variables_arrive_as_they_are(tmp_path):
    """S07: the same text on all ranks, from a script in a folder with a space."""
    folder = tmp_path / "my folder"
    folder.mkdir()
    script = folder / "print it.py"
    script.write_text("import json, os\nprint(json.dumps([os.environ['FOO'], os.environ['GIVEN'], __file__]))\n")
    placement = Placement((Host("localhost", 4),), "here")
    wishes = Wishes(
        allow_root=True, oversubscribe=True, placement=placement, variables=("FOO=a b$c", 'GIVEN=\'x "y" `z`;')
    )
    words, _ = launcher(4, wishes)
    result = execute([*words, sys.executable, script], cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert lines == [["a b$c", '\'x "y" `z`;', str(script)]] * 4


@pytest.mark.parametrize(
    ("level", "exchange"), [("single", "exchange.collective=ring"), ("serialized", "exchange.when=server")]
)
def test_the_level_that_mpi4py_is_told_changes_nothing(tmp_path, level, exchange):
    """M13: the least that is needed is asked for anyway."""
    config, run = write_config(tmp_path, steps=2)
    result = train(3, config, "--set", exchange, env={"MPI4PY_RC_THREAD_LEVEL": level})
    assert result.returncode == 0, result.stderr
    assert "thread" not in result.stderr
    assert summary(run)["replicas_identical"] is True


def test_probe_writes_a_topology_that_launch_takes(tmp_path):
    command = [sys.executable, "-m", "mpitrain"]
    probe = [*command, "probe", "-n", 2, "--seconds", 0.1, "--out", "my links.toml", "--json", "ways.json"]
    result = execute(probe, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "all ranks are on one host" in result.stdout
    assert [set(record) for record in json.loads((tmp_path / "ways.json").read_text())] == [
        {"source", "dest", "alpha_ms", "mbps", "sent_bytes"}
    ] * 2
    config, _ = write_config(tmp_path)
    shown = execute([*command, "launch", config, "--topology", "my links.toml", *FLAGS, "--print"], cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert "-n 2" in shown.stdout
