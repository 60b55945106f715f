"""The exception family and the exit codes.

Every message says where, expected, got and the remedy, in one sentence:
``parallel: dp*pp*tp = 6, but 4 ranks run; set parallel.dp = 2 or start 6 ranks``.
"""

from enum import IntEnum


class ExitCode(IntEnum):
    """What the process tells the shell (README, "Exit codes")."""

    DONE = 0
    CONFIG = 2
    DATA = 3
    CHECKPOINT = 4
    MPI = 5
    DIVERGED = 6
    INTERNAL = 70
    STOPPED = 75
    INTERRUPTED = 130


class MpitrainError(Exception):
    """A failure whose message is meant for the user.

    Attributes
    ----------
    exit_code : ExitCode
        Its kind.
    agreed : bool
        Every rank has raised it, so one may print it for all and all may leave in order.
    teller : int
        The rank that prints it.
    bereaved : bool
        Some rank has died: MPI would wait for it at the end.
    """

    exit_code = ExitCode.INTERNAL
    agreed = False
    teller = 0
    bereaved = False


class ConfigError(MpitrainError):
    """A wrong command line or configuration."""

    exit_code = ExitCode.CONFIG


class DataError(MpitrainError):
    """A missing, malformed or insufficient data set."""

    exit_code = ExitCode.DATA


class CheckpointError(MpitrainError):
    """A checkpoint that is missing, damaged, or of another model."""

    exit_code = ExitCode.CHECKPOINT


class DamageError(CheckpointError):
    """A file of a checkpoint that is missing, or not what was written."""


class LaunchError(MpitrainError):
    """MPI is missing, mismatched, or was started in a way that cannot work."""

    exit_code = ExitCode.MPI


class PeerLostError(LaunchError):
    """A peer stayed silent for longer than ``network.peer_timeout_s``.

    Attributes
    ----------
    grace_s : float
        What another rank, which saves what there is, is left before the job is ended.
    """

    grace_s = 0.0


class ProtocolError(LaunchError):
    """A peer sent a message that does not belong where it arrived."""


class CodecError(LaunchError):
    """A payload that its codec could not have written."""


class DivergedError(MpitrainError):
    """Training cannot go on: too many steps in a row had to be skipped."""

    exit_code = ExitCode.DIVERGED


class StoppedEarlyError(MpitrainError):
    """Training stopped early with a checkpoint; start it again with ``--resume``."""

    exit_code = ExitCode.STOPPED


BY_EXIT_CODE: dict[int, type[MpitrainError]] = {
    ExitCode.CONFIG: ConfigError,
    ExitCode.DATA: DataError,
    ExitCode.CHECKPOINT: CheckpointError,
    ExitCode.MPI: LaunchError,
    ExitCode.DIVERGED: DivergedError,
    ExitCode.STOPPED: StoppedEarlyError,
}


def count(number: int, noun: str) -> str:
    """Render a number of things for a message; one thing takes no s."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
