"""The little program that ``doctor`` runs on two ranks: MPI starts, and one compressed sum is right."""

import faulthandler
import json

import numpy as np

from mpitrain.comm.runtime import Position, fail, finish, start  # before what imports MPI, which would start by itself

# isort: split
from mpitrain.arrays import Floats
from mpitrain.collectives.allreduce import Allreduce
from mpitrain.comm.agreement import gather
from mpitrain.comm.facts import running_facts
from mpitrain.comm.grid import Axis

LIFE_S = 90
"""A rank that its launcher has forgotten ends by itself."""

ELEMENTS = 2048


def main() -> None:
    """Sum an array whose sum is known, compare, and let rank 0 print what it found as one line of JSON."""
    faulthandler.dump_traceback_later(LIFE_S, exit=True)
    try:
        axis = Axis(start(), "world")
        total = _contribution(axis.rank)
        with Allreduce(axis.comm, ELEMENTS, codec="int8", memory="residual", collective="direct") as allreduce:
            traffic = allreduce(total)
        report = {"error": _error(total, axis.size), "bits": total.tobytes().hex(), "sent_bytes": traffic.sent_bytes}
        reports = gather(axis, report)
        if axis.rank == 0:
            same = all(each["bits"] == report["bits"] for each in reports)  # type: ignore[index]
            result = {"ranks": axis.size, "error": report["error"], "same": same, "sent_bytes": traffic.sent_bytes}
            print(json.dumps(result | running_facts()), flush=True)
        finish()
    except BaseException as error:  # as in ``train``: no rank may be left waiting
        fail(error, Position())


def _contribution(rank: int) -> Floats:
    return np.sin(np.arange(ELEMENTS, dtype=np.float32) * (rank + 1))


def _error(total: Floats, ranks: int) -> float:
    """Return the largest error in units of what int8 may lose: half a step at each rank, and once more at the owner."""
    exact = np.sum([_contribution(rank) for rank in range(ranks)], axis=0)
    return float(np.abs(total - exact).max() / ((ranks + ranks) * 0.5 / 127 * 1.01))


if __name__ == "__main__":
    main()
