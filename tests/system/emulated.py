"""Emulated hosts for tests: small topologies, commands inside, and what is left of them in the kernel."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mpitrain.emulate.emulation import Emulation
from mpitrain.errors import LaunchError
from mpitrain.topology.load import load_topology
from tests.system.helpers import environment, execute

EMULATE = [sys.executable, "-m", "mpitrain", "emulate"]

PAIR = """
[[site]]
name = "one"
[[site]]
name = "two"
[[link]]
between = ["one", "two"]
rate_mbps = 80
delay_ms = 5
"""

STAR = """
[defaults]
rate_mbps = 400
delay_ms = 1
{more}
[[site]]
name = "cell0"
[[site]]
name = "cell1"
slots = 2
[[site]]
name = "hub"
slots = 0
[[site]]
name = "core"
[[link]]
between = ["cell0", "hub"]
[[link]]
between = ["cell1", "hub"]
[[link]]
between = ["core", "hub"]
"""
"""Four ranks on three sites, and one that only forwards."""


def require_hosts(folder):
    """Skip, or fail in CI, where no hosts can be had."""
    try:
        with Emulation(load_topology(write_topology(folder, PAIR))):
            return
    except LaunchError as error:
        if os.environ.get("CI"):
            pytest.fail(str(error))
        pytest.skip(str(error))


def write_topology(folder, text, name="topology.toml", **values):
    path = folder / name
    path.write_text(text.format(**({"more": ""} | values)) if values or "{" in text else text)
    return path


def emulate(topology, *command, options=(), **how):
    """Run a command on the hosts of a topology."""
    return execute([*EMULATE, topology, *options, "--", *command], cwd=topology.parent, **how)


def start(topology, *command, **variables):
    """Start a command on the hosts of a topology."""
    return subprocess.Popen(
        [str(part) for part in (*EMULATE, topology, "--", *command)],
        cwd=topology.parent,
        env=environment(**variables),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def children(process):
    text = Path(f"/proc/{process}/task/{process}/children").read_text()
    return [int(word) for word in text.split()]


def network_namespaces():
    """List all network namespaces in which a process lives."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            found.add(os.readlink(folder / "ns/net"))
        except OSError:
            continue
    return found
