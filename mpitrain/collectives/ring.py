"""Ring: reduce-scatter, then all-gather, each rank speaking to its two neighbours only.

2(p-1) messages a rank, one after the other; 2(p-1)/p of the vector each way. Every hop encodes the partial sum anew.
For stations wired as a ring or chain (Patarasuk and Yuan, 2009). A segment goes on as soon as it has come, so large
chunks are on all links at once.
"""

from mpitrain.collectives.base import BucketState
from mpitrain.collectives.reducer import Reducer
from mpitrain.collectives.run import Run, Steps
from mpitrain.collectives.segments import Segment
from mpitrain.comm.frame import Tag


class Ring(Reducer):
    """Rank r owns chunk r; partial sums of chunk j start at rank j + 1 and travel upwards to rank j."""

    name = "ring"

    def prepare(self, state: BucketState) -> None:
        """Make one stream a chunk: out and in for partial sums, one for the result."""
        rank, ranks = self.axis.rank, self.axis.size
        for chunk in range(ranks):
            if chunk != rank:
                state.sender("partial", chunk)
            if chunk != (rank - 1) % ranks:
                state.receiver("partial", chunk)
            if chunk == rank:
                state.sender("sum", chunk)
            else:
                state.receiver("sum", chunk)
        state.own(rank)

    def steps(self, run: Run) -> Steps:
        """Pass partial sums on until every owner has its own, then pass the sums on.

        What arrives is taken in the order in which it was sent, so what is sent has an order, too.
        """
        state, rank, ranks = run.state, run.axis.rank, run.axis.size
        above, below = (rank + 1) % ranks, (rank - 1) % ranks
        incoming = [(below - hop) % ranks for hop in range(1, ranks)]
        results = [(rank - hop) % ranks for hop in range(1, ranks)]
        partial = {chunk: run.post(state.receiver("partial", chunk), below, Tag.SCATTER) for chunk in incoming}
        summed = {chunk: run.post(state.receiver("sum", chunk), below, Tag.GATHER) for chunk in results}

        for segment in state.segments[below]:
            self._pass_on(run, segment, above, finite=True)
            yield run.turn
        for chunk in incoming:
            stream = state.receiver("partial", chunk)
            for segment, request in zip(stream.segments, partial[chunk], strict=True):
                yield request
                finite = run.decode(stream, segment, request, run.values(segment), add=True)
                if chunk == rank:
                    self._publish(run, segment, above, finite=finite)
                else:
                    self._pass_on(run, segment, above, finite=finite)
        for chunk in results:
            stream = state.receiver("sum", chunk)
            for segment, request in zip(stream.segments, summed[chunk], strict=True):
                yield request
                run.decode(stream, segment, request, run.values(segment), add=False)
                if chunk != above:
                    run.send(stream, segment, above, Tag.GATHER)
        yield run.sends

    @staticmethod
    def _pass_on(run: Run, segment: Segment, above: int, *, finite: bool) -> None:
        stream = run.state.sender("partial", segment.chunk)
        if finite:
            run.encode(stream, segment, run.values(segment))
        else:
            run.flag(stream, segment)
        run.send(stream, segment, above, Tag.SCATTER)

    @staticmethod
    def _publish(run: Run, segment: Segment, above: int, *, finite: bool) -> None:
        """Encode a finished sum of the own chunk, take the decoded values like everyone, and send it on."""
        stream, values = run.state.sender("sum", segment.chunk), run.values(segment)
        if finite:
            total = run.total(segment)
            total[:] = values
            run.encode(stream, segment, total, decoded=values)
        else:
            run.flag(stream, segment)
        run.send(stream, segment, above, Tag.GATHER)
