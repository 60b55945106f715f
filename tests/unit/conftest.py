"""MPI for all tests of one process."""

import pytest
from mpi4py import MPI

from mpitrain.comm import runtime

assert MPI  # it starts when it is imported: here, before `comm.runtime`, which keeps it from that


@pytest.fixture(autouse=True)
def mpi_goes_on(monkeypatch):
    """Keep a command that ends within a test from ending MPI for the tests after it."""
    monkeypatch.setattr(runtime, "finish", lambda: None)
