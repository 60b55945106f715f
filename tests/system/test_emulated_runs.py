"""Real mpirun over emulated hosts: who runs where, and that a bad network changes no result."""

import json
import sys
from pathlib import Path

import pytest

from mpitrain.emulate.emulation import Emulation
from mpitrain.topology.load import load_topology
from tests.system.emulated import STAR, emulate, require_hosts, write_topology
from tests.system.helpers import summary, train, write_config

MPIRUN = str(Path(sys.executable).parent / "mpirun")
"""Plain, as a user would type it: what it needs is in the environment of a host."""

HELLO = """
import json, socket, sys
import numpy as np
from mpi4py import MPI
world = MPI.COMM_WORLD
mine, total = np.full(1000, world.rank + 1.0), np.empty(1000)
world.Allreduce(mine, total)
found = world.gather((world.rank, socket.gethostname(), set(total) == {10.0}))
if world.rank == 0:
    open(sys.argv[1], "w").write(json.dumps(found))
"""

PLACES = [[0, "cell0", True], [1, "cell1", True], [2, "cell1", True], [3, "core", True]]
"""In the order of the sites, each filled before the next."""


@pytest.fixture(scope="module", autouse=True)
def _possible(tmp_path_factory):
    require_hosts(tmp_path_factory.mktemp("possible"))


@pytest.mark.parametrize("rootless", [False, True])
def test_ranks_span_the_hosts(tmp_path, rootless):
    """Four ranks on three sites, and a sum over them; also in a user namespace."""
    topology = load_topology(write_topology(tmp_path, STAR))
    found = tmp_path / "a file"
    with Emulation(topology, rootless=rootless) as emulation:
        assert emulation.run([MPIRUN, "-n", "4", sys.executable, "-c", HELLO, str(found)]) == 0
    assert json.loads(found.read_text()) == PLACES
    ways = {(each.source, each.dest): each for each in emulation.counts().links}
    assert all(each.arrived_bytes > 8000 for each in ways.values())  # the sum alone sends more, from and to everyone
    assert sum(each.full_packets + each.lost_packets + each.cut_packets for each in ways.values()) == 0


FAULTY = """
jitter_ms = 2
loss_pct = 0.3
duplicate_pct = 1
reorder_pct = 2
outages_s = [[3, 3.5]]
"""


def test_a_bad_network_changes_no_result(tmp_path):
    """Weights after a training over links that lose, double and overtake packets are those without a network."""
    config, run = write_config(tmp_path, steps=3)
    assert train(4, config).returncode == 0
    plain = summary(run)
    topology = write_topology(tmp_path, STAR, more=FAULTY)
    done = emulate(
        topology,
        MPIRUN,
        "-n",
        "4",
        sys.executable,
        "-m",
        "mpitrain",
        "train",
        config,
        "--overwrite",
        options=["--json", tmp_path / "counts.json"],
    )
    assert done.returncode == 0, done.stderr
    assert summary(run)["param_sha256"] == plain["param_sha256"]
    assert summary(run)["replicas_identical"] is True
    links = json.loads((tmp_path / "counts.json").read_text())["links"]
    for fault in ("lost_packets", "duplicated_packets", "reordered_packets"):
        assert sum(each[fault] for each in links) > 0, fault
