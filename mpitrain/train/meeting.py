"""The end of a round, where all ranks of the world learn what the others did and decide alike."""

from collections.abc import Sequence

import numpy as np

from mpitrain.comm.agreement import NumberGather
from mpitrain.comm.grid import Axis
from mpitrain.parallel.trip import Sums

PER_STEP = 3
"""Numbers of a step: sums of loss, weight and metric."""


class Meeting:
    """Sums of every step of a round, and wishes to stop, on their way to all ranks. Collective over ``world``.

    Parameters
    ----------
    sums : list of Sums
        Of the steps, as this rank counts them: what several ranks know counts once.
    stop : bool
        Whether this rank wants the run to end here.
    """

    def __init__(self, world: Axis, sums: Sequence[Sums], *, stop: bool, timeout_s: float) -> None:
        numbers = np.array([*(number for each in sums for number in each), float(stop)])
        self._steps = len(sums)
        self._gather = NumberGather(world, numbers, timeout_s=timeout_s)

    def wait(self) -> tuple[list[Sums], bool]:
        """Return the sums over all ranks of each step, and whether some rank wants to stop."""
        *numbers, stops = self._gather.wait().sum_in_order()
        steps = [Sums(*numbers[PER_STEP * i : PER_STEP * (i + 1)]) for i in range(self._steps)]
        return steps, stops > 0
