"""Call the command several times in one process: a start of MPI costs more than a refusal.

Run as ``python -m tests.system.driver CASES RESULTS [FOLDER]``, under mpirun or alone. CASES is a JSON list of
argument lists for ``mpitrain``. Every rank writes RESULTS.RANK with a list of ``{"code", "stdout", "stderr",
"digest"}``, the last one of what lies in FOLDER after the call.
"""

import contextlib
import hashlib
import io
import json
import sys
from pathlib import Path

from mpitrain.cli import eval as scoring
from mpitrain.cli import train
from mpitrain.cli.main import app, with_resume_value
from mpitrain.comm import runtime
from tests.system.helpers import snapshot


def call(arguments, watched):
    output, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stderr(error), contextlib.redirect_stdout(output):
        try:
            app(with_resume_value(arguments), prog_name="mpitrain")
        except SystemExit as exit_:
            code = exit_.code
    digest = watched and hashlib.sha256(repr(sorted(snapshot(Path(watched)).items())).encode()).hexdigest()
    return {"code": code or 0, "stdout": output.getvalue(), "stderr": error.getvalue(), "digest": digest}


def main(cases, results, watched=None):
    world = runtime.start()
    end, runtime.finish = runtime.finish, lambda: None
    train.finish = scoring.finish = world.Barrier
    found = [call(arguments, watched) for arguments in json.loads(Path(cases).read_text())]
    Path(f"{results}.{world.rank}").write_text(json.dumps(found))
    world.Barrier()
    end()


if __name__ == "__main__":
    main(*sys.argv[1:])
