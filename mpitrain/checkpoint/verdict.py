"""What all ranks conclude together from what each of them has met."""

from collections.abc import Callable, Sequence
from typing import NoReturn, TypeVar, cast

from mpitrain.comm.agreement import agree, gather
from mpitrain.comm.grid import Axis
from mpitrain.errors import CheckpointError, DamageError

T = TypeVar("T")


def refuse(message: str) -> NoReturn:
    """Raise what all ranks know."""
    error = CheckpointError(message)
    error.agreed = True
    raise error


def judge(axis: Axis, actions: Sequence[Callable[[], T]], *, timeout_s: float) -> tuple[list[T], list[str]]:
    """Do what damaged files may prevent; return what came of this rank's actions, and the damage that any rank met.

    Collective over ``axis``. Other errors are raised on all ranks: they are no damage, and another step would not help.
    """
    results: list[T] = []
    damage: list[str] = []

    def attempt() -> None:
        for action in actions:
            try:
                results.append(action())
            except DamageError as error:
                damage.append(str(error))

    agree(axis, attempt, timeout_s=timeout_s)
    found = cast(list[list[str]], gather(axis, damage, timeout_s=timeout_s))
    return results, [f"rank {rank}: {text}" for rank, texts in enumerate(found) for text in texts]
