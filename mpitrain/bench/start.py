"""``mpitrain bench start``: how long a person waits for ``--help``, and for the first step of a warm start."""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from mpitrain.bench.launcher import Job
from mpitrain.bench.records import Record, show
from mpitrain.errors import MpitrainError


def main(config: Path, ranks: int, repeats: int, path: Path | None) -> int:
    """Time both, the start after one that has filled the cache of compiled kernels."""
    with tempfile.TemporaryDirectory() as name:
        job = Job(config, ranks, Path(name) / "run", ("train.steps=1", "train.eval_every=0", "checkpoint.every=0"))
        try:
            job.run()
            helps = [_time([sys.executable, "-m", "mpitrain", "--help"]) for _ in range(repeats)]
            starts = [_first_step(job) for _ in range(repeats)]
        except MpitrainError as error:
            print(f"mpitrain: {error}", file=sys.stderr)
            return int(error.exit_code)
    records: list[Record] = [
        {"what": "--help", "seconds": median(helps), "fastest": min(helps), "slowest": max(helps)},
        {
            "what": f"{ranks} ranks to the end of step 1",
            "seconds": median(starts),
            "fastest": min(starts),
            "slowest": max(starts),
        },
    ]
    show(f"start, median of {repeats}", records, path)
    return 0


def _time(command: list[str]) -> float:
    begin = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - begin


def _first_step(job: Job) -> float:
    """Return the seconds from the command to the line that step 1 leaves in metrics.jsonl."""
    begin = time.time()
    job.run()
    row = json.loads((job.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[0])
    return float(row["time_s"]) - begin
