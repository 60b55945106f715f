"""``mpitrain launch``: the mpirun command for the installed MPI and the hosts, and its supervisor."""

import sys
from pathlib import Path

from mpitrain.cli.starting import run, shown
from mpitrain.comm.launching import launcher
from mpitrain.comm.network import Network, read_network
from mpitrain.comm.runtime import Position, fail
from mpitrain.comm.signals import StopRequest
from mpitrain.comm.transport import Settings
from mpitrain.config.load import load_config
from mpitrain.errors import MpitrainError
from mpitrain.partition import GridShape
from mpitrain.topology.graph import ring_note


def main(
    config: Path,
    ranks: int | None,
    overrides: list[str],
    *,
    resume: str | int | None,
    overwrite: bool,
    allow_root: bool,
    oversubscribe: bool,
    survive: bool,
    topology: Path | None,
    emulate: bool,
    hostfile: Path | None,
    interface: str,
    variables: list[str],
    show: bool,
    stop: StopRequest,
) -> int:
    """Run the launcher of the ranks, whose exit code is that of the job."""
    try:
        network = read_network(topology, hostfile, emulate=emulate, interface=interface)
        ranks = network.ranks(ranks)
        shape = fit_grid(config, overrides, ranks)
        command, settings = launcher(
            ranks,
            network.wishes(
                ranks,
                allow_root=allow_root,
                oversubscribe=oversubscribe,
                survive=survive,
                variables=tuple(variables),
            ),
        )
        if not show:
            network.check_reach(ranks)
    except MpitrainError as error:
        fail(error, Position())
    flags = [part for item in overrides for part in ("--set", item)]
    flags += ["--progress", "lines"]  # launchers hold back what is not yet a line, and a bar never is
    flags += [f"--resume={resume}"] * (resume is not None) + ["--overwrite"] * overwrite
    command += [sys.executable, "-m", "mpitrain", "train", str(config), *flags]
    if network.placement:
        table = network.placement.table(ranks, shape.size - shape.workers)
        print("\n".join([*table, *ring_remarks(config, overrides, network, ranks)]))
    print(shown(command, network), flush=True)
    if show:
        print("\n".join(remarks(settings)))
        return 0
    try:
        return run(command, network, stop, survive=survive)
    except MpitrainError as error:
        fail(error, Position())


def fit_grid(config: Path, overrides: list[str], ranks: int) -> GridShape:
    """Check the process grid and the servers against the ranks; raises ConfigError as training itself would."""
    resolved = load_config(config, overrides).config
    parallel = resolved.parallel
    return GridShape.fit(ranks, parallel.dp, parallel.pp, parallel.tp, resolved.exchange.servers or 0)


def ring_remarks(config: Path, overrides: list[str], network: Network, ranks: int) -> list[str]:
    """Say where another order of the sites would be nearer around the ring."""
    ring = load_config(config, overrides).config.exchange.collective == "ring"
    note = ring_note(network.topology, ranks) if network.topology and ring else ""
    return [f"# note: {note}"] * bool(note)


def remarks(settings: Settings) -> list[str]:
    """Say what was left as the user has set it, and what the kernel does not allow: comments of a shell."""
    return [f"# kept: {item}" for item in settings.kept] + [f"# note: {note}" for note in settings.notes]
