"""A one-process twin of local steps: all replicas in one loop, their sums by the twins of the collectives."""

import numpy as np

from tests.reference.optimizers import merged, outer_step


class LocalTwin:
    """All replicas of one model, as flat vectors.

    Parameters
    ----------
    weights : (n,) array
        Where all replicas start.
    ranks : int
    buckets : list of (start, stop, twin)
        Ranges, each with a `tests.reference.collectives.Twin`.
    dealt : list of list of int
        Buckets of each fragment.
    """

    def __init__(self, weights, ranks, buckets, dealt, *, h, lr, mu, delay=0, merge=0.0):
        self.weights, self.momentum = weights.copy(), np.zeros_like(weights)
        self.replicas = [weights.copy() for _ in range(ranks)]
        self.buckets, self.dealt = buckets, dealt
        self.h, self.lr, self.mu, self.delay, self.merge = h, lr, mu, delay, merge
        self.samples = np.zeros((len(dealt), ranks))
        self.due = np.zeros(len(dealt))
        self.sent = {}
        self.skipped = 0

    def step(self, turn, length, moves, samples, due):
        """Move every replica by its vector, then send and apply what is due after step ``turn`` of ``length``.

        ``due`` is the number of samples that all replicas should have used, ``samples`` what each did use.
        """
        self.replicas = [replica + move for replica, move in zip(self.replicas, moves, strict=True)]
        self.samples += samples
        self.due += due
        ends = [-(-(k + 1) * self.h // len(self.dealt)) for k in range(len(self.dealt))]
        for k, end in enumerate(ends):
            if min(end - self.delay, length) == turn:
                self._send(k)
        for k, end in enumerate(ends):
            if min(end, length) == turn:
                self._apply(k)

    def _send(self, k):
        scalar = self.weights.dtype.type
        shares = [scalar(samples / self.due[k]) for samples in self.samples[k]]
        changes = {}
        for index in self.dealt[k]:
            start, stop, twin = self.buckets[index]
            parts = [
                (self.weights[start:stop] - replica[start:stop]) * share
                for replica, share in zip(self.replicas, shares, strict=True)
            ]
            if all(np.isfinite(part).all() for part in parts):
                changes[index] = (parts, twin)
        self.sent[k] = changes, self.due[k], sum(self.samples[k].tolist())
        self.samples[k], self.due[k] = 0, 0

    def _apply(self, k):
        changes, due, samples = self.sent.pop(k)
        accepted = len(changes) == len(self.dealt[k]) and samples > 0
        self.skipped += not accepted
        self.samples[k] *= self.merge if accepted else 0
        self.due[k] *= self.merge if accepted else 0
        for index in self.dealt[k]:
            start, stop, _ = self.buckets[index]
            if accepted:
                self._outer(start, stop, *changes[index], due / samples)
            for replica in self.replicas:
                kept = self.merge if accepted else 0.0
                replica[start:stop] = merged(replica[start:stop], self.weights[start:stop], kept)

    def _outer(self, start, stop, parts, twin, factor):
        scalar = self.weights.dtype.type
        change = twin.sum(parts, [0] * len(parts)) * scalar(factor)
        alone = len(self.replicas) == 1 and not self.delay
        mean = self.replicas[0][start:stop] if alone else self.weights[start:stop] - change
        moved = outer_step(mean, change, self.momentum[start:stop], lr=self.lr, mu=self.mu)
        self.weights[start:stop], self.momentum[start:stop] = moved
