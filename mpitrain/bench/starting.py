"""A benchmark that starts its own ranks: the very same command under a launcher."""

import subprocess
import sys

from mpitrain.comm.launching import mpirun
from mpitrain.comm.runtime import ensure_home


def start_ranks(ranks: int) -> int:
    """Run this command on ranks; return the launcher's exit code."""
    ensure_home()
    launcher = mpirun(ranks, allow_root=True, oversubscribe=True)
    command = [*launcher, sys.executable, "-m", "mpitrain", *sys.argv[1:]]
    return subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode
