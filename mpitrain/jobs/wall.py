"""Wall time: how Slurm writes it, and whether it lets a run reach its next checkpoint."""

import json
import math
import re
import statistics
from dataclasses import dataclass
from pathlib import Path

from mpitrain.config.schema import Config
from mpitrain.errors import ConfigError

FORMATS = (r"(?P<m>\d+)", r"(?P<m>\d+):(?P<s>\d+)", r"(?P<h>\d+):(?P<m>\d+):(?P<s>\d+)")
FORMATS_WITH_DAYS = (r"(?P<h>\d+)", r"(?P<h>\d+):(?P<m>\d+)", r"(?P<h>\d+):(?P<m>\d+):(?P<s>\d+)")
UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}

LEAST_WARNING_S = 60
"""Slurm looks after its signals once a minute, and may send them a minute early (sbatch(1), ``--signal``)."""

STEPS_OF_WARNING = 3
"""Steps that a stop may need: the one under way, and twice as much for its checkpoint."""

MAX_CHARACTERS = 20
"""A longer time is none."""

RECENT = 20
"""Steps of an earlier run whose median is taken as the seconds of a step."""


@dataclass(frozen=True)
class Pace:
    """Seconds of a step, and who says so."""

    step_s: float
    source: str


def parse_time(text: str) -> int:
    """Read a time as ``sbatch --time`` does: M, M:S, H:M:S, D-H, D-H:M or D-H:M:S; returns seconds.

    Raises
    ------
    ConfigError
        It is none of these, or no time at all.
    """
    days, dash, rest = text.rpartition("-")
    patterns = FORMATS_WITH_DAYS if dash else FORMATS
    match = next((match for pattern in patterns if (match := re.fullmatch(pattern, rest, re.ASCII))), None)
    if match is None or (dash and not re.fullmatch(r"\d{1,4}", days, re.ASCII)) or len(rest) > MAX_CHARACTERS:
        raise ConfigError(f"job: --time: expected minutes, H:MM:SS or D-HH:MM:SS, got {text!r}")
    seconds = sum(UNITS[unit] * int(number) for unit, number in match.groupdict().items())
    seconds += UNITS["d"] * int(days or 0)
    if seconds == 0:
        raise ConfigError(f"job: --time: {text!r} is no time at all (Slurm takes it for no limit); leave --time out")
    return seconds


def format_time(seconds: int) -> str:
    """Write a time as ``sbatch --time`` reads it."""
    minutes, s = divmod(seconds, 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    return (f"{days}-" if days else "") + f"{h:02}:{m:02}:{s:02}"


def find_pace(step_s: float | None, folder: Path) -> Pace | None:
    """Tell how long a step takes: as the user says, else as an earlier run in its folder took; None where nobody knows.

    Parameters
    ----------
    step_s : float, optional
        Said by the user.
    folder : Path
        ``run.folder``.
    """
    if step_s is not None:
        return Pace(step_s, "--step-s")
    metrics = folder / "metrics.jsonl"
    try:
        lines = metrics.read_text(encoding="utf-8").splitlines()[-RECENT:]
        seconds = [float(json.loads(line)["step_s"]) for line in lines]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    median = statistics.median(seconds) if seconds else 0.0
    return Pace(median, f"the median of the last steps in {metrics}") if 0 < median < math.inf else None


def warning_s(config: Config, pace: Pace | None) -> int:
    """Choose how many seconds before the end of the wall time a job is told to stop."""
    needed = STEPS_OF_WARNING * pace.step_s if pace else 0.0
    return max(LEAST_WARNING_S, math.ceil(config.run.time_margin_s), math.ceil(needed))


def check_wall(config: Config, wall_s: int, reserve_s: float, pace: Pace | None) -> None:
    """Refuse a wall time within which no checkpoint falls due.

    Parameters
    ----------
    wall_s : int
        Seconds after which the job is ended from outside.
    reserve_s : float
        Seconds before that at which it is told to stop.
    pace : Pace, optional
        Seconds of a step; without it only the reserve is checked.

    Raises
    ------
    ConfigError
        Where, how long an interval takes and by whose word, and both remedies.
    """
    if wall_s <= reserve_s:
        raise ConfigError(
            f"job: --time {format_time(wall_s)} leaves no time to train: {reserve_s:g} s before its end the job is "
            f"told to save and stop; give it more than {format_time(math.ceil(reserve_s))}"
        )
    limit_s, name = wall_s - reserve_s, f"--time {format_time(wall_s)}, less {reserve_s:g} s to save and stop"
    own_limit, own_margin = config.run.time_limit_s, config.run.time_margin_s
    if own_limit is not None and own_limit - own_margin < limit_s:
        limit_s, name = own_limit - own_margin, f"run.time_limit_s = {own_limit:g}, less run.time_margin_s"
    every = min(config.checkpoint.every, config.train.steps)
    if pace is None or every == 0 or every * pace.step_s <= limit_s:
        return
    fitting = int(limit_s / pace.step_s)
    shorter = f"set checkpoint.every = {fitting} or less, or " if fitting else ""
    raise ConfigError(
        f"job: {name}, is {limit_s:g} s, shorter than the {every} steps of {pace.step_s:g} s ({pace.source}) up to a "
        f"checkpoint; {shorter}give it {format_time(math.ceil(every * pace.step_s + reserve_s))} or more"
    )
