"""``mpitrain emulate``: a command on emulated hosts, and what went over their links."""

import shlex
import sys
from pathlib import Path

from mpitrain.comm.signals import StopRequest
from mpitrain.emulate.emulation import Emulation
from mpitrain.errors import MpitrainError
from mpitrain.topology.load import load_topology


def main(topology: Path, command: list[str], *, output: Path | None, show: bool, stop: StopRequest) -> int:
    """Run the command; its exit code is ours."""
    try:
        with Emulation(load_topology(topology)) as emulation:
            if show:
                for name, value in emulation.environment().items():
                    print(f"{name}={shlex.quote(value)}")
                print(shlex.join(emulation.inside(command)), flush=True)
                return 0
            code = emulation.run(command, stop=stop)
        counts = emulation.counts()
    except MpitrainError as error:
        print(f"mpitrain: {error}", file=sys.stderr, flush=True)
        return int(error.exit_code)
    print("\n".join(counts.table()), flush=True)
    if output:
        output.write_bytes(counts.to_json() + b"\n")
    return code
