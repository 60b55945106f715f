"""What ranks tell each other outside of the hot path."""

import numpy as np
import pytest

from mpitrain.comm.agreement import NumberGather, agree, broadcast, first_on_node, gather, same_everywhere, sum_arrays
from mpitrain.comm.grid import Axis, ProcessGrid
from mpitrain.errors import CheckpointError, ConfigError, DataError
from mpitrain.partition import GridShape


def test_gather_keeps_the_order_of_ranks(axis):
    values = gather(axis, {"rank": axis.rank, "text": "ä" * axis.rank})
    assert values == [{"rank": rank, "text": "ä" * rank} for rank in range(axis.size)]


def test_a_failure_on_one_rank_is_raised_on_all(axis):
    last = axis.size - 1

    def action():
        if axis.rank == last:
            raise DataError("file.csv: row 3 is torn")
        return axis.rank

    prefix = "" if axis.size == 1 else f"rank {last}: "
    with pytest.raises(DataError, match=f"^{prefix}file.csv: row 3 is torn$") as caught:
        agree(axis, action)
    assert caught.value.agreed
    assert agree(axis, lambda: axis.rank) == axis.rank


def test_the_lowest_rank_speaks(axis):
    kinds = [CheckpointError, ConfigError]

    def action():
        raise kinds[axis.rank > 0](f"from {axis.rank}")

    with pytest.raises(CheckpointError, match="from 0"):
        agree(axis, action)


def test_a_failure_that_all_share_is_told_without_a_rank(axis):
    def action():
        raise ConfigError("the same everywhere")

    with pytest.raises(ConfigError, match=r"^the same everywhere$"):
        agree(axis, action)


def test_differences_are_named(axis):
    same_everywhere(axis, [1, 2, 3], "things")
    if axis.size > 1:
        with pytest.raises(ConfigError, match=r"things differ: rank 0 has 2, rank 1 has 5"):
            same_everywhere(axis, [1, 2 if axis.rank != 1 else 5, 3], "things")


@pytest.mark.parametrize("piece_bytes", [1000, 64 * 1024, 2**30])
def test_broadcast_in_pieces(axis, piece_bytes):
    size = 1_000_003 if piece_bytes > 1000 else 5_003
    values = np.arange(size, dtype=np.float32) * (axis.rank + 1)
    root = axis.size - 1
    broadcast(axis, values, timeout_s=30, piece_bytes=piece_bytes, root=root)
    assert np.array_equal(values, np.arange(size, dtype=np.float32) * (root + 1))


def test_numbers_are_summed_in_the_order_of_ranks(axis, everywhere):
    mine = np.array([0.1 * (axis.rank + 1), 1e16 if axis.rank == 0 else 1.0])
    sums = NumberGather(axis, mine, timeout_s=30).wait().sum_in_order()
    parts = [[0.1 * (rank + 1), 1e16 if rank == 0 else 1.0] for rank in range(axis.size)]
    expected = [0.0, 0.0]
    for part in parts:
        expected = [a + b for a, b in zip(expected, part, strict=True)]
    assert list(sums) == expected
    assert everywhere(np.array(sums))


def test_sum_arrays(axis):
    values = np.full(3, axis.rank + 1.0)
    sum_arrays(axis, values)
    assert np.all(values == axis.size * (axis.size + 1) / 2)


def test_one_rank_of_a_host_goes_first(axis, folder):
    """The others only begin when the first is done: they find what it has left."""
    found = []

    def action():
        try:
            with open(folder / "mark", "x", encoding="utf-8"):
                found.append("made")
        except FileExistsError:
            found.append("found")

    first_on_node(axis, action)
    assert sorted(value for part in gather(axis, found) for value in part) == ["found"] * (axis.size - 1) + ["made"]


def test_grid_axes(world):
    """The data axis holds every rank once; communicators come and go in thousands without being used up (M15)."""
    for _ in range(400):
        with ProcessGrid(world, GridShape(world.size)) as grid:
            assert (grid.data.size, grid.data.rank) == (world.size, world.rank)
    if world.size == 4:
        with ProcessGrid(world, GridShape(2, 2)) as grid:
            assert grid.data.size == 2
            members = gather(Axis(grid.data.comm), world.rank)
            assert members == [world.rank % 2, world.rank % 2 + 2]
