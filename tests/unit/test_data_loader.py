"""Background reading: the same batches for any number of readers, bounded look-ahead, errors in their place."""

import os
import threading

import numpy as np
import pytest

from mpitrain.config.schema import DataConfig
from mpitrain.data.dataset import Samples
from mpitrain.data.loader import Loader
from mpitrain.data.open import open_dataset
from mpitrain.data.sampler import Sampler

STEPS = 30
READERS = (0, 1, 2, 5)


class Numbers:
    """Stands for a data set: sample i holds i. Notes what is read.

    Fails where told, and waits for a signal after so many ``free`` batches.
    """

    def __init__(self, broken=(), gate=None, free=0):
        self.broken, self.gate, self.free = set(broken), gate, free
        self.calls, self.started = [], threading.Semaphore(0)

    def train(self, indices):
        self.calls.append(indices.tolist())
        self.started.release()
        if self.gate and len(self.calls) > self.free:
            assert self.gate.wait(30)
        found = self.broken & set(indices.tolist())
        if found:
            raise OSError(f"cannot read sample {found.pop()}")
        return Samples(indices.astype(np.float32)[:, None, None], indices)


def sampler(ranks=1, rank=0):
    return Sampler([23], 4, ranks=ranks, rank=rank, placement="shuffled", seed=0)


@pytest.fixture
def loaders():
    """Make loaders that are closed at the end, and check that no reader outlives them."""
    made = []

    def make(dataset, *, readers, steps=STEPS, ranks=1, rank=0):
        made.append(Loader(dataset, sampler(ranks, rank), steps=steps, readers=readers))
        return made[-1]

    yield make
    for loader in made:
        loader.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("reader")]


def expected(step, ranks=1, rank=0):
    return sampler(ranks, rank).indices(step).tolist()


@pytest.mark.parametrize("readers", READERS)
@pytest.mark.parametrize(("ranks", "rank"), [(1, 0), (3, 1), (5, 4)])
def test_any_number_of_readers_gives_the_batches_of_the_sampler(loaders, readers, ranks, rank):
    loader = loaders(Numbers(), readers=readers, ranks=ranks, rank=rank)
    for step in range(STEPS):
        indices, samples = loader.samples(step)
        assert indices.tolist() == samples.y.tolist() == samples.x.ravel().tolist() == expected(step, ranks, rank)


@pytest.mark.parametrize("readers", READERS)
def test_a_run_goes_on_at_any_step(loaders, readers):
    """Resumed runs start anywhere; going back or forth is right, too."""
    for first in range(STEPS):
        assert loaders(Numbers(), readers=readers).samples(first)[0].tolist() == expected(first)
    loader = loaders(Numbers(), readers=readers)
    for step in (7, 8, 20, 3, 3, 4, 29, 0):
        assert loader.samples(step)[1].y.tolist() == expected(step)


@pytest.mark.parametrize("readers", READERS[1:])
def test_a_bounded_number_of_batches_is_read_ahead(loaders, readers):
    gate = threading.Event()
    dataset = Numbers(gate=gate)
    loader = loaders(dataset, readers=readers)
    first = threading.Thread(target=loader.samples, args=(0,))
    first.start()
    for _ in range(readers):
        assert dataset.started.acquire(timeout=30)
    assert not dataset.started.acquire(blocking=False)  # every reader is busy
    gate.set()
    first.join(30)
    for _ in range(2):
        assert dataset.started.acquire(timeout=30)
    loader.close()
    assert sorted(dataset.calls) == sorted(expected(step) for step in range(readers + 2))


@pytest.mark.parametrize("readers", READERS)
def test_nothing_is_read_beyond_the_end_of_the_run(loaders, readers):
    dataset = Numbers()
    loader = loaders(dataset, readers=readers, steps=9)
    for step in range(9):
        loader.samples(step)
    loader.close()
    assert sorted(dataset.calls) == sorted(expected(step) for step in range(9))


@pytest.mark.parametrize("readers", READERS)
def test_an_error_is_raised_at_its_own_step(loaders, readers):
    sample = expected(11)[2]
    loader = loaders(Numbers(broken=[sample]), readers=readers)
    wrong = [step for step in range(18) if sample in expected(step)]
    assert 11 in wrong
    assert len(wrong) == 3  # once an epoch
    for step in range(18):
        if step in wrong:
            with pytest.raises(OSError, match=f"^cannot read sample {sample}$"):
                loader.samples(step)
        else:
            assert loader.samples(step)[1].y.tolist() == expected(step)


def test_closing_waits_for_the_readers_and_drops_what_they_have_not_begun(loaders):
    gate = threading.Event()
    dataset = Numbers(gate=gate, free=1)
    loader = loaders(dataset, readers=1)
    loader.samples(0)
    for _ in range(2):
        assert dataset.started.acquire(timeout=30)
    loader._drop()
    gate.set()
    loader.close()
    assert dataset.calls == [expected(0), expected(1)]
    loader.close()  # twice is once


def test_no_thread_starts_before_the_first_batch_and_none_without_readers(loaders):
    before = threading.active_count()
    loader, plain = loaders(Numbers(), readers=3), loaders(Numbers(), readers=0)
    plain.samples(0)
    assert threading.active_count() == before
    loader.samples(0)
    assert before < threading.active_count() <= before + 3


@pytest.mark.parametrize("kind", ["stations", "text"])
def test_real_data_are_the_same_bits_with_and_without_readers(loaders, monkeypatch, kind):
    """M17: and no process is forked for it."""

    def forbidden():
        raise AssertionError("a reader must not be a process")

    monkeypatch.setattr(os, "fork", forbidden)
    config = DataConfig(kind=kind, samples=23, test_samples=1, window=4)
    dataset = open_dataset(config, "lm" if kind == "text" else "classify", 0)
    dataset.load(np.arange(23), np.arange(1))
    found = []
    for readers in READERS:
        batches = [loaders(dataset, readers=readers).samples(step)[1] for step in range(STEPS)]
        found.append([(batch.x.tobytes(), batch.y.tobytes()) for batch in batches])
    assert found == [found[0]] * len(READERS)
