"""What both ends of a channel remember of each sample's activations (AQ-SGD, Wang et al., 2022).

Shape suffixes: B samples of a message, E elements of one sample, K slots.
"""

import numpy as np
import numpy.typing as npt

from mpitrain.arrays import Floats, Ints

FREE = -1
"""Marks a slot that belongs to no sample."""


class References:
    """The last decoded activations of as many samples as fit.

    A sample gets a slot when it first appears, until there is none left; both ends of a channel see the same samples in
    the same order, so they decide alike. What a step writes becomes valid with ``commit``; of a sample that appears
    several times in a step, every message starts from what the last step left, and the last one remains.

    Parameters
    ----------
    elements : int
        E.
    num_samples : int
        How many different samples can ever appear.
    budget_bytes : int
        Bound of the slots' memory.
    dtype : dtype

    Attributes
    ----------
    hits, misses : int
        Samples so far that had a past, and that had none.
    """

    def __init__(self, elements: int, num_samples: int, budget_bytes: int, dtype: npt.DTypeLike) -> None:
        fitting = budget_bytes // max(1, elements * np.dtype(dtype).itemsize)
        self.capacity = min(num_samples, fitting)
        self.hits = self.misses = 0
        # numpy's zeros take memory from the system only as they are written.
        self._values_KE: Floats = np.zeros((self.capacity, elements), dtype)
        self._owners_K: npt.NDArray[np.int64] = np.full(self.capacity, FREE, np.int64)
        self._slots: dict[int, int] | None = {}
        self._new: dict[int, int] = {}
        self._staged: list[tuple[Ints, Floats]] = []
        self._staged_peak = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the slots and of the most that a step has written ahead of its commit."""
        return self._values_KE.nbytes + self._owners_K.nbytes + self._staged_peak

    def look_up(self, samples_B: Ints) -> tuple[Floats, Ints]:
        """Return the past of the samples, zeros where there is none, and their slots, `FREE` where none is left."""
        known = self._known()
        slots_B = np.array([self._slot(int(sample), known) for sample in samples_B], np.int64)
        past_BE: Floats = np.zeros((len(samples_B), self._values_KE.shape[1]), self._values_KE.dtype)
        hit_B = np.array([int(sample) in known for sample in samples_B], bool)
        past_BE[hit_B] = self._values_KE[slots_B[hit_B]]
        self.hits += int(hit_B.sum())
        self.misses += int((~hit_B).sum())
        return past_BE, slots_B

    def _slot(self, sample: int, known: dict[int, int]) -> int:
        if sample in known:
            return known[sample]
        following = len(known) + len(self._new)
        if sample not in self._new and following < self.capacity:
            self._new[sample] = following
        return self._new.get(sample, FREE)

    def stage(self, slots_B: Ints, values_BE: Floats) -> None:
        """Remember values for the next step; kept, not copied, where all have slots, so nobody may change them."""
        kept_B = slots_B != FREE
        self._staged.append((slots_B, values_BE) if kept_B.all() else (slots_B[kept_B], values_BE[kept_B]))
        self._staged_peak = max(self._staged_peak, sum(values.nbytes for _, values in self._staged))

    def commit(self) -> None:
        """Make what the step wrote the past of the next one."""
        known = self._known()
        for sample, slot in self._new.items():
            self._owners_K[slot] = sample
        known.update(self._new)
        for slots_B, values_BE in self._staged:
            self._values_KE[slots_B] = values_BE  # of equal slots, numpy keeps the last
        self.rollback()

    def rollback(self) -> None:
        """Forget what the step wrote."""
        self._new, self._staged = {}, []

    def state(self) -> dict[str, Floats | Ints]:
        """Return the live arrays that a checkpoint keeps, between steps; to restore, write into them at once."""
        self._slots = None  # the owners may be about to change
        return {"owners": self._owners_K, "values": self._values_KE}

    def _known(self) -> dict[int, int]:
        if self._slots is None:
            self._slots = {int(sample): slot for slot, sample in enumerate(self._owners_K) if sample != FREE}
        return self._slots
