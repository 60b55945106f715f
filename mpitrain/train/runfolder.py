"""The run folder, as the README lists it. Only rank 0 (of each disk) writes it."""

import json
import math
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from mpitrain.config.load import Resolved
from mpitrain.errors import ConfigError

CONFIG, METRICS, SUMMARY, CHECKPOINTS = "config.toml", "metrics.jsonl", "summary.json", "checkpoints"
STARTS, TIMELINE, REPORT = "starts.jsonl", "timeline.json", "report.html"

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
        names = (CONFIG, METRICS, SUMMARY, STARTS, CHECKPOINTS)
        try:
            present = [name for name in names if (self.path / name).exists()]
        except OSError as error:
            raise ConfigError(f"run.folder: cannot use {self.path}: {error.strerror}; set run.folder") from None
        if present and not resume and not overwrite:
            raise ConfigError(
                f"run.folder: {self.path} already holds a run ({', '.join(present)}); go on with --resume, replace it "
                "with --overwrite, or set run.folder"
            )

    def begin(
        self, resolved: Resolved, *, overwrite: bool, resumed_step: int | None, aside: Path | None, ranks: int
    ) -> int:
        """Make the folder, write the resolved configuration, and note the start.

        The rows after ``resumed_step`` go: their steps are about to be taken again.

        Parameters
        ----------
        aside : Path, optional
            A later checkpoint that was set aside; the metrics and summary that led to it are copied beside it.

        Returns
        -------
        int
            Number of this start, from 1.

        Raises
        ------
        ConfigError
            The folder cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if aside is not None:
                self._copy_records(aside.parent)
            if overwrite:
                shutil.rmtree(self.checkpoints, ignore_errors=True)
                (self.path / STARTS).unlink(missing_ok=True)
            self._keep_rows(resumed_step or 0)
            for name in (SUMMARY, TIMELINE, REPORT):
                (self.path / name).unlink(missing_ok=True)
            (self.path / CONFIG).write_text(resolved.to_toml(), encoding="utf-8")
            return self._note_start(resumed_step or 0, ranks)
        except OSError as error:
            raise ConfigError(f"run.folder: cannot write {self.path}: {error.strerror}; set run.folder") from None

    def _copy_records(self, folder: Path) -> None:
        for name in (METRICS, SUMMARY):
            if (self.path / name).exists():
                shutil.copy(self.path / name, folder / name)

    def _note_start(self, step: int, ranks: int) -> int:
        path = self.path / STARTS
        number = 1 + (len(path.read_bytes().splitlines()) if path.exists() else 0)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"start": number, "time_s": time.time(), "step": step, "ranks": ranks}) + "\n")
        return number

    def _keep_rows(self, last_step: int) -> None:
        metrics = self.path / METRICS
        if not metrics.exists():
            return
        lines = metrics.read_text().splitlines(keepends=True)
        metrics.write_text("".join(line for line in lines if _step_of(line) <= last_step))

    def append(self, row: Row) -> None:
        """Add a row to metrics.jsonl; raises ConfigError where the disk is full."""
        try:
            with (self.path / METRICS).open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:
            raise ConfigError(f"run.folder: cannot write {self.path / METRICS}: {error.strerror}") from None

    def summary(self) -> Row | None:
        """Read the summary of a complete run; None where there is none, or it is not whole."""
        try:
            return cast(Row, json.loads((self.path / SUMMARY).read_text(encoding="utf-8")))
        except (OSError, ValueError):
            return None

    def finish(self, summary: Row) -> None:
        """Write summary.json: the mark of a completed run; raises ConfigError where the disk is full."""
        self._write(SUMMARY, json.dumps(summary, indent=1))

    def write_timeline(self, timeline: Row) -> None:
        """Write timeline.json: what the ranks did during one step; raises ConfigError where the disk is full."""
        self._write(TIMELINE, json.dumps(timeline))

    def _write(self, name: str, text: str) -> None:
        temporary = self.path / f".{name}.tmp"
        try:
            temporary.write_text(text + "\n", encoding="utf-8")
            os.replace(temporary, self.path / name)
        except OSError as error:
            raise ConfigError(f"run.folder: cannot write {self.path / name}: {error.strerror}") from None


def _step_of(line: str) -> float:
    """Read the step of a row; infinity for one that a kill has left half-written."""
    try:
        return float(json.loads(line)["step"]) if line.endswith("\n") else math.inf
    except (ValueError, KeyError, TypeError):
        return math.inf
