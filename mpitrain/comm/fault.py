"""Faults on purpose, for tests: ``MPITRAIN_FAULT`` is a ``;``-separated list of ``kind:key=value,…``.

Absent in normal runs, announced loudly when set; nothing but tests may depend on it.

==============  ============================================================================================
kind            what happens on ``rank`` (all where left out) at ``step`` (every one where left out)
==============  ============================================================================================
raise           an exception with ``message``
kill            the process ends by SIGKILL
stop            the loop stops as it does at a wall-time limit: checkpoint, exit 75
delay           the step takes ``seconds`` longer
slow            the step takes ``seconds`` longer, and with ``probability`` ``factor`` times that (`slow_seconds`), on
                ranks that train
drop            a worker throws away the server's answer to its gradient of the step
nan, inf        one element of the gradient of ``tensor`` (the first where left out) becomes NaN or infinite
const           the whole gradient becomes ``value``
kill_save       SIGKILL while the checkpoint is being written
corrupt_save    one byte of the written shard is changed before it is verified
slow_save       the save takes ``seconds`` longer
raise_end       an exception after the last step, before the summary
==============  ============================================================================================
"""

import hashlib
import os
import signal
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from mpitrain.comm.hints import EMULATION
from mpitrain.errors import ConfigError

PREFIX = "MPITRAIN_"
VARIABLE = "MPITRAIN_FAULT"
KINDS = (
    "raise",
    "kill",
    "stop",
    "delay",
    "slow",
    "drop",
    "nan",
    "inf",
    "const",
    "kill_save",
    "corrupt_save",
    "slow_save",
    "raise_end",
)


class InjectedFaultError(RuntimeError):
    """The exception of the fault ``raise``."""


@dataclass(frozen=True)
class Fault:
    """One fault; None matches everything."""

    kind: str
    rank: int | None = None
    step: int | None = None
    tensor: str = ""
    message: str = "injected fault"
    seconds: float = 1.0
    value: float = 1.0
    factor: float = 1.0
    probability: float = 1.0


def slow_seconds(fault: Fault, rank: int, step: int) -> float:
    """Return the seconds that a fault ``slow`` adds to a step of a rank: the same for whoever asks.

    Whether the factor applies is drawn from rank and step alone, so that a simulator knows what a run had to bear.
    """
    digest = hashlib.blake2b(f"{rank} {step}".encode(), digest_size=8).digest()
    drawn = int.from_bytes(digest, "little") / 2**64
    return fault.seconds * (fault.factor if drawn < fault.probability else 1.0)


class FaultHook:
    """The faults of one rank.

    Parameters
    ----------
    text : str
        Value of the variable; empty for none.
    rank : int
        This rank of the world.

    Raises
    ------
    ConfigError
        Text that names no known fault.
    """

    def __init__(self, text: str, rank: int) -> None:
        faults = [_parse(item) for item in text.split(";") if item.strip()]
        self.faults = [fault for fault in faults if fault.rank in (None, rank)]
        self.text = text
        self._rank = rank

    @classmethod
    def from_environment(cls, rank: int) -> "FaultHook":
        """Read the variable."""
        return cls(os.environ.get(VARIABLE, ""), rank)

    def check_tensors(self, names: Collection[str]) -> None:
        """Refuse a fault in a tensor that the model does not have (ConfigError)."""
        for fault in self.faults:
            if fault.tensor and fault.tensor not in names:
                raise ConfigError(f"{VARIABLE}: the model has no tensor {fault.tensor!r}; it has {', '.join(names)}")

    def find(self, kind: str, step: int) -> Fault | None:
        """Return the fault of a kind that is due at a step."""
        due = (fault for fault in self.faults if fault.kind == kind and fault.step in (None, step))
        return next(due, None)

    def at_step(self, step: int, *, trains: bool = True) -> None:
        """Raise, die or sleep, if it is time; only who trains is slow at it."""
        if fault := self.find("delay", step):
            time.sleep(fault.seconds)
        if trains and (fault := self.find("slow", step)):
            time.sleep(slow_seconds(fault, self._rank, step))
        if self.find("kill", step):
            kill_self()
        if fault := self.find("raise", step):
            raise InjectedFaultError(fault.message)

    def slow_save(self, step: int) -> None:
        """Sleep while saving, if asked to."""
        if fault := self.find("slow_save", step):
            time.sleep(fault.seconds)

    def at_end(self) -> None:
        """Raise after the last step, if asked to."""
        if fault := self.find("raise_end", 0):
            raise InjectedFaultError(fault.message)


def unread_variables(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Warn of variables that look as if they configured something: none but ``VARIABLE`` is ever read."""
    names = sorted(name for name in environment if name.startswith(PREFIX) and name not in (VARIABLE, EMULATION))
    return [f"{name} is set, but nothing reads it: configuration comes from the file and --set" for name in names]


def kill_self() -> None:
    """End this process as the kernel's out-of-memory killer would."""
    os.kill(os.getpid(), signal.SIGKILL)


def _parse(item: str) -> Fault:
    kind, _, rest = item.strip().partition(":")
    if kind not in KINDS:
        raise ConfigError(f"{VARIABLE}: expected one of {', '.join(KINDS)}, got {kind!r}")
    fields: dict[str, str] = {}
    for pair in filter(None, rest.split(",")):
        key, equals, value = pair.partition("=")
        if not equals or key.strip() not in Fault.__dataclass_fields__ or key.strip() == "kind":
            raise ConfigError(f"{VARIABLE}: expected key=value with a key of the list, got {pair!r} in {item!r}")
        fields[key.strip()] = value
    try:
        return Fault(
            kind,
            rank=int(fields["rank"]) if "rank" in fields else None,
            step=int(fields["step"]) if "step" in fields else None,
            tensor=fields.get("tensor", ""),
            message=fields.get("message", "injected fault"),
            **{name: float(fields.get(name, "1")) for name in ("seconds", "value", "factor", "probability")},
        )
    except ValueError as error:
        raise ConfigError(f"{VARIABLE}: {error} in {item!r}") from None
