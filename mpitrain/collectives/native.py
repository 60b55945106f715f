"""Native: MPI's own allreduce of the raw floats, whatever algorithm the library chooses.

The peer that the others are measured against. Its order of additions is the library's, so it is compared by tolerance.
"""

from mpi4py import MPI

from mpitrain.collectives.base import BucketState
from mpitrain.collectives.reducer import Reducer
from mpitrain.collectives.run import Run, Steps
from mpitrain.comm.waiting import Requests
from mpitrain.kernels.reduce import count_not_finite


class Native(Reducer):
    """``MPI_Iallreduce``; carries raw only."""

    name = "native"

    def prepare(self, state: BucketState) -> None:
        """Need nothing: the sum is in place."""

    def steps(self, run: Run) -> Steps:
        """Sum piece by piece; NaN and infinity survive the sum, so every rank sees them."""
        values = run.state.bucket.values
        piece = max(1, self.transport.piece_bytes // values.itemsize)
        requests = [
            run.axis.comm.Iallreduce(MPI.IN_PLACE, values[start : start + piece])
            for start in range(0, values.size, piece)
        ]
        run.traffic.sent_bytes += values.nbytes
        run.traffic.messages += len(requests)
        yield Requests(requests, f"the {run.axis.name} axis to join MPI_Iallreduce", run.watch)
        run.traffic.received_bytes += values.nbytes
        run.nonfinite = count_not_finite(values) > 0
