"""The run folder: config.toml, metrics.jsonl, summary.json, checkpoints/. Only rank 0 (of each disk) writes it."""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from mpitrain.config.load import Resolved
from mpitrain.errors import ConfigError

CONFIG, METRICS, SUMMARY, CHECKPOINTS = "config.toml", "metrics.jsonl", "summary.json", "checkpoints"

Row = dict[str, object]


@dataclass(frozen=True)
class RunFolder:
    """Paths of a run, and the rules of writing to them."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        """Folder of the steps."""
        return self.path / CHECKPOINTS

    def check_free(self, *, resume: bool, overwrite: bool) -> None:
        """Refuse to mix two runs.

        Raises
        ------
        ConfigError
            The folder holds a run, and neither ``resume`` nor ``overwrite`` says what to do with it; or both do.
        """
        if resume and overwrite:
            raise ConfigError("--resume goes on with a run and --overwrite replaces it; give one of them")
        present = [name for name in (CONFIG, METRICS, SUMMARY, CHECKPOINTS) if (self.path / name).exists()]
        if present and not resume and not overwrite:
            raise ConfigError(
                f"run.folder: {self.path} already holds a run ({', '.join(present)}); go on with --resume, replace it "
                "with --overwrite, or set run.folder"
            )

    def begin(self, resolved: Resolved, *, overwrite: bool, resumed_step: int | None) -> None:
        """Make the folder and write the resolved configuration.

        Of a resumed run the rows after ``resumed_step`` go: their steps are about to be taken again.

        Raises
        ------
        ConfigError
            The folder cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            (self.path / SUMMARY).unlink(missing_ok=True)
            if overwrite and resumed_step is None:
                (self.path / METRICS).unlink(missing_ok=True)
                shutil.rmtree(self.checkpoints, ignore_errors=True)
            (self.path / CONFIG).write_text(resolved.to_toml(), encoding="utf-8")
            if resumed_step is not None:
                self._keep_rows(resumed_step)
        except OSError as error:
            raise ConfigError(f"run.folder: cannot write {self.path}: {error.strerror}; set run.folder") from None

    def _keep_rows(self, last_step: int) -> None:
        metrics = self.path / METRICS
        lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
        kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= last_step]
        metrics.write_text("".join(kept))

    def append(self, row: Row) -> None:
        """Add a row to metrics.jsonl."""
        with (self.path / METRICS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def finish(self, summary: Row) -> None:
        """Write summary.json: the mark of a completed run."""
        temporary = self.path / f".{SUMMARY}.tmp"
        temporary.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
        os.replace(temporary, self.path / SUMMARY)
