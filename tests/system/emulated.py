"""Emulated hosts for tests: small topologies, commands inside, and what is left of them in the kernel."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from mpitrain.emulate.emulation import PREFIX, Emulation
from mpitrain.emulate.processes import make_mark, members
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


class Ended(subprocess.Popen):
    """A process that ends with the test, whatever becomes of it."""

    def __exit__(self, *error):
        self.kill()
        super().__exit__(*error)


def start(topology, *command, **variables):
    """Start a command on the hosts of a topology."""
    return Ended(
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
    return {int(word): Path(f"/proc/{word}/comm").read_text().strip() for word in text.split()}


class Traces:
    """What an emulation under way must not leave: processes, namespaces (held, so that none is mistaken), files."""

    def __init__(self, emulator):
        self.mark = make_mark(emulator)
        (self.warden,) = (each for each, name in children(emulator).items() if name == "mt-warden")
        self.parts = children(self.warden)
        hosts = [each for each, name in self.parts.items() if name != "mt-relay"]
        self._held = [os.open(f"/proc/{each}/ns/net", os.O_RDONLY) for each in hosts]

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for descriptor in self._held:
            os.close(descriptor)

    def left(self):
        """List what there is still."""
        spaces = {(status.st_dev, status.st_ino) for status in map(os.fstat, self._held)}
        folders = Path(tempfile.gettempdir()).glob(f"{PREFIX}{self.mark.replace(':', '-')}.*")
        parts = [each for each in (self.warden, *self.parts) if alive(each)]
        return [*members(self.mark, spaces), *parts, *folders]


def alive(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
