"""Training runs as processes of their own, for benchmarks."""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from mpitrain.comm.fault import VARIABLE
from mpitrain.config.load import Resolved, load_config
from mpitrain.config.validate import unread_keys
from mpitrain.errors import BY_EXIT_CODE, ConfigError, DivergedError, LaunchError

DERIVED = {"run.folder", "parallel.dp", "parallel.micro_batches", "parallel.chunks"}
"""Settings that a run fills in by itself, or may have differently."""

DIVERGED = "diverged.txt"
"""Mark of a run that has diverged: as final as a summary."""


def processes(config: Path, workers: int, overrides: tuple[str, ...]) -> int:
    """Count the ranks of a run: those that train, and the servers that the configuration asks for."""
    resolved = load_config(config, list(overrides)).config
    return workers + (resolved.exchange.servers or 0) * resolved.parallel.pp * resolved.parallel.tp


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
    faults : str
        What is to go wrong on purpose (`comm.fault`); empty for nothing.
    """

    config: Path
    ranks: int
    folder: Path
    overrides: tuple[str, ...] = ()
    faults: str = ""

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
        environment = os.environ | ({VARIABLE: self.faults} if self.faults else {})
        done = subprocess.run(self.command(), capture_output=True, text=True, check=False, env=environment)
        if done.returncode:
            tail = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
            kind = BY_EXIT_CODE.get(done.returncode, LaunchError)
            raise kind(f"bench: the run in {self.folder} ended with code {done.returncode}:\n{tail}")
        return time.perf_counter() - begin

    def complete(self, label: str) -> bool:
        """Make the run unless it has been made; return whether it has a result, or else has diverged.

        Raises
        ------
        MpitrainError
            The run failed, or the folder holds one of other settings.
        """
        mark = self.folder / DIVERGED
        if self.summary() is not None or mark.exists():
            self._check_settings()
            return not mark.exists()
        print(f"{label} …", flush=True)
        try:
            self.run()
        except DivergedError as error:
            mark.write_text(f"{error}\n", encoding="utf-8")
            return False
        return True

    def _check_settings(self) -> None:
        """Refuse to take a run for another one."""
        made = _settings(load_config(self.folder / "config.toml"))
        wanted = _settings(load_config(self.config, list(self.overrides)))
        for key in sorted(made.keys() | wanted.keys()):
            if made.get(key) != wanted.get(key):
                raise ConfigError(
                    f"bench: {self.folder} holds a run with {key} = {made.get(key)}, but this one has "
                    f"{wanted.get(key)}; give another --folder, or remove that one"
                )

    def rows(self) -> list[dict[str, float]]:
        """Read the steps of rank 0 from metrics.jsonl."""
        lines = (self.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]

    def train_loss(self) -> float:
        """Average the training loss over the last tenth of the steps."""
        rows = self.rows()
        tail = [row["loss"] for row in rows[-max(1, len(rows) // 10) :]]
        return sum(tail) / len(tail)

    def summary(self) -> dict[str, object] | None:
        """Read the result of a finished run."""
        path = self.folder / "summary.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def _settings(resolved: Resolved) -> dict[str, str]:
    """List what a run reads, by name."""
    ignored = DERIVED | unread_keys(resolved.config).keys()
    pairs = (line.partition(" = ") for line in resolved.lines())
    return {key: value for key, _, value in pairs if key not in ignored}
