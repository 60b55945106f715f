"""Commands for Open MPI 4, 5 and MPICH, rendered from what these libraries say of themselves; none is started."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from mpitrain.cli import launch
from mpitrain.comm import launching, network
from mpitrain.comm.family import library
from mpitrain.comm.hints import allocated_tasks
from mpitrain.comm.interfaces import Interface
from mpitrain.comm.launching import check_interface, mpirun, render
from mpitrain.comm.network import Network, Wishes, read_network
from mpitrain.comm.placing import Host, Placement
from mpitrain.errors import ConfigError, ExitCode, LaunchError

FIVE, FOUR, MPICH = "Open MPI v5.0.11", "Open MPI v4.1.4", "MPICH Version:      5.0.2"
LIBRARIES = pytest.mark.parametrize("text", [FIVE, FOUR, MPICH])
STAR = Path(__file__).resolve().parents[2] / "jobs" / "topologies" / "star.toml"
CELLS = Placement((Host("10.0.0.1", 1, "cell0"), Host("10.0.0.2", 2, "cell1"), Host("core", 1)), "star.toml")
FAIR = Wishes(allow_root=True, oversubscribe=True)


@pytest.fixture
def machine(monkeypatch):
    """Two cores, and an ordinary user."""
    monkeypatch.setattr(launching, "physical_cores", lambda _: 2)
    monkeypatch.setattr(launching.os, "geteuid", lambda: 1000)
    return monkeypatch


def words(text, ranks=4, environment=(), **wishes):
    wishes = {"oversubscribe": True} | wishes
    return render("mpi", library(text), ranks, Wishes(**wishes), dict(environment))[0]


def has(command, *run):
    """Tell whether words follow each other in a command."""
    return any(command[at : at + len(run)] == list(run) for at in range(len(command)))


def test_one_host_with_enough_cores(machine):
    assert words(FIVE, 2) == ["mpi", "-n", "2", "--mca", "pml", "ob1", "--mca", "btl", "self,sm,tcp"]
    assert words(FOUR, 2) == ["mpi", "-n", "2", "--mca", "pml", "ob1", "--mca", "btl", "self,vader,tcp"]
    assert words(MPICH, 2) == ["mpi", "-n", "2"]


def test_crowded_ranks_leave_their_cores(machine):
    assert has(words(FIVE), "--oversubscribe", "--bind-to", "none")
    assert has(words(FOUR), "--mca", "mpi_yield_when_idle", "1")
    assert has(words(MPICH), "-genv", "MPIR_CVAR_POLLS_BEFORE_YIELD", "1")


def test_the_flags_to_add_are_told(machine):
    """M20."""
    with pytest.raises(LaunchError, match="4 ranks on 2 cores need more than Open MPI gives by itself; add --oversub"):
        words(FIVE, oversubscribe=False)
    machine.setattr(launching.os, "geteuid", lambda: 0)
    with pytest.raises(LaunchError, match="4 ranks on 2 cores as root .* add --allow-root --oversubscribe to launch"):
        words(FOUR, oversubscribe=False)
    with pytest.raises(LaunchError, match="add --allow-root to launch"):
        words(FIVE, 2, oversubscribe=False)
    assert "--allow-run-as-root" in words(FIVE, allow_root=True)
    assert words(MPICH, oversubscribe=False)[:3] == ["mpi", "-n", "4"]


def test_hosts_are_filled_in_order(machine):
    for text in (FIVE, FOUR):
        command = words(text, placement=CELLS, oversubscribe=False)
        assert has(command, "--host", "10.0.0.1:1,10.0.0.2:2,core:1", "--map-by", "slot", "--bind-to", "none")
    assert has(words(MPICH, 3, placement=CELLS), "-hosts", "10.0.0.1:1,10.0.0.2:2")


@LIBRARIES
def test_more_ranks_than_slots(machine, text):
    with pytest.raises(ConfigError, match=r"star.toml: 5 ranks, but 4 slots \(4 < 5\)"):
        words(text, 5, placement=CELLS)


def test_slots_that_are_written_down_may_crowd_this_host(machine):
    """Its ranks yield, and the others' do, too."""
    here = Placement((Host("localhost", 3), Host("far", 1)), "hosts")
    assert has(words(FIVE, placement=here, oversubscribe=False), "--mca", "mpi_yield_when_idle", "1")
    assert not has(words(FIVE, 1, placement=here, oversubscribe=False), "--mca", "mpi_yield_when_idle", "1")


def test_made_up_hosts_share_the_cores(machine):
    command = words(FIVE, placement=CELLS, crowded=True, oversubscribe=False)
    assert has(command, "--mca", "mpi_yield_when_idle", "1")
    assert has(command, "--host", "10.0.0.1:1,10.0.0.2:2,core:1")


@LIBRARIES
def test_the_interface_has_a_name_in_every_family(machine, text):
    """M19."""
    command = words(text, interface="eth7")
    wanted = {
        FIVE: [("--mca", "btl_tcp_if_include", "eth7"), ("--prtemca", "prte_if_include", "eth7")],
        FOUR: [("--mca", "btl_tcp_if_include", "eth7"), ("--mca", "oob_tcp_if_include", "eth7")],
        MPICH: [("-iface", "eth7"), ("-genv", "FI_TCP_IFACE", "eth7")],
    }
    assert all(has(command, *run) for run in wanted[text])


def test_the_loopback_interface(machine):
    """Open MPI's launcher refuses it for itself; and it leads nowhere else."""
    for text in (FIVE, FOUR):
        command = words(text, interface="lo")
        assert has(command, "--mca", "btl_tcp_if_include", "lo")
        assert not {"prte_if_include", "oob_tcp_if_include"} & set(command)
        with pytest.raises(ConfigError, match="--interface lo leads to no other host"):
            words(text, placement=CELLS, interface="lo")
    assert has(words(MPICH, placement=Placement((Host("localhost", 4),), "here"), interface="lo"), "-iface", "lo")


def test_interfaces_that_do_not_exist():
    """M19: refused with those that do."""
    present = [Interface("lo", "127.0.0.1", up=True, loopback=True), Interface("eth1", "", up=False)]
    with pytest.raises(ConfigError) as refused:
        check_interface("nope0", present, {})
    assert str(refused.value) == (
        "launch: --interface nope0: this machine has lo 127.0.0.1, eth1 no IPv4 address (down); name one of them, or "
        "leave it out"
    )
    for name in ("", "lo", "10.0.0.0/8"):
        check_interface(name, present, {"OMPI_MCA_btl_tcp_if_exclude": name})


@pytest.mark.parametrize("variable", ["OMPI_MCA_btl_tcp_if_include", "OMPI_MCA_btl_tcp_if_exclude"])
def test_an_interface_against_the_environment(variable):
    present = [Interface("lo", "127.0.0.1", up=True)]
    with pytest.raises(ConfigError, match=f"--interface lo contradicts {variable}=eth1; unset it"):
        check_interface("lo", present, {variable: "eth1"})


def test_survivors_need_open_mpi_5(machine):
    assert has(words(FIVE, survive=True), "--with-ft", "ulfm")
    with pytest.raises(LaunchError, match="needs Open MPI 5, but Open MPI v4"):
        words(FOUR, survive=True)
    with pytest.raises(LaunchError, match="needs Open MPI, but MPICH"):
        words(MPICH, survive=True)


def test_variables_reach_other_hosts(machine):
    """S07: Open MPI forwards only what it is told to, MPICH everything."""
    environment = {"PYTHONPATH": "/a b", "OMP_NUM_THREADS": "1", "HOME": "/root", "PATH": "/bin", "MPITRAIN_FAULT": "x"}
    for text in (FIVE, FOUR):
        command = words(text, placement=CELLS, environment=environment)
        assert has(command, "-x", "MPITRAIN_FAULT", "-x", "OMP_NUM_THREADS", "-x", "PYTHONPATH")
        assert "HOME" not in command
        assert "PATH" not in command
        once = words(text, placement=CELLS, environment=environment, variables=("PYTHONPATH=/c",))
        assert "PYTHONPATH" not in once
        assert has(once, "-x", "PYTHONPATH=/c")
        assert "-x" not in words(text, environment=environment)
    assert "-genv" not in words(MPICH, 2, placement=CELLS, environment=environment)


@LIBRARIES
def test_commands_survive_the_shell(machine, text):
    """S07: spaces, quotes and dollars."""
    machine.setenv("GREETING", "hello")
    command = words(text, variables=("FOO=a b$c", "EMPTY=", "GREETING", "QUOTED='\"`x`"))
    option = "-genv" if text == MPICH else "-x"
    given = command[command.index(option) :]
    expected = {
        MPICH: ["FOO", "a b$c", "EMPTY", "", "QUOTED", "'\"`x`"],
    }.get(text, ["FOO=a b$c", "EMPTY=", "GREETING", "QUOTED='\"`x`"])
    assert [word for word in given if word != option][-len(expected) :] == expected
    line = shlex.join([*command, "/my files/python", "it's.toml"])
    assert subprocess.run(["bash", "-n", "-c", line], check=False).returncode == 0
    printer = "import json, sys; print(json.dumps(sys.argv[1:]))"
    echoed = subprocess.run(
        ["bash", "-c", shlex.join([sys.executable, "-c", printer, "--"]) + " " + line],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(echoed.stdout) == ["--", *command, "/my files/python", "it's.toml"]


@pytest.mark.parametrize("item", ["", "=x", "1A=x", "A-B=x", "NOT_SET_ANYWHERE"])
def test_wrong_variables(machine, item):
    with pytest.raises(ConfigError, match="--env: expected NAME=VALUE"):
        words(FIVE, variables=(item,))


def test_what_the_user_has_set_is_not_on_the_command_line(machine):
    environment = {"OMPI_MCA_pml": "ucx", "OMPI_MCA_btl_tcp_eager_limit": "7"}
    command, settings = render("mpi", library(FIVE), 2, Wishes(bdp_bytes=250_000), environment)
    assert "pml" not in command
    assert "btl_tcp_eager_limit" not in command
    assert settings.kept == ("OMPI_MCA_pml=ucx", "OMPI_MCA_btl_tcp_eager_limit=7")
    assert has(command, "--mca", "btl_tcp_rndv_eager_limit", "2097152")
    assert launch.remarks(settings)[0] == "# kept: OMPI_MCA_pml=ucx"


def test_the_installed_library(machine):
    command = mpirun(2, allow_root=False, oversubscribe=False)
    assert os.access(command[0], os.X_OK)
    assert command[1:3] == ["-n", "2"]


def test_no_launcher(machine):
    machine.setattr(launching.sys, "executable", "/nowhere/python")
    machine.setattr(launching.shutil, "which", lambda _: None)
    with pytest.raises(LaunchError, match="pip install"):
        mpirun(2, allow_root=False, oversubscribe=False)


# How many ranks.


@pytest.fixture
def bare(monkeypatch):
    for name in ("SLURM_NTASKS", "SLURM_NNODES", "SLURM_NTASKS_PER_NODE"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_the_number_of_ranks(bare):
    placed = Network(placement=CELLS)
    assert (placed.ranks(None), placed.ranks(3), Network().ranks(7)) == (4, 3, 7)
    with pytest.raises(ConfigError, match=r"\(4 < 5\)"):
        placed.ranks(5)
    with pytest.raises(ConfigError, match="how many ranks"):
        Network().ranks(None)


def test_the_number_that_slurm_has_granted(bare):
    """S05: without SLURM_NTASKS it follows from nodes and tasks a node."""
    bare.setenv("SLURM_NNODES", "2")
    assert allocated_tasks() is None
    bare.setenv("SLURM_NTASKS_PER_NODE", "2")
    assert allocated_tasks() == ("SLURM_NNODES * SLURM_NTASKS_PER_NODE", 4)
    assert Network().ranks(None) == 4
    bare.setenv("SLURM_NTASKS", "3")
    assert Network().ranks(None) == 3
    bare.setenv("SLURM_NTASKS", "0")
    with pytest.raises(ConfigError, match="how many ranks"):
        Network().ranks(None)


def test_ranks_against_the_grid(tmp_path):
    """S05: the product and its factors, servers included."""
    config = tmp_path / "run.toml"
    config.write_text("[parallel]\ndp = 2\npp = 2\n")
    with pytest.raises(ConfigError, match=r"dp\*pp\*tp = 2\*2\*1 = 4, but 3 ranks run"):
        launch.fit_grid(config, [], 3)
    assert launch.fit_grid(config, [], 4).size == 4
    served = launch.fit_grid(config, ["exchange.when=server", "parallel.pp=1"], 3)
    assert (served.workers, served.servers) == (2, 1)


# What options mean together.


def test_options_that_exclude_each_other(tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text("a\n")
    for options, complaint in (
        ({"emulate": True}, "add --topology FILE"),
        ({"topology": hosts, "hostfile": hosts}, "both name hosts"),
        ({"topology": hosts, "emulate": True, "interface": "lo"}, "emulated hosts have one interface"),
    ):
        with pytest.raises(ConfigError, match=complaint) as refused:
            read_network(**options)
        assert str(refused.value).startswith("hosts: "), "other commands read it, too"
        assert refused.value.exit_code == ExitCode.CONFIG
    assert read_network() == Network()
    assert read_network(hostfile=hosts, interface="lo").interface == "lo"


def test_a_topology_gives_hosts_and_the_sizes_of_its_links():
    star = read_network(STAR)
    wishes = star.wishes(4, allow_root=False, oversubscribe=False, survive=True)
    assert wishes == Wishes(bdp_bytes=250_000, placement=star.placement, survive=True)
    assert [host.name for host in star.placement.hosts] == ["cell0", "cell1", "cell2", "cell3", "core"]
    made_up = read_network(STAR, emulate=True)
    assert made_up.wishes(4, allow_root=False, oversubscribe=False) == Wishes(
        allow_root=True, bdp_bytes=250_000, placement=star.placement, crowded=True
    )


def test_sites_that_nobody_reaches(monkeypatch):
    remedies = []
    monkeypatch.setattr(network, "check_reach", lambda hosts, remedy: remedies.append((hosts, remedy)))
    star = read_network(STAR)
    star.check_reach(2)
    read_network(STAR, emulate=True).check_reach(2)
    Network().check_reach(2)
    ((hosts, remedy),) = remedies
    assert [host.name for host in hosts] == ["cell0", "cell1"]
    assert f'set host = "ADDRESS" for these sites in {STAR}, or add --emulate' in remedy
