"""A one-process twin of a synchronous parameter server: the same streams, driven in a loop instead of by messages."""

import numpy as np

from mpitrain.codecs.memory import RECEIVERS, SENDERS
from mpitrain.codecs.noise import noise_key


def through(sender, receiver, x, key=0):
    """Send ``x`` through a stream and return what arrives."""
    wire = np.zeros(sender.max_nbytes(sender.size) + 64, np.uint8)
    out = np.zeros_like(x)
    nbytes, nonfinite = sender.encode(np.ascontiguousarray(x), wire, None, key=key, first=0)
    assert not nonfinite
    receiver.decode(wire[:nbytes], out)
    sender.commit()
    receiver.commit()
    return out


class ServerTwin:
    """Weights, optimizer and all streams of one server and its workers.

    ``pieces`` are the buckets; weights and gradients are lists with one array a bucket. ``step(gradients, move)`` takes
    those of every worker, lets ``move(bucket, sum)`` change ``weights`` and returns what every worker then holds.
    """

    def __init__(self, pieces, down, weights, workers):
        self.weights = [w.copy() for w in weights]
        self.held = [[w.copy() for w in weights] for _ in range(workers)]
        self._up = {}
        self._down = {}
        for piece in pieces:
            for worker in range(workers):
                self._up[piece.index, worker] = (
                    SENDERS[piece.memory](piece.codec, piece.size),
                    RECEIVERS[piece.memory](piece.codec, piece.size),
                )
                kind = "none" if down.wire_id == "raw" else "delta"
                pair = SENDERS[kind](down, piece.size), RECEIVERS[kind](down, piece.size)
                for end in pair:
                    for state in end.states().values():
                        state.current[:] = weights[piece.index]
                self._down[piece.index, worker] = pair

    def sums(self, gradients, clock, seed=0):
        """Return the sums of the buckets, worker after worker."""
        totals = [np.zeros_like(w) for w in self.weights]
        for worker, grads in enumerate(gradients):
            for index, grad in enumerate(grads):
                key = noise_key(seed, clock, worker, index)
                totals[index] += through(*self._up[index, worker], grad, key)
        return totals

    def answer(self, worker):
        """Send one worker what has changed of the weights; returns what it then holds."""
        held = self.held[worker]
        for index, weights in enumerate(self.weights):
            held[index] = through(*self._down[index, worker], weights)
        return held

    def publish(self, *, refresh=False):
        """Send the weights to all workers: what has changed, or (``refresh``) the weights themselves."""
        for worker, held in enumerate(self.held):
            if not refresh:
                self.answer(worker)
                continue
            for index, weights in enumerate(self.weights):
                held[index] = weights.copy()
                for end in self._down[index, worker]:
                    for state in end.states().values():
                        state.current[:] = weights
        return self.held
