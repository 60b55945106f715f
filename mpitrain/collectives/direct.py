"""Direct: every rank sends chunk j straight to its owner j, and the owner sends the sum back to everyone.

Two latencies instead of the ring's 2(p-1) and two roundings instead of p, for the same bytes. The default wherever
every pair of ranks can talk. The sum of a segment goes out as soon as all have contributed to it, while later segments
are still on their way to the owner.
"""

from mpitrain.collectives.base import BucketState
from mpitrain.collectives.reducer import Pending, Reducer
from mpitrain.collectives.run import Run, Steps, Together
from mpitrain.collectives.segments import Segment, in_turns
from mpitrain.comm.frame import Tag
from mpitrain.comm.waiting import Requests
from mpitrain.kernels.reduce import add, count_not_finite

Posted = dict[int, list[Requests]]
"""The receives of all segments, by the rank from which they come."""


class Direct(Reducer):
    """Rank r owns chunk r and adds the contributions to it in the order of the ranks."""

    name = "direct"

    def prepare(self, state: BucketState) -> None:
        """Make a stream to and from every other rank, and the owner's sum."""
        own = self.axis.rank
        for peer in self._peers():
            state.sender("part", peer)
            state.receiver(f"part{peer}", own)
            state.receiver("sum", peer)
        state.sender("sum", own)
        state.own(own)

    def _peers(self) -> list[int]:
        """List the other ranks, beginning behind this one, so that not everyone writes to rank 0 first."""
        rank, ranks = self.axis.rank, self.axis.size
        return [(rank + hop) % ranks for hop in range(1, ranks)]

    def scatter(self, state: BucketState, key: int = 0) -> Pending:
        """Start the first half alone, a reduce-scatter: ``state.total`` becomes the sum of the chunk of this rank.

        Collective over the axis, like ``start``. ``nonfinite`` of the result tells of this rank's part in it only.
        """
        return self._start(state, key, self._scatter_alone)

    def gather(self, state: BucketState, key: int = 0) -> Pending:
        """Start the second half alone, an all-gather: every chunk becomes that of its owner, as its codec left it.

        Collective over the axis, like ``start``.
        """
        return self._start(state, key, self._gather_alone)

    def steps(self, run: Run) -> Steps:
        """Contribute to the chunks of others, add up and publish the own one, collect the sums, all side by side."""
        sums, parts = self._post_sums(run), self._post_parts(run)
        yield Together(self._contribute(run), self._reduce(run, parts, publish=True), *self._collect(run, sums))
        yield run.sends

    def _scatter_alone(self, run: Run) -> Steps:
        parts = self._post_parts(run)
        yield Together(self._contribute(run), self._reduce(run, parts, publish=False))
        run.nonfinite |= count_not_finite(run.state.total) > 0
        yield run.sends

    def _gather_alone(self, run: Run) -> Steps:
        sums = self._post_sums(run)
        yield Together(self._publish_all(run), *self._collect(run, sums))
        yield run.sends

    def _post_sums(self, run: Run) -> Posted:
        return {peer: run.post(run.state.receiver("sum", peer), peer, Tag.GATHER) for peer in self._peers()}

    def _post_parts(self, run: Run) -> Posted:
        state, own = run.state, run.axis.rank
        return {peer: run.post(state.receiver(f"part{peer}", own), peer, Tag.SCATTER) for peer in self._peers()}

    def _contribute(self, run: Run) -> Steps:
        """Send contributions to their owners, a segment to each in turn: all links have something to do at once."""
        for segment in in_turns([run.state.segments[owner] for owner in self._peers()]):
            stream = run.state.sender("part", segment.chunk)
            run.encode(stream, segment, run.values(segment))
            run.send(stream, segment, segment.chunk, Tag.SCATTER)
            yield run.turn

    def _reduce(self, run: Run, parts: Posted, *, publish: bool) -> Steps:
        """Add up the own chunk, in the order of the ranks, and publish what is complete."""
        own = run.axis.rank
        for segment in run.state.segments[own]:
            total, finite = run.total(segment), True
            for rank in range(run.axis.size):
                if rank == own:
                    self._add_own(run, segment)
                else:
                    request = parts[rank][segment.index]
                    yield request
                    stream = run.state.receiver(f"part{rank}", own)
                    finite &= run.decode(stream, segment, request, total, add=rank > 0)
            if publish:
                self._publish(run, segment, finite=finite)

    @staticmethod
    def _add_own(run: Run, segment: Segment) -> None:
        values, total = run.values(segment), run.total(segment)
        if segment.chunk == 0:  # the first rank's contribution is the first
            total[:] = values
        else:
            add(values, total)

    def _publish_all(self, run: Run) -> Steps:
        for segment in run.state.segments[run.axis.rank]:
            run.total(segment)[:] = run.values(segment)
            self._publish(run, segment, finite=True)
            yield run.turn

    def _publish(self, run: Run, segment: Segment, *, finite: bool) -> None:
        """Encode a finished sum once, take the decoded values like everyone, and send it to all."""
        stream = run.state.sender("sum", segment.chunk)
        if finite:
            run.encode(stream, segment, run.total(segment), decoded=run.values(segment))
        else:
            run.flag(stream, segment)
        for peer in self._peers():
            run.send(stream, segment, peer, Tag.GATHER)

    @staticmethod
    def _collect(run: Run, sums: Posted) -> list[Steps]:
        """Take the sums of the other owners, of each as they come."""

        def collect(owner: int, requests: list[Requests]) -> Steps:
            stream = run.state.receiver("sum", owner)
            for segment, request in zip(stream.segments, requests, strict=True):
                yield request
                run.decode(stream, segment, request, run.values(segment), add=False)

        return [collect(owner, requests) for owner, requests in sums.items()]
