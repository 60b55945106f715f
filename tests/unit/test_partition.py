"""Splitting arithmetic: everything is covered, once, in order."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpitrain.errors import ConfigError
from mpitrain.partition import GridShape, ShardSpec, bounds, chunk_bounds, split_sizes, split_weighted

FAST = settings(max_examples=100, deadline=None, derandomize=True, database=None)
TOTALS = st.integers(0, 10**12)


def test_golden_splits():
    assert split_sizes(10, 4) == [3, 3, 2, 2]
    assert split_sizes(2, 4) == [1, 1, 0, 0]
    assert split_sizes(0, 3) == [0, 0, 0]
    assert split_weighted(10, [1, 1, 2]) == [3, 2, 5]
    assert split_weighted(7, [0, 0]) == [4, 3]
    assert split_weighted(3, [0, 5, 0]) == [0, 3, 0]
    assert split_weighted(1, [1, 1, 1]) == [1, 0, 0]
    assert bounds([2, 0, 3]) == [(0, 2), (2, 2), (2, 5)]
    assert bounds([]) == []
    assert chunk_bounds(300, 2, 128) == [(0, 256), (256, 300)]
    assert chunk_bounds(100, 3, 128) == [(0, 100), (100, 100), (100, 100)]


@FAST
@given(total=TOTALS, parts=st.integers(1, 50))
def test_sizes_differ_by_at_most_one_and_fall(total, parts):
    sizes = split_sizes(total, parts)
    assert sum(sizes) == total
    assert len(sizes) == parts
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


@FAST
@given(total=TOTALS, weights=st.lists(st.integers(0, 10**9), min_size=1, max_size=20))
def test_weighted_sizes_are_right_to_one(total, weights):
    sizes = split_weighted(total, weights)
    assert sum(sizes) == total
    assert len(sizes) == len(weights)
    if whole := sum(weights):
        for size, weight in zip(sizes, weights, strict=True):
            assert total * weight // whole <= size <= total * weight // whole + 1
            assert weight or not size


@FAST
@given(size=TOTALS, parts=st.integers(1, 20), block=st.sampled_from([1, 2, 7, 128]))
def test_chunks_cover_the_vector_in_order_on_blocks(size, parts, block):
    chunks = chunk_bounds(size, parts, block)
    assert len(chunks) == parts
    assert chunks[0][0] == 0
    assert chunks[-1][1] == size
    assert all(a <= b for a, b in chunks)
    assert [a for a, _ in chunks[1:]] == [b for _, b in chunks[:-1]]
    assert all(a % block == 0 or a == size for a, _ in chunks)
    blocks = [-(-(b - a) // block) for a, b in chunks]
    assert max(blocks) - min(blocks) <= 1


@pytest.mark.parametrize("shape", [(1, 1, 1), (4, 1, 1), (2, 3, 2), (3, 1, 5), (1, 4, 1)])
def test_coordinates_count_every_rank_once_with_the_tensor_axis_fastest(shape):
    grid = GridShape(*shape)
    dp, pp, tp = shape
    expected = [(d, p, t) for d in range(dp) for p in range(pp) for t in range(tp)]
    assert [grid.coordinates(rank) for rank in range(grid.size)] == expected


def test_a_grid_that_fits():
    assert GridShape.fit(6, None, 1, 1) == GridShape(6, 1, 1)
    assert GridShape.fit(12, None, 3, 2) == GridShape(2, 3, 2)
    assert GridShape.fit(12, 2, 3, 2).size == 12


@pytest.mark.parametrize(
    ("ranks", "axes", "message"),
    [
        (4, (2, 3, 1), "parallel: dp*pp*tp = 2*3*1 = 6, but 4 ranks run; start 6 ranks"),
        (6, (2, 1, 1), "parallel: dp*pp*tp = 2*1*1 = 2, but 6 ranks run; set parallel.dp = 6 or start 2 ranks"),
        (6, (4, 3, 1), "parallel: dp*pp*tp = 4*3*1 = 12, but 6 ranks run; set parallel.dp = 2 or start 12 ranks"),
        (
            5,
            (None, 2, 1),
            "parallel: pp*tp = 2*1 = 2 does not divide 5 ranks; start a multiple of 2 ranks, or set parallel.pp and "
            "parallel.tp so that their product is one of 1, 5",
        ),
        (
            1,
            (None, 2, 2),
            "parallel: pp*tp = 2*2 = 4 does not divide 1 rank; start a multiple of 4 ranks, or set parallel.pp and "
            "parallel.tp so that their product is one of 1",
        ),
    ],
)
def test_a_grid_that_does_not_fit_names_the_remedy(ranks, axes, message):
    with pytest.raises(ConfigError) as caught:
        GridShape.fit(ranks, *axes)
    assert str(caught.value) == message


def test_a_shard_knows_its_shape_and_index():
    shard = ShardSpec((8, 6, 4), (2, 0, 3), (5, 6, 3))
    assert shard.shape == (3, 6, 0)
    assert shard.slices == (slice(2, 5), slice(0, 6), slice(3, 3))
    assert ShardSpec.whole((3, 4)) == ShardSpec((3, 4), (0, 0), (3, 4))
    assert ShardSpec.whole(()).shape == ShardSpec.whole(()).slices == ()
