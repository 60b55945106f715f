"""Ring: reduce-scatter, then all-gather, each rank speaking to its two neighbours only.

2(p-1) messages a rank, one after the other; 2(p-1)/p of the vector each way. Every hop encodes the partial sum anew.
For stations wired as a ring or chain (Patarasuk and Yuan, 2009).
"""

from mpitrain.collectives.base import BucketState, Reducer, Run, Steps
from mpitrain.comm.frame import Tag


class Ring(Reducer):
    """Rank r owns chunk r; partial sums of chunk j start at rank j + 1 and travel upwards to rank j."""

    name = "ring"

    def prepare(self, state: BucketState) -> None:
        """Make one stream a chunk: out and in for partial sums, one for the result."""
        rank, ranks = self.axis.rank, self.axis.size
        for chunk in range(ranks):
            if chunk != rank:
                state.frame(f"partial.out.{chunk}", state.sender("partial", chunk))
            if chunk != (rank - 1) % ranks:
                state.frame(f"partial.in.{chunk}", state.receiver("partial", chunk))
            end = state.sender("sum", chunk) if chunk == rank else state.receiver("sum", chunk)
            state.frame(f"sum.{chunk}", end)
        state.own(rank)

    def steps(self, run: Run) -> Steps:
        """Pass partial sums on until every owner has its own, then pass the sums on."""
        state, rank, ranks = run.state, run.axis.rank, run.axis.size
        above, below = (rank + 1) % ranks, (rank - 1) % ranks
        filled = [stop > start for start, stop in state.chunks]
        incoming = [(rank - hop - 2) % ranks for hop in range(ranks - 1)]
        results = [(rank - hop - 1) % ranks for hop in range(ranks - 1)]
        partial = {c: run.post(state.frames[f"partial.in.{c}"], below, Tag.SCATTER) for c in incoming if filled[c]}
        summed = {c: run.post(state.frames[f"sum.{c}"], below, Tag.GATHER) for c in results if filled[c]}

        finite = True
        for leaving, arriving in zip(results, incoming, strict=True):
            if filled[leaving]:
                self._pass_on(run, leaving, above, finite=finite)
            finite = True
            if filled[arriving]:
                yield partial[arriving]
                frame, memory = state.frames[f"partial.in.{arriving}"], state.receiver("partial", arriving)
                finite = run.decode(memory, frame, partial[arriving], arriving, run.chunk(arriving), add=True)

        if filled[rank]:
            self._publish(run, above, finite=finite)
        for chunk in results:
            if filled[chunk]:
                yield summed[chunk]
                frame = state.frames[f"sum.{chunk}"]
                run.decode(state.receiver("sum", chunk), frame, summed[chunk], chunk, run.chunk(chunk), add=False)
                if chunk != above:
                    run.send(frame, above, Tag.GATHER)
        yield run.sends

    @staticmethod
    def _pass_on(run: Run, chunk: int, above: int, *, finite: bool) -> None:
        frame = run.state.frames[f"partial.out.{chunk}"]
        if finite:
            run.encode(run.state.sender("partial", chunk), frame, run.chunk(chunk), chunk)
        else:
            run.flag(frame, chunk)
        run.send(frame, above, Tag.SCATTER)

    @staticmethod
    def _publish(run: Run, above: int, *, finite: bool) -> None:
        """Encode the finished sum of the own chunk, take the decoded values like everyone, and send it on."""
        own = run.axis.rank
        frame, values = run.state.frames[f"sum.{own}"], run.chunk(own)
        if finite:
            run.state.total[:] = values
            run.encode(run.state.sender("sum", own), frame, run.state.total, own, decoded=values)
        else:
            run.flag(frame, own)
        run.send(frame, above, Tag.GATHER)
