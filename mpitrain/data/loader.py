"""Reading in the background: the batches of the next steps are gathered while the loop computes.

By threads, never by forked processes: a fork copies MPI's state, open files and locks at some moment, and none of them
may be used in the copy.
"""

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

from mpitrain.data.dataset import Dataset, Samples
from mpitrain.data.sampler import Indices, Sampler


class Loader:
    """Hands out this rank's batches in the order of steps, the same ones for any number of readers.

    Parameters
    ----------
    dataset : Dataset
        Loaded; it is only read.
    sampler : Sampler
        Asked by the calling thread alone.
    steps : int
        Length of the run: no batch beyond it is prepared.
    readers : int
        Threads; ``readers`` + 1 batches beyond the one asked for are under way. 0: batches are gathered when asked for.
    """

    def __init__(self, dataset: Dataset, sampler: Sampler, *, steps: int, readers: int) -> None:
        self._dataset, self._sampler, self._steps = dataset, sampler, steps
        self._ahead = readers + 1
        # Threads start with the first batch, not here.
        self._pool = ThreadPoolExecutor(readers, thread_name_prefix="reader") if readers else None
        self._next = 0
        self._coming: deque[tuple[Indices, Future[Samples]]] = deque()

    def samples(self, step: int) -> tuple[Indices, Samples]:
        """Return this rank's global indices at a step (0, 1, …) and their samples, possibly none.

        Steps are meant to follow each other. Any other one, the first of a resumed run for instance, is right, too,
        but what was prepared is dropped.

        Raises
        ------
        Exception
            What the reader of this batch met; later batches are not affected.
        """
        if self._pool is None:
            indices = self._sampler.indices(step)
            return indices, self._dataset.train(indices)
        if step != self._next - len(self._coming):
            self._drop()
            self._next = step
        while self._next <= max(step, min(step + self._ahead, self._steps - 1)):
            indices = self._sampler.indices(self._next)
            self._coming.append((indices, self._pool.submit(self._dataset.train, indices)))
            self._next += 1
        indices, batch = self._coming.popleft()
        return indices, batch.result()

    def close(self) -> None:
        """Wait until every reader has ended; batches that no reader has begun are dropped."""
        self._drop()
        if self._pool is not None:
            self._pool.shutdown()

    def _drop(self) -> None:
        for _, batch in self._coming:
            batch.cancel()
        self._coming.clear()
