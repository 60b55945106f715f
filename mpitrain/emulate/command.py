"""``mpitrain emulate``: a command on emulated hosts, and what went over their links."""

import shlex
import shutil
import sys
from pathlib import Path

from mpitrain.comm.outputs import write_output
from mpitrain.comm.signals import StopRequest
from mpitrain.emulate.emulation import Emulation
from mpitrain.emulate.relay import addresses
from mpitrain.errors import ConfigError, MpitrainError
from mpitrain.topology import describe as tables
from mpitrain.topology.load import load_topology


def main(topology: Path, command: list[str], *, output: Path | None, show: bool, stop: StopRequest) -> int:
    """Run the command; its exit code is ours."""
    try:
        emulation = Emulation(load_topology(topology))
        if shutil.which(command[0]) is None:
            raise ConfigError(f"emulate: expected a command after --, got {command[0]!r}, which cannot be run")
        if show:
            emulation.check()
            print("\n".join([*describe(emulation), shlex.join(command)]))
            return 0
        with emulation:
            code = emulation.run(command, stop=stop, trains=False)
        counts = emulation.counts()
    except MpitrainError as error:
        print(f"mpitrain: {error}", file=sys.stderr, flush=True)
        return int(error.exit_code)
    # Standard output is the command's.
    print("\n".join(counts.table()), file=sys.stderr, flush=True)
    try:
        if output:
            write_output(output, counts.to_json().decode() + "\n", "--json")
    except ConfigError as error:
        print(f"mpitrain: {error}", file=sys.stderr, flush=True)
        return code or int(error.exit_code)
    return code


def describe(emulation: Emulation) -> list[str]:
    """List sites, links and paths, the hosts, and the variables around the command, as a script that sets these."""
    sites = emulation.topology.sites
    hosts = zip(sites, addresses(emulation.topology), strict=True)
    return [
        *(f"# {line}".rstrip() for line in tables.describe(emulation.topology)),
        "#",
        *(f"# {site.name}: {address}, {site.slots} slots" for site, address in hosts),
        *(f"export {name}={shlex.quote(value)}" for name, value in emulation.environment().items()),
    ]
