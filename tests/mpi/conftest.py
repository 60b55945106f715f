import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

from mpitrain.comm.grid import Axis


def _reversed(comm):
    return comm.Split(0, comm.Get_size() - comm.Get_rank())


# Three ranks are enough to see whether somebody mistakes a rank of the world for one of the communicator at hand.
ORDERS = ["world", "reversed"] if MPI.COMM_WORLD.Get_size() == 3 else ["world"]


@pytest.fixture(params=ORDERS)
def comm(request):
    """The world, and on three ranks also the world with its ranks reversed."""
    comm = MPI.COMM_WORLD.Dup() if request.param == "world" else _reversed(MPI.COMM_WORLD)
    yield comm
    comm.Free()


@pytest.fixture
def world():
    comm = MPI.COMM_WORLD.Dup()
    yield comm
    comm.Free()


@pytest.fixture
def axis(comm):
    return Axis(comm, "data")


@pytest.fixture
def everywhere(world):
    """Return a function that gathers bytes of all ranks and says whether they are equal."""

    def same(values):
        sizes = np.empty(world.size, np.int64)
        data = np.frombuffer(np.ascontiguousarray(values).tobytes(), np.uint8)
        world.Allgather(np.array([data.size], np.int64), sizes)
        if len(set(sizes.tolist())) > 1:
            return False
        table = np.empty((world.size, data.size), np.uint8)
        world.Allgather(data, table)
        return bool((table == table[0]).all())

    return same


@pytest.fixture
def folder(world):
    """A folder that all ranks see, removed at the end."""
    name = np.zeros(256, np.uint8)
    if world.rank == 0:
        path = tempfile.mkdtemp(prefix="mpitrain-test-").encode()
        name[: len(path)] = np.frombuffer(path, np.uint8)
    world.Bcast(name, 0)
    shared = Path(name.tobytes().rstrip(b"\0").decode())
    yield shared
    world.Barrier()
    if world.rank == 0:
        shutil.rmtree(shared)
