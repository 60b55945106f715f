"""``mpitrain doctor``: what is wrong with this machine, before a job finds out."""

import importlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from mpitrain.cli.process import Answer, ask
from mpitrain.cli.software import (
    INSTALL,
    cache_finding,
    cache_folder,
    import_packages,
    is_warm,
    launcher_findings,
    mpi_facts,
    package_findings,
    variable_findings,
)
from mpitrain.comm.family import library
from mpitrain.comm.folders import run_folder_findings
from mpitrain.comm.hints import hinted_rank, hinted_size
from mpitrain.comm.interfaces import interface_findings, list_interfaces
from mpitrain.comm.machine import (
    Finding,
    Level,
    core_findings,
    limit_findings,
    memory_findings,
    shared_memory_findings,
)
from mpitrain.comm.network import read_network
from mpitrain.comm.threads import blas_threads
from mpitrain.comm.transport import kernel_findings, read_kernel, transport
from mpitrain.config.load import Resolved, load_config
from mpitrain.config.schema import Config, ParallelConfig
from mpitrain.config.validate import unread_keys
from mpitrain.errors import ConfigError, ExitCode, LaunchError, MpitrainError, count
from mpitrain.topology.describe import bdp_bytes

LAUNCHING, RUNTIME = "mpitrain.comm.launching", "mpitrain.comm.runtime"
"""Load MPI, so they are imported once another process has shown that it can be."""

TRIAL_RANKS = 2
TRIAL_S = 12.0
COMPILE_S = 60.0
"""More patience for a machine that compiles its kernels for the first time."""


def main(config: Path | None, ranks: int | None, topology: Path | None = None) -> int:
    """Print a line for each finding; exit 0 where a run on two ranks worked and nothing failed."""
    if (hinted_size() or ("", 1))[1] > 1:
        if hinted_rank() == 0:
            print("mpitrain: doctor: start it without a launcher; it starts its own ranks", file=sys.stderr)
        return ExitCode.MPI
    levels = []
    for finding in examine(config, ranks, topology=topology):
        print(f"{finding.level:<4}  {finding}", flush=True)
        levels.append(finding.level)
    failures, warnings = levels.count(Level.FAIL), levels.count(Level.WARN)
    print(f"doctor: {count(failures, 'failure')}, {count(warnings, 'warning')}")
    return ExitCode.MPI if failures else ExitCode.DONE


def examine(path: Path | None, ranks: int | None, *, topology: Path | None = None) -> Iterator[Finding]:
    """Yield all findings, the run that is tried last."""
    config, found = read_config(path)
    yield from found
    cores = os.sched_getaffinity(0)
    ranks = ranks or ranks_of(config.parallel, len(cores))
    imports = import_packages()
    folder = cache_folder(imports)
    yield from package_findings(imports)
    yield cache_finding(folder)
    loaded, facts = mpi_facts()
    yield loaded
    yield from core_findings(ranks, cores, threads=blas_threads())
    yield from memory_findings(ranks)
    yield from limit_findings(ranks)
    yield from shared_memory_findings(ranks)
    yield from interface_findings(list_interfaces())
    yield from kernel_findings(read_kernel())
    if topology:
        yield from network_findings(topology, ranks, facts.get("library", ""))
    yield from run_folder_findings(Path(config.run.folder), named=path is not None, shared=config.run.shared_fs)
    yield from variable_findings(os.environ)
    yield from _launch_findings(ranks, facts, TRIAL_S if is_warm(folder) else TRIAL_S + COMPILE_S)


def ranks_of(parallel: ParallelConfig, cores: int) -> int:
    """Guess how many ranks are meant: those of the grid, or one a core where the data axis takes what there is."""
    replica = parallel.pp * parallel.tp
    return parallel.dp * replica if parallel.dp else max(TRIAL_RANKS, cores, replica)


def read_config(path: Path | None) -> tuple[Config, list[Finding]]:
    """Read the configuration; the defaults stand in for one that is wrong or was not given."""
    if path is None:
        return Config(), []
    try:
        resolved = load_config(path)
    except ConfigError as error:
        return Config(), [Finding(Level.FAIL, str(error))]
    found = [Finding(Level.WARN, warning, "remove it") for warning in resolved.warnings()]
    return resolved.config, [Finding(Level.OK, f"{path} is a valid configuration"), *found, *_data_findings(resolved)]


def network_findings(path: Path, ranks: int, text: str) -> Iterator[Finding]:
    """Judge this machine against the links of a topology, and try its hosts."""
    try:
        network = read_network(path)
        ranks = network.ranks(min(ranks, network.slots))
        bdp = bdp_bytes(network.topology, ranks) if network.topology else 0
        linked = library(text)
        notes = transport(linked.family, linked.version, bdp).notes
        yield Finding(Level.OK, f"{path} has {count(network.slots, 'slot')}; {bdp:,} bytes are under way on its links")
        yield from (Finding(Level.WARN, note) for note in notes)
        network.check_reach(ranks)
        yield Finding(Level.OK, "a remote shell reaches every host")
    except MpitrainError as error:
        yield Finding(Level.FAIL, str(error))


def _data_findings(resolved: Resolved) -> list[Finding]:
    """Look for the file of the data."""
    path = resolved.config.data.path
    if not path or "data.path" in unread_keys(resolved.config) or Path(path).expanduser().is_file():
        return []
    return [Finding(Level.FAIL, f'data.path: there is no file "{path}" here', "set data.path")]


def _launch_findings(ranks: int, facts: dict[str, str], timeout_s: float) -> Iterator[Finding]:
    """Judge the launcher, and let it start the trial."""
    if not facts:
        yield Finding(Level.FAIL, f"no run on {TRIAL_RANKS} ranks was tried, since MPI cannot be loaded", INSTALL)
        return
    importlib.import_module(RUNTIME).ensure_home()
    mpirun = importlib.import_module(LAUNCHING).mpirun
    try:
        launcher = mpirun(TRIAL_RANKS, allow_root=True, oversubscribe=True)
    except LaunchError as error:
        yield Finding(Level.FAIL, str(error))
        return
    yield from launcher_findings(facts["library"], launcher[0])
    try:
        mpirun(ranks, allow_root=False, oversubscribe=False)
    except LaunchError as error:
        yield Finding(Level.WARN, str(error))
    answer = ask([*launcher, sys.executable, "-m", "mpitrain.cli.trial"], timeout_s=timeout_s)
    yield from trial_findings(answer)


def trial_findings(answer: Answer) -> list[Finding]:
    """Judge the run that was tried."""
    lines = [line for line in answer.output.splitlines() if line.startswith('{"ranks"')]
    where = f"a run on {TRIAL_RANKS} ranks"
    if answer.code != 0 or len(lines) != 1:
        what = f"{where} {answer.ended}: {answer.last_lines()}"
        return [Finding(Level.FAIL, what, "put right what it says")]
    result = json.loads(lines[0])
    if result["ranks"] != TRIAL_RANKS or not result["same"] or not result["error"] <= 1:
        return [Finding(Level.FAIL, f"{where} summed wrongly: {lines[0]}", "the processors or libraries differ")]
    level = result["thread_level"]
    thread = Finding(Level.OK, f"MPI grants threads at level {level}; FUNNELED is needed")
    if level == "SINGLE":
        thread = Finding(
            Level.FAIL, f"MPI grants threads at level {level}", "FUNNELED is needed: build it with threads"
        )
    failures = Finding(Level.OK, "the loss of a rank ends the job (the library has no ULFM): go on with --resume")
    if result["fault_tolerance"]:
        failures = Finding(Level.OK, "the library can outlive the loss of a rank (ULFM; Open MPI: --with-ft ulfm)")
    sent = f"sent {result['sent_bytes']:,} bytes of int8 by direct exchange and summed them right"
    return [thread, failures, Finding(Level.OK, f"{where} {sent}")]
