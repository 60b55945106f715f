"""What benchmarks that run on ranks have in common."""

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import cast

from mpitrain.comm.agreement import gather
from mpitrain.comm.grid import Axis
from mpitrain.comm.runtime import Position, fail, finish, start
from mpitrain.errors import LaunchError, count

BOOT = Path("/proc/sys/kernel/random/boot_id")
"""The same for all processes of a machine, whatever their host name is."""


def on_ranks(name: str, ranks: int | None, measure: Callable[[Axis], None]) -> int:
    """Measure on the ranks of a launcher, as many as were asked for; an error ends all of them."""
    try:
        axis = Axis(start(), name)
        check_ranks(ranks, axis.size)
        measure(axis)
        finish()
    except BaseException as error:  # whatever it is, no rank may be left waiting
        fail(error, Position())
    return 0


def check_ranks(wanted: int | None, size: int) -> None:
    """Refuse a launcher's ``size`` ranks where another number was asked for; raises LaunchError, on all ranks alike."""
    if wanted not in (None, size):
        error = LaunchError(f"bench: --ranks {wanted}, but {size} ranks run; leave it out under a launcher")
        error.agreed = True
        raise error


def described(axis: Axis) -> str:
    """Tell how many ranks there are, and whether they must share processors. Collective over ``axis``."""
    mine = [BOOT.read_text(encoding="ascii") if BOOT.exists() else "", sorted(os.sched_getaffinity(0))]
    places = cast(list[tuple[str, list[int]]], gather(axis, mine))
    (machine, together) = Counter(boot for boot, _ in places).most_common(1)[0]
    cores = len({core for boot, bound in places if boot == machine for core in bound})
    shared = f", of which {together} share {count(cores, 'core')}" if together > cores else ""
    return count(axis.size, "rank") + shared
