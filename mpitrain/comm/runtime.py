"""MPI from start to end, in one place: late initialization, the launcher's hints, and the way out after an error."""

import faulthandler
import os
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from typing import NoReturn

import mpi4py

from mpitrain.comm.hints import REMEDIES, SIZE_HINTS, hinted_rank, hinted_size
from mpitrain.errors import ExitCode, LaunchError, MpitrainError, PeerLostError

mpi4py.rc(initialize=False, finalize=False)
from mpi4py import MPI  # noqa: E402  (the two options only work before this import)

THREAD_LEVELS = {
    MPI.THREAD_SINGLE: "SINGLE",
    MPI.THREAD_FUNNELED: "FUNNELED",
    MPI.THREAD_SERIALIZED: "SERIALIZED",
    MPI.THREAD_MULTIPLE: "MULTIPLE",
}
"""From the least to the most."""

NEEDED = MPI.THREAD_FUNNELED
"""One thread calls MPI, and others read data beside it."""

INIT_TIMEOUT_S = 300.0
"""Patience with MPI's own start, for which all ranks must have come and reach each other."""

ABORT_STEP_S, ABORT_SPAN_S = 0.5, 8.0
"""Seconds from one rank's abort to the next one's after a death that all were told of, and from the first to the last.

The first one ends the others before their turn.
"""


@dataclass
class Position:
    """Where the process stands, for the report of an unexpected error."""

    step: int | None = None


def library_name() -> str:
    """Name the linked MPI library, one line."""
    return str(MPI.Get_library_version()).split("\n")[0].strip("\0 ,").partition(", package")[0]


def start() -> MPI.Intracomm:
    """Initialize MPI and check that the launcher and the library mean the same job.

    Asks for the least thread level that is needed, whatever mpi4py's own variables say.

    Returns
    -------
    MPI.Intracomm
        The world. ``finish`` or ``abort`` must follow.

    Raises
    ------
    LaunchError
        The launcher started another number of processes than the library sees: they belong to different MPIs, and
        every process would train alone and write the same files. Or the library grants less than that level.
    """
    ensure_home()
    if not MPI.Is_initialized():
        # Nothing of Python runs while MPI starts, not even a timer: only this ends a process that waits in vain.
        faulthandler.dump_traceback_later(INIT_TIMEOUT_S, exit=True)
        MPI.Init_thread(NEEDED)
        faulthandler.cancel_dump_traceback_later()
    _check_threads(MPI.Query_thread())
    size = MPI.COMM_WORLD.Get_size()
    name, hinted = hinted_size() or ("", size)
    if hinted != size:
        raise LaunchError(
            f"launch: {SIZE_HINTS[name]} started {hinted} processes ({name}={hinted}), but {library_name()} sees "
            f"{size}; {REMEDIES.get(name, '')}start with the mpirun of that library, or unset {name}"
        )
    return MPI.COMM_WORLD


def _check_threads(granted: int) -> None:
    """Refuse a thread level that is too low, on all ranks alike; raises LaunchError."""
    if granted < NEEDED:
        error = LaunchError(
            f"launch: {library_name()} grants threads at level {THREAD_LEVELS[granted]}, but {THREAD_LEVELS[NEEDED]} "
            "is needed: data are read beside the thread that calls MPI; take an MPI that was built with threads"
        )
        error.agreed = True
        raise error


def ensure_home() -> None:
    """Give Open MPI a home where the user has none, as in some containers: it does not start without."""
    os.environ.setdefault("HOME", tempfile.gettempdir())


def finish() -> None:
    """End MPI in order. Collective."""
    if MPI.Is_initialized() and not MPI.Is_finalized():
        MPI.Finalize()


def fail(error: BaseException, position: Position) -> NoReturn:
    """Report an error once and end the process, and every other one of the job if they do not know of it.

    An agreed error is printed by one rank and all ranks leave in order. Any other is printed by the rank that met
    it (a traceback with rank and step if it is a bug), which then aborts the job.
    """
    code = int(error.exit_code) if isinstance(error, MpitrainError) else int(ExitCode.INTERNAL)
    running = MPI.Is_initialized() and not MPI.Is_finalized()
    alone = not running or MPI.COMM_WORLD.Get_size() == 1
    rank = hinted_rank() if alone else MPI.COMM_WORLD.Get_rank()
    if isinstance(error, MpitrainError) and (error.agreed or alone):
        if rank == error.teller:
            print(f"mpitrain: {error}", file=sys.stderr, flush=True)
        if error.bereaved:
            sys.stdout.flush()
            os._exit(code)
        finish()
        sys.exit(code)
    where = f"rank {rank}" + (f", step {position.step}" if position.step is not None else "")
    if isinstance(error, MpitrainError):
        text = f"mpitrain: {where}: {error}\n"
    else:
        text = f"mpitrain: {where}: unexpected error\n{''.join(traceback.format_exception(error))}"
    sys.stderr.write(text)
    sys.stderr.flush()
    if running and not alone:
        if isinstance(error, PeerLostError):
            # Told of one death, many ranks abort; at the same time, Open MPI 5's launcher waits for ever, or returns 0.
            time.sleep(error.grace_s + min(rank * ABORT_STEP_S, ABORT_SPAN_S) * error.bereaved)
        # If the launcher does not end us after the abort, the kernel does.
        faulthandler.dump_traceback_later(10, exit=True)
        MPI.COMM_WORLD.Abort(code)
    os._exit(code)
