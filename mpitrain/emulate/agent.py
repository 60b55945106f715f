"""Runs a command on an emulated host; what a launcher calls in place of ssh.

``python -m mpitrain.emulate.agent FOLDER HOST COMMAND…`` has a shell read the words of COMMAND, as ssh does;
``… FOLDER --exec HOST COMMAND…`` takes them as they are. FOLDER is that of the emulation.
"""

import json
import os
import sys
from pathlib import Path

from mpitrain.emulate.kernel import enter
from mpitrain.errors import ExitCode

HOSTS = "hosts.json"
"""File in the folder of an emulation: the process that holds the namespaces, by host."""


def main(arguments: list[str]) -> int:
    """Become the command; return only where that fails."""
    folder, *rest = arguments
    plainly = rest[:1] == ["--exec"]
    while rest and rest[0].startswith("-"):  # options for ssh, such as -x
        rest = rest[1:]
    host, *words = rest or [""]
    try:
        hosts: dict[str, int] = json.loads((Path(folder) / HOSTS).read_text(encoding="utf-8"))
        if host not in hosts or not words:
            return _fail(f"expected a host ({', '.join(hosts)}) and a command, got {' '.join([host, *words])!r}")
        enter(hosts[host])
    except OSError as error:
        return _fail(f"the host {host} has gone: {error.strerror}")
    command = words if plainly else ["/bin/sh", "-c", " ".join(words)]
    try:
        os.execvp(command[0], command)
    except OSError as error:
        return _fail(f"{command[0]}: {error.strerror}")


def _fail(reason: str) -> int:
    print(f"mpitrain: emulate: {reason}", file=sys.stderr, flush=True)
    return int(ExitCode.MPI)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
