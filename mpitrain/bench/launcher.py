"""Training runs as processes of their own, for benchmarks."""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from mpitrain.errors import BY_EXIT_CODE, LaunchError


@dataclass(frozen=True)
class Job:
    """A run to be made.

    Attributes
    ----------
    config : Path
        Configuration file.
    ranks : int
        Processes.
    folder : Path
        Of the run; finished once it holds a summary.
    overrides : tuple of str
        ``section.key=value``.
    """

    config: Path
    ranks: int
    folder: Path
    overrides: tuple[str, ...] = ()

    def command(self) -> list[str]:
        """Build the command line."""
        command = [sys.executable, "-m", "mpitrain", "launch", str(self.config), "-n", str(self.ranks)]
        command += ["--oversubscribe", *["--allow-root"] * (os.geteuid() == 0), "--overwrite"]
        for item in (*self.overrides, f"run.folder={json.dumps(str(self.folder))}"):
            command += ["--set", item]
        return command

    def run(self) -> float:
        """Make the run; return its wall time in seconds, start and end included.

        Raises
        ------
        MpitrainError
            The run failed; of the kind of its exit code, with its last lines.
        """
        begin = time.perf_counter()
        done = subprocess.run(self.command(), capture_output=True, text=True, check=False)
        if done.returncode:
            tail = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
            kind = BY_EXIT_CODE.get(done.returncode, LaunchError)
            raise kind(f"bench: the run in {self.folder} ended with code {done.returncode}:\n{tail}")
        return time.perf_counter() - begin

    def train_loss(self) -> float:
        """Average the training loss over the last tenth of the steps."""
        lines = (self.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        tail = [float(json.loads(line)["loss"]) for line in lines[-max(1, len(lines) // 10) :]]
        return sum(tail) / len(tail)

    def summary(self) -> dict[str, object] | None:
        """Read the result of a finished run."""
        path = self.folder / "summary.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
