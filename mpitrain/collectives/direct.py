"""Direct: every rank sends chunk j straight to its owner j, and the owner sends the sum back to everyone.

Two latencies instead of the ring's 2(p-1) and two roundings instead of p, for the same bytes. The default wherever
every pair of ranks can talk.
"""

from collections.abc import Generator

from mpitrain.collectives.base import BucketState, Pending, Reducer, Run, Steps
from mpitrain.comm.frame import Tag
from mpitrain.comm.waiting import Requests
from mpitrain.kernels.reduce import add, count_not_finite


class Direct(Reducer):
    """Rank r owns chunk r and adds the contributions to it in the order of the ranks."""

    name = "direct"

    def prepare(self, state: BucketState) -> None:
        """Make a stream to and from every other rank, and the owner's sum."""
        own = self.axis.rank
        for peer in self._peers():
            state.frame(f"to.{peer}", state.sender("part", peer))
            state.frame(f"from.{peer}", state.receiver(f"part{peer}", own))
            state.frame(f"sum.{peer}", state.receiver("sum", peer))
        state.frame(f"sum.{own}", state.sender("sum", own))
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
        """Scatter contributions, add up the own chunk, gather the sums."""
        sums = self._post_sums(run)
        finite = yield from self._scatter(run)
        yield from self._gather(run, sums, finite=finite)
        yield run.sends

    def _scatter_alone(self, run: Run) -> Steps:
        yield from self._scatter(run)
        run.nonfinite |= count_not_finite(run.state.total) > 0
        yield run.sends

    def _gather_alone(self, run: Run) -> Steps:
        run.state.total[:] = run.chunk(run.axis.rank)
        yield from self._gather(run, self._post_sums(run), finite=True)
        yield run.sends

    def _owners(self, run: Run) -> list[int]:
        """List the other ranks that own anything."""
        return [peer for peer in self._peers() if _filled(run, peer)]

    def _post_sums(self, run: Run) -> dict[int, Requests]:
        frames = run.state.frames
        return {peer: run.post(frames[f"sum.{peer}"], peer, Tag.GATHER) for peer in self._owners(run)}

    def _scatter(self, run: Run) -> Generator[Requests, None, bool]:
        """Send contributions to their owners and add up the own chunk; return whether all of it was finite."""
        state, own = run.state, run.axis.rank
        helpers = self._peers() if _filled(run, own) else []
        parts = {peer: run.post(state.frames[f"from.{peer}"], peer, Tag.SCATTER) for peer in helpers}
        for owner in self._owners(run):
            run.encode(state.sender("part", owner), state.frames[f"to.{owner}"], run.chunk(owner), owner)
            run.send(state.frames[f"to.{owner}"], owner, Tag.SCATTER)
        finite = True
        for rank in sorted([own, *helpers]):
            if rank == own:
                self._add_own(run)
            else:
                yield parts[rank]
                memory, frame = state.receiver(f"part{rank}", own), state.frames[f"from.{rank}"]
                finite &= run.decode(memory, frame, parts[rank], own, state.total, add=rank > 0)
        return finite

    def _gather(self, run: Run, sums: dict[int, Requests], *, finite: bool) -> Steps:
        """Publish the own sum and take those of the others."""
        if _filled(run, run.axis.rank):
            self._publish(run, finite=finite)
        for owner, request in sums.items():
            yield request
            memory, frame = run.state.receiver("sum", owner), run.state.frames[f"sum.{owner}"]
            run.decode(memory, frame, request, owner, run.chunk(owner), add=False)

    @staticmethod
    def _add_own(run: Run) -> None:
        own = run.axis.rank
        if own == 0:
            run.state.total[:] = run.chunk(own)
        else:
            add(run.chunk(own), run.state.total)

    def _publish(self, run: Run, *, finite: bool) -> None:
        """Encode the finished sum once, take the decoded values like everyone, and send it to all."""
        own = run.axis.rank
        frame = run.state.frames[f"sum.{own}"]
        if finite:
            run.encode(run.state.sender("sum", own), frame, run.state.total, own, decoded=run.chunk(own))
        else:
            run.flag(frame, own)
        for peer in self._peers():
            run.send(frame, peer, Tag.GATHER)


def _filled(run: Run, rank: int) -> bool:
    start, stop = run.state.chunks[rank]
    return stop > start
