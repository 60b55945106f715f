"""The sampler: every sample once an epoch, on one rank, in the same number of steps everywhere."""

import numpy as np
import pytest

from mpitrain.data.sampler import Sampler, assign_groups, split_test
from mpitrain.errors import DataError

PLACEMENTS = ("station", "shuffled")
SIZES = ([10], [7, 5, 1, 3, 2], [40, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1], [64, 64, 64, 64, 64])
RANKS = range(1, 6)


def samplers(sizes, batch, ranks, placement, seed=0):
    return [Sampler(sizes, batch, ranks=ranks, rank=rank, placement=placement, seed=seed) for rank in range(ranks)]


def epoch_of(group, epoch):
    """Indices of each rank and step of an epoch."""
    steps = group[0].steps_per_epoch
    return [[s.indices(step) for step in range(epoch * steps, (epoch + 1) * steps)] for s in group]


CASES = [
    (sizes, batch, ranks, placement)
    for sizes in SIZES
    for batch in (1, 2, 7, 1000)
    for ranks in RANKS
    for placement in PLACEMENTS
    if placement == "shuffled" or ranks <= len(sizes)
]


@pytest.mark.parametrize(("sizes", "batch", "ranks", "placement"), CASES)
def test_each_sample_once_an_epoch_and_only_owned_ones(sizes, batch, ranks, placement):
    group = samplers(sizes, batch, ranks, placement)
    total = sum(sizes)
    for epoch in (0, 3):
        parts = epoch_of(group, epoch)
        assert sorted(np.concatenate([step for rank in parts for step in rank])) == list(range(total))
        for sampler, steps in zip(group, parts, strict=True):
            assert np.isin(np.concatenate(steps), sampler.owned).all()
        for turn in range(group[0].steps_per_epoch):
            together = sum(len(rank[turn]) for rank in parts)
            counts = {s.global_count(epoch * s.steps_per_epoch + turn) for s in group}
            assert counts == {together}
            assert 1 <= together <= batch
    assert {s.steps_per_epoch for s in group} == {-(-total // batch)}


def test_d01_uneven_batches_take_the_same_steps_on_all_ranks():
    for placement, sizes in (("shuffled", [10]), ("station", [7, 2, 1])):
        group = samplers(sizes, 2, 3, placement)
        assert [s.steps_per_epoch for s in group] == [5, 5, 5]
        for epoch in range(2):
            used = np.concatenate([step for rank in epoch_of(group, epoch) for step in rank])
            assert sorted(used) == list(range(10))


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("samples", [3, 0])
def test_d02_more_ranks_than_samples_is_refused_on_every_rank(placement, samples):
    for rank in range(5):
        with pytest.raises(DataError, match=rf"^data: {samples} training samples, but 5 ranks; start at most"):
            Sampler([samples], 2, ranks=5, rank=rank, placement=placement, seed=0)


def test_fewer_groups_than_ranks_is_refused_with_both_numbers():
    with pytest.raises(DataError, match=r'2 groups with training samples, but 3 ranks.*placement = "shuffled"'):
        Sampler([10, 10, 0], 2, ranks=3, rank=0, placement="station", seed=0)


def test_d02_one_test_sample_leaves_the_other_ranks_without():
    assert [list(split_test(1, 5, rank)) for rank in range(5)] == [[0], [], [], [], []]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("num_test", [0, 1, 4, 5, 23])
def test_test_parts_are_contiguous_and_complete(ranks, num_test):
    parts = [split_test(num_test, ranks, rank) for rank in range(ranks)]
    assert np.concatenate(parts).tolist() == list(range(num_test))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_d05_order_differs_by_epoch_and_repeats_by_seed(placement):
    first, again, other = (samplers([4, 4, 4], 4, 3, placement, seed) for seed in (0, 0, 1))
    orders = [np.concatenate([np.concatenate(rank) for rank in epoch_of(first, epoch)]).tolist() for epoch in range(3)]
    assert len({tuple(order) for order in orders}) == 3
    assert [sorted(order) for order in orders] == [list(range(12))] * 3  # ranks are disjoint, and together complete
    backwards = {epoch: epoch_of(again, epoch) for epoch in (2, 0, 1)}
    for epoch in range(3):
        assert np.concatenate([np.concatenate(rank) for rank in backwards[epoch]]).tolist() == orders[epoch]
    assert np.concatenate([np.concatenate(rank) for rank in epoch_of(other, 0)]).tolist() != orders[0]


def test_a_shuffled_batch_is_the_same_for_any_number_of_ranks():
    def batches(ranks):
        group = samplers([9, 14], 5, ranks, "shuffled")
        return [np.concatenate([s.indices(step) for s in group]).tolist() for step in range(12)]

    assert [len(batch) for batch in batches(1)[:5]] == [5, 5, 5, 5, 3]
    for ranks in RANKS:
        assert batches(ranks) == batches(1)


def test_shuffled_shares_of_a_batch_differ_by_at_most_one():
    assert [len(s.indices(0)) for s in samplers([100], 10, 4, "shuffled")] == [3, 3, 2, 2]


def test_station_ranks_contribute_in_proportion_to_what_they_own():
    group = samplers([600, 300, 100], 50, 3, "station")
    for step in range(20):
        shares = [len(s.indices(step)) for s in group]
        assert sum(shares) == 50
        assert np.abs(np.array(shares) - [30, 15, 5]).max() <= 1


def test_a_group_lies_whole_on_one_rank():
    sizes = [5, 9, 1, 7, 7]
    owners = assign_groups(sizes, 3)
    assert sorted(group for groups in owners for group in groups) == list(range(5))
    assert owners == [[1], [0, 3], [2, 4]]
    for rank, sampler in enumerate(samplers(sizes, 4, 3, "station")):
        starts = np.cumsum([0, *sizes])
        expected = np.concatenate([np.arange(starts[g], starts[g + 1]) for g in owners[rank]])
        assert sampler.owned.tolist() == expected.tolist()
