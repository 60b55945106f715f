"""Call the command several times in one process: a start of MPI costs more than a refusal.

Run as ``python -m tests.system.driver CASES RESULTS``, under mpirun or alone. CASES is a JSON list of argument lists
for ``mpitrain``; every rank writes RESULTS.RANK with a list of ``{"code", "stderr"}``.
"""

import contextlib
import io
import json
import sys
from pathlib import Path

from mpitrain.cli import train
from mpitrain.cli.main import app
from mpitrain.comm import runtime


def call(arguments):
    error = io.StringIO()
    with contextlib.redirect_stderr(error), contextlib.redirect_stdout(io.StringIO()):
        try:
            app(arguments, prog_name="mpitrain")
        except SystemExit as exit_:
            code = exit_.code
    return {"code": code or 0, "stderr": error.getvalue()}


def main(cases, results):
    world = runtime.start()
    end, train.finish, runtime.finish = runtime.finish, world.Barrier, lambda: None
    found = [call(arguments) for arguments in json.loads(Path(cases).read_text())]
    Path(f"{results}.{world.rank}").write_text(json.dumps(found))
    world.Barrier()
    end()


if __name__ == "__main__":
    main(*sys.argv[1:])
