"""Direct: every rank sends chunk j straight to its owner j, and the owner sends the sum back to everyone.

Two latencies instead of the ring's 2(p-1) and two roundings instead of p, for the same bytes. The default wherever
every pair of ranks can talk.
"""

from mpitrain.collectives.base import BucketState, Reducer, Run, Steps
from mpitrain.comm.frame import Tag
from mpitrain.kernels.reduce import add


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

    def steps(self, run: Run) -> Steps:
        """Scatter contributions, add up the own chunk, gather the sums."""
        state, own = run.state, run.axis.rank
        filled = [stop > start for start, stop in state.chunks]
        owners = [peer for peer in self._peers() if filled[peer]]
        helpers = self._peers() if filled[own] else []
        parts = {peer: run.post(state.frames[f"from.{peer}"], peer, Tag.SCATTER) for peer in helpers}
        sums = {peer: run.post(state.frames[f"sum.{peer}"], peer, Tag.GATHER) for peer in owners}

        for owner in owners:
            run.encode(state.sender("part", owner), state.frames[f"to.{owner}"], run.chunk(owner), owner)
            run.send(state.frames[f"to.{owner}"], owner, Tag.SCATTER)

        if filled[own]:
            finite = True
            for rank in range(run.axis.size):
                if rank == own:
                    self._add_own(run)
                else:
                    yield parts[rank]
                    memory, frame = state.receiver(f"part{rank}", own), state.frames[f"from.{rank}"]
                    finite &= run.decode(memory, frame, parts[rank], own, state.total, add=rank > 0)
            self._publish(run, finite=finite)

        for owner in owners:
            yield sums[owner]
            frame = state.frames[f"sum.{owner}"]
            run.decode(state.receiver("sum", owner), frame, sums[owner], owner, run.chunk(owner), add=False)
        yield run.sends

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
