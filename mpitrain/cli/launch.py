"""``mpitrain launch``: the mpirun command for the installed MPI, and its supervisor."""

import shlex
import sys
from pathlib import Path

from mpitrain.comm.launching import mpirun
from mpitrain.comm.runtime import Position, ensure_home, fail
from mpitrain.comm.signals import StopRequest
from mpitrain.comm.supervising import supervise
from mpitrain.errors import LaunchError


def main(
    config: Path,
    ranks: int,
    overrides: list[str],
    *,
    resume: str | int | None,
    overwrite: bool,
    allow_root: bool,
    oversubscribe: bool,
    survive: bool,
    show: bool,
    stop: StopRequest,
) -> int:
    """Run the launcher of the ranks, whose exit code is that of the job."""
    try:
        launcher = mpirun(ranks, allow_root=allow_root, oversubscribe=oversubscribe, survive=survive)
    except LaunchError as error:
        fail(error, Position())
    flags = [part for item in overrides for part in ("--set", item)]
    flags += ["--progress", "bar" if sys.stdout.isatty() else "lines"]
    flags += [f"--resume={resume}"] * (resume is not None) + ["--overwrite"] * overwrite
    command = [*launcher, sys.executable, "-m", "mpitrain", "train", str(config), *flags]
    print(shlex.join(command), flush=True)
    if show:
        return 0
    ensure_home()
    return supervise(command, stop)
