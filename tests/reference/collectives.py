"""One-process twins of the collectives: the same streams, driven in a loop over ranks instead of by messages."""

import numpy as np

from mpitrain.codecs.memory import RECEIVERS, SENDERS
from mpitrain.partition import bounds, chunk_bounds, split_sizes


class Twin:
    """All ranks of one collective.

    ``sum(contributions, keys)`` takes one array a rank and returns the decoded sum, the same for every rank.
    """

    def __init__(self, codec, memory, size, ranks):
        self.codec, self.memory, self.size, self.ranks = codec, memory, size, ranks
        self.chunks = chunk_bounds(size, ranks, codec.block)
        self.streams = {}

    def _stream(self, name, chunk):
        start, stop = self.chunks[chunk]
        if name not in self.streams:
            self.streams[name] = (
                SENDERS[self.memory](self.codec, stop - start),
                RECEIVERS[self.memory](self.codec, stop - start),
            )
        return self.streams[name]

    def _through(self, name, chunk, x, key):
        """Send ``x`` through a stream and return what arrives."""
        sender, receiver = self._stream(name, chunk)
        wire = np.zeros(sender.max_nbytes(x.size) + 64, np.uint8)
        out = np.zeros_like(x)
        nbytes, nonfinite = sender.encode(np.ascontiguousarray(x), wire, None, key=key, first=self.chunks[chunk][0])
        assert not nonfinite
        receiver.decode(wire[:nbytes], out)
        sender.commit()
        receiver.commit()
        return out

    def sum(self, contributions, keys):
        if self.ranks == 1:
            return contributions[0].copy()
        result = np.empty_like(contributions[0])
        for owner, (start, stop) in enumerate(self.chunks):
            if stop > start:
                parts = [values[start:stop] for values in contributions]
                total = self.reduce(owner, parts, keys)
                result[start:stop] = self._through(f"sum{owner}", owner, total, keys[owner])
        return result


class DirectTwin(Twin):
    """Contributions are rounded once each and added in the order of ranks."""

    def reduce(self, owner, parts, keys):
        total = None
        for rank, part in enumerate(parts):
            value = part if rank == owner else self._through(f"{rank}to{owner}", owner, part, keys[rank])
            total = value.copy() if total is None else total + value
        return total


class ServerTwin(DirectTwin):
    """The same, but only the last ranks own chunks: whole blocks of the codec, larger shares first."""

    def __init__(self, codec, memory, size, ranks, servers=1):
        super().__init__(codec, memory, size, ranks)
        blocks = bounds(split_sizes(-(-size // codec.block), servers))
        shares = [(min(a * codec.block, size), min(b * codec.block, size)) for a, b in blocks]
        self.chunks = [(0, 0)] * (ranks - servers) + shares


class RingTwin(Twin):
    """The partial sum of chunk j starts at rank j + 1 and is rounded at every hop."""

    def reduce(self, owner, parts, keys):
        total = parts[(owner + 1) % self.ranks]
        for hop in range(1, self.ranks):
            sender, taker = (owner + hop) % self.ranks, (owner + hop + 1) % self.ranks
            total = parts[taker] + self._through(f"{sender}to{taker}of{owner}", owner, total, keys[sender])
        return total
