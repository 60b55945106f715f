"""MPI for all tests of one process."""

import pytest

# Starts MPI, for the tests that want a communicator of one rank, before some module turns that off by importing
# mpitrain.comm.runtime: which module is collected first must not matter.
from mpi4py import MPI  # noqa: F401

from mpitrain.comm import runtime


@pytest.fixture(autouse=True)
def mpi_goes_on(monkeypatch):
    """Keep a command that ends within a test from ending MPI for the tests after it."""
    monkeypatch.setattr(runtime, "finish", lambda: None)
