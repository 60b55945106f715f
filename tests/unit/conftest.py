# Starts MPI, for the tests that want a communicator of one rank, before some module turns that off by importing
# mpitrain.comm.runtime: which module is collected first must not matter.
from mpi4py import MPI  # noqa: F401
