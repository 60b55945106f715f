"""The run folder, as the README lists it. Only rank 0 (of each disk) writes it."""

import fcntl
import json
import math
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

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

    def check_not_lost(self, every: int) -> None:
        """Refuse to begin anew where a run has left records, but its checkpoints are gone.

        Parameters
        ----------
        every : int
            Steps between checkpoints: a run that was ended before the first one has lost nothing.

        Raises
        ------
        ConfigError
            The last step that is on record, and the remedy.
        """
        last = max((step for step in map(_step_of, self._rows()) if step < math.inf), default=0)
        if (self.path / SUMMARY).exists() or (every and last > every):
            raise ConfigError(
                f"run.folder: {self.path} has records of {last:g} steps, but no checkpoint to go on from; put its "
                f"{CHECKPOINTS} back, or begin anew with --overwrite"
            )

    def hold(self) -> BinaryIO:
        """Make the folder, and keep other runs out of it for as long as the returned file is open.

        Raises
        ------
        ConfigError
            Another run is at work there, or the folder cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            file = (self.path / STARTS).open("ab+")
        except OSError as error:
            raise ConfigError(f"run.folder: cannot write {self.path}: {error.strerror}; set run.folder") from None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise ConfigError(
                f"run.folder: another run is at work in {self.path} (the last line of {STARTS} says where); wait for "
                "its end, or set run.folder"
            ) from None
        except OSError:  # a file system without locks
            pass
        return file

    def begin(
        self, resolved: Resolved, *, overwrite: bool, resumed_step: int | None, aside: Path | None, ranks: int
    ) -> int:
        """Write the resolved configuration into the folder that is held, and note the start.

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
            if aside is not None:
                self._copy_records(aside.parent)
            if overwrite:
                shutil.rmtree(self.checkpoints, ignore_errors=True)
                os.truncate(self.path / STARTS, 0)
            self._keep_rows(resumed_step or 0)
            for name in (SUMMARY, TIMELINE, REPORT):
                (self.path / name).unlink(missing_ok=True)
            self._write(CONFIG, resolved.to_toml())
            return self._note_start(resumed_step or 0, ranks)
        except OSError as error:
            raise ConfigError(f"run.folder: cannot write {self.path}: {error.strerror}; set run.folder") from None

    def _copy_records(self, folder: Path) -> None:
        for name in (METRICS, SUMMARY):
            if (self.path / name).exists():
                shutil.copy(self.path / name, folder / name)

    def _note_start(self, step: int, ranks: int) -> int:
        path = self.path / STARTS
        before = path.read_bytes()
        number = 1 + len(before.splitlines())
        place = {"host": os.uname().nodename, "process": os.getpid()}
        with path.open("a", encoding="utf-8") as file:
            torn = before and not before.endswith(b"\n")
            file.write("\n" * bool(torn))
            file.write(
                json.dumps({"start": number, "time_s": time.time(), "step": step, "ranks": ranks} | place) + "\n"
            )
        return number

    def _keep_rows(self, last_step: int) -> None:
        if rows := self._rows():
            self._write(METRICS, "".join(row for row in rows if _step_of(row) <= last_step))

    def _rows(self) -> list[str]:
        """Read the lines of metrics.jsonl, whole or not."""
        metrics = self.path / METRICS
        text = metrics.read_text(encoding="utf-8", errors="replace") if metrics.exists() else ""
        return text.splitlines(keepends=True)

    def append(self, row: Row) -> None:
        """Add a row to metrics.jsonl; raises ConfigError where the disk is full."""
        try:
            with (self.path / METRICS).open("a", encoding="utf-8") as file:
                file.write(_json(row) + "\n")
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
        self._write(SUMMARY, _json(summary, indent=1) + "\n")

    def write_timeline(self, timeline: Row) -> None:
        """Write timeline.json: what the ranks did during one step; raises ConfigError where the disk is full."""
        self._write(TIMELINE, _json(timeline) + "\n")

    def _write(self, name: str, text: str) -> None:
        temporary = self.path / f".{name}.tmp"
        try:
            temporary.write_text(text, encoding="utf-8")
            os.replace(temporary, self.path / name)
        except OSError as error:
            raise ConfigError(f"run.folder: cannot write {self.path / name}: {error.strerror}") from None


def _json(value: object, indent: int | None = None) -> str:
    """Render as JSON, which has no word for what is not finite: null."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _step_of(line: str) -> float:
    """Read the step of a row; infinity for one that a kill has left half-written."""
    try:
        return float(json.loads(line)["step"]) if line.endswith("\n") else math.inf
    except (ValueError, KeyError, TypeError):
        return math.inf
