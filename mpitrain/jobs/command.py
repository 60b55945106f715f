"""``mpitrain job``: writes the script of a job."""

import contextlib
import os
import shlex
import sys
from pathlib import Path

from mpitrain.comm.family import library
from mpitrain.comm.launching import find_launcher
from mpitrain.comm.runtime import Position, fail, library_name
from mpitrain.errors import ConfigError, MpitrainError
from mpitrain.jobs.job import Job
from mpitrain.jobs.wishes import Scheduler, Wishes
from mpitrain.jobs.writer import Origin, write_job

MODE = 0o755


def main(
    config: Path,
    overrides: list[str],
    wishes: Wishes,
    *,
    overwrite: bool,
) -> int:
    """Write the script to a file or to the output; notes and what comes next go to the error stream."""
    try:
        written = write_job(config, overrides, wishes, _origin())
        if wishes.out:
            _write(wishes.out, written.text, overwrite=overwrite)
    except MpitrainError as error:
        fail(error, Position())
    if not wishes.out:
        print(written.text, end="", flush=True)
    for note in written.notes:
        print(f"mpitrain: job: {note}", file=sys.stderr)
    if wishes.out:
        print("\n".join([*written.job.table(), _next(written.job, wishes)]), file=sys.stderr)
    return 0


def _origin() -> Origin:
    """Say where this process runs, with which Python and which MPI."""
    linked = library(library_name())
    return Origin(
        folder=Path.cwd(),
        python=sys.executable,
        mpirun=find_launcher(linked),
        family=linked.family,
        version=linked.version,
        command=shlex.join(["mpitrain", *(word for word in sys.argv[1:] if word != "--overwrite")]),
    )


def _write(path: Path, text: str, *, overwrite: bool) -> None:
    """Write the script, at once and whole.

    Raises
    ------
    ConfigError
        There is another file, which its owner may have changed, or no file can be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        if path.exists() and not overwrite and path.read_bytes() != text.encode():
            raise ConfigError(f"job: --out {path} is there already; replace it with --overwrite, or name another file")
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text, encoding="utf-8")
        temporary.chmod(MODE)
        os.replace(temporary, path)
    except OSError as error:
        raise ConfigError(f"job: --out {path}: {error.strerror}; name another file") from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def _next(job: Job, wishes: Wishes) -> str:
    program = "sbatch" if wishes.scheduler == Scheduler.SLURM else "bash"
    return f"start it with: {program} {shlex.quote(job.script)}"
