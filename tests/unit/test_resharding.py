"""Any layout loads what any other has saved, by arithmetic alone: who writes, who reads, who gets what."""

import json
from itertools import combinations, product
from math import prod

import msgspec
import numpy as np
import pytest

from mpitrain.checkpoint import files, transfer
from mpitrain.checkpoint.claims import Claim, assign_pieces, claims_of
from mpitrain.checkpoint.coverage import contradiction, cut_rows, index_in, overlap
from mpitrain.checkpoint.record import COMMIT, read_commit
from mpitrain.checkpoint.tensor_record import PieceRecord, TensorRecord
from mpitrain.checkpoint.transfer import choose_reader, list_blocks, place, plan_rounds
from mpitrain.errors import CheckpointError, DamageError
from mpitrain.partition import GridShape, ShardSpec
from tests.reference.checkpoints import owners_of
from tests.reference.layouts import held, layouts, part_of, whole_tensors

GRIDS = layouts(8)


def saved(grid, whole):
    """Return what a commit record and the shards of a grid would hold."""
    ranks = [held(grid, rank, whole) for rank in range(grid.size)]
    records = assign_pieces([claims_of("tensors", *one) for one in ranks])
    shards = [{} for _ in ranks]
    for name, record in records.items():
        for rank, spec in record.places():
            arrays, split = ranks[rank]
            assert split.get(name, ShardSpec.whole(whole[name].shape)) == spec
            shards[rank][name] = arrays[name]
    return records, shards


def loaded(grid, whole, records, shards):
    """Return what the ranks of a grid get, and how many bytes were read."""
    ranks = [held(grid, rank, whole) for rank in range(grid.size)]
    claims = [claims_of("tensors", *one) for one in ranks]
    for array in (array for arrays, _ in ranks for array in arrays.values()):
        array[...] = -7
    blocks = list_blocks(records, claims)
    for block in blocks:
        values = shards[block.shard][block.name][block.index]
        assert (values.shape, values.dtype, values.nbytes) == (block.part.shape, block.dtype, block.nbytes)
        for rank in block.ranks:
            arrays, split = ranks[rank]
            array = arrays[block.name]
            place(block, values, array, split.get(block.name, ShardSpec.whole(array.shape)))
    return [arrays for arrays, _ in ranks], sum(block.nbytes for block in blocks)


def all_pairs(grids, others):
    """Save with each of the first, load with each of the others, and compare every bit."""
    whole = whole_tensors()
    expected = {grid: [held(grid, rank, whole)[0] for rank in range(grid.size)] for grid in others}
    for one in grids:
        records, shards = saved(one, whole)
        for other in others:
            found, nbytes = loaded(other, whole, records, shards)
            assert nbytes == sum(values.nbytes for values in whole.values())
            for ours, theirs in zip(found, expected[other], strict=True):
                assert ours.keys() == theirs.keys()
                assert all(ours[name].tobytes() == theirs[name].tobytes() for name in theirs), (one, other)


def test_every_layout_loads_every_other():
    """H17: 38 layouts of at most 8 ranks, every pair, bit for bit; each element is read once."""
    assert len(GRIDS) == 38
    all_pairs(GRIDS, GRIDS)


def test_blocks_of_single_rows(monkeypatch):
    monkeypatch.setattr(transfer, "BLOCK_BYTES", 64)
    all_pairs([GridShape(1, 1, 1), GridShape(1, 2, 4)], [GridShape(1, 1, 3), GridShape(2, 2, 2)])


def test_every_piece_is_written_once():
    whole = whole_tensors()
    for grid in GRIDS:
        records, shards = saved(grid, whole)
        assert set(records) == set(whole)
        for name, record in records.items():
            assert (record.shape, record.dtype) == (whole[name].shape, str(whole[name].dtype))
            assert not contradiction([spec for _, spec in record.places()])
        written = sum(values.nbytes for shard in shards for values in shard.values())
        assert written == sum(values.nbytes for values in whole.values())


def test_writers_share_the_load():
    """Also where some tensors are held by few: these go to their holders, the others to the rest."""
    whole = {f"t{i}": np.zeros(100 * (i + 1), np.float32) for i in range(20)}
    claims = [claims_of("tensors", whole, {}), claims_of("tensors", whole, {})]
    claims[0] += claims_of("tensors", {"mine": np.zeros(8000, np.float32)}, {})
    records = assign_pieces(claims)
    loads = [0, 0]
    for record in records.values():
        loads[record.pieces[0].rank] += prod(record.shape)
    assert records["mine"].pieces[0].rank == 0
    assert abs(loads[0] - loads[1]) <= 2000
    assert records == assign_pieces([list(reversed(one)) for one in claims])
    big, small = {"big": np.zeros(100, np.float32)}, {"small": np.zeros(90, np.float32)}
    records = assign_pieces([claims_of("tensors", big | small, {}), claims_of("tensors", big, {})])
    assert {name: record.pieces[0].rank for name, record in records.items()} == {"small": 0, "big": 1}
    stages = GridShape(4, 2, 1)
    for rank, shard in enumerate(saved(stages, whole_tensors())[1]):
        assert shard, f"rank {rank} writes nothing"


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ([((4,), (0,), (2,)), ((4,), (1,), (4,))], "its shards overlap"),
        ([((4,), (0,), (2,)), ((4,), (3,), (4,))], "its shards hold 3 of its 4 elements"),
        ([((4,), (0,), (2,)), ((5,), (2,), (5,))], "its shards disagree about its shape"),
        ([((4,), (2,), (2,))], "its shards hold 0 of its 4 elements"),
    ],
)
def test_ranks_that_do_not_hold_a_whole_tensor(parts, reason):
    claims = [[Claim("tensors", "params/w", "float32", ShardSpec(*part))] for part in parts]
    with pytest.raises(CheckpointError, match=f"internal error: params/w cannot be saved: {reason}"):
        assign_pieces(claims)


def test_ranks_that_disagree_about_a_type():
    claims = [[Claim("tensors", "w", dtype, ShardSpec.whole((2,)))] for dtype in ("float32", "float64")]
    with pytest.raises(CheckpointError, match="w cannot be saved: its shards are of types .*'float32', 'float64'"):
        assign_pieces(claims)


def test_an_array_that_is_not_its_shard():
    with pytest.raises(ValueError, match="w has shape"):
        claims_of("tensors", {"w": np.zeros(3)}, {"w": ShardSpec((4,), (0,), (2,))})


def test_ranks_with_nothing_of_a_tensor():
    """More ranks than rows: some hold no row of it, and write nothing; a tensor without elements is still there."""
    shape = (3, 2)
    specs = [part_of("params/embedding.weight", shape, GridShape(1, 1, 5), rank) for rank in range(5)]
    assert [spec.shape[0] for spec in specs] == [1, 1, 1, 0, 0]
    claims = [[Claim("tensors", "w", "float32", spec)] for spec in specs]
    assert [piece.rank for piece in assign_pieces(claims)["w"].pieces] == [0, 1, 2]
    nothing = [[Claim("tensors", "none", "float32", ShardSpec.whole((0, 2)))]] * 3
    (piece,) = assign_pieces(nothing)["none"].pieces
    assert (piece.rank, piece.start, piece.stop) == (0, (0, 0), (0, 2))
    assert list_blocks(assign_pieces(nothing), nothing) == []


def test_only_what_is_needed_is_read():
    """A stage needs the shards of its own stage; of a tall tensor the rows that somebody asks for."""
    whole, grid = whole_tensors(), GridShape(1, 4, 1)
    records, _ = saved(grid, whole)
    last = claims_of("tensors", *held(grid, 3, whole))
    assert {block.shard for block in list_blocks(records, [last])} == {0, 3} - (
        {0} if records["params/embedding.weight"].pieces[0].rank == 3 else set()
    )
    tall = {"w": TensorRecord(shape=(10**6, 100), dtype="float32", pieces=[PieceRecord(0, (0, 0), (10**6, 100))])}
    tail = Claim("tensors", "w", "float32", ShardSpec((10**6, 100), (999_999, 40), (10**6, 60)))
    (block,) = list_blocks(tall, [[], [tail]])
    assert block.ranks == (1,)
    assert block.nbytes <= transfer.BLOCK_BYTES
    assert block.part.stop == (10**6, 100)


def test_memories_come_from_the_shard_of_their_rank():
    memory = claims_of("local", {"residual": np.zeros(3, np.float32)}, {})
    blocks = list_blocks({}, [memory, [], memory])
    assert [(block.shard, block.dataset, block.ranks) for block in blocks] == [
        (0, "local/residual", (0,)),
        (2, "local/residual", (2,)),
    ]


def test_who_reads():
    """The rank of the same number, fewer ranks in turns; whoever has the file where that one has not."""
    everywhere = [{0, 1, 2, 3, 4}] * 2
    assert [choose_reader(shard, everywhere) for shard in range(5)] == [0, 1, 0, 1, 0]
    private = [{0}, {3}, set(), {1, 3}]
    assert [choose_reader(shard, private) for shard in range(4)] == [0, 3, 2, 3]
    assert choose_reader(7, [{7}, {7}, set()]) == 1
    assert choose_reader(5, [{5}, {5}, set()]) == 0


def test_rounds_are_bounded_and_in_order(monkeypatch):
    monkeypatch.setattr(transfer, "BLOCK_BYTES", 40)
    monkeypatch.setattr(transfer, "ROUND_BYTES", 100)
    whole = whole_tensors()
    records, _ = saved(GridShape(2, 2, 2), whole)
    everything = claims_of("tensors", whole, {})
    blocks = list_blocks(records, [everything] * 3)
    rounds = plan_rounds(blocks, {shard: shard % 3 for shard in range(8)})
    for batch in rounds:
        for mine in batch.values():
            assert sum(block.nbytes for block in mine) <= 100 or len(mine) == 1
    for reader in range(3):
        mine = [block for batch in rounds for block in batch.get(reader, [])]
        assert mine == [block for block in blocks if block.shard % 3 == reader]
    assert plan_rounds([], {}) == []


SPECS = [ShardSpec((3, 4), (a, c), (b, d)) for a, b in combinations(range(4), 2) for c, d in combinations(range(5), 2)]


def test_what_two_parts_share():
    """Every pair of rectangles of a small matrix, against masks."""
    masks = []
    for spec in SPECS:
        masks.append(np.zeros((3, 4), bool))
        masks[-1][spec.slices] = True
    values = np.arange(12).reshape(3, 4)
    for (one, a), (other, b) in product(zip(SPECS, masks, strict=True), repeat=2):
        shared = overlap(one, other)
        assert (shared is None) == (not (a & b).any())
        if shared:
            assert np.array_equal(values[shared.slices], values[one.slices][index_in(one, shared)])
            assert prod(shared.shape) == (a & b).sum()
    assert overlap(ShardSpec.whole(()), ShardSpec.whole(())) == ShardSpec.whole(())


@pytest.mark.parametrize("most", [1, 2, 3, 7, 100])
def test_cut_rows(most):
    for spec in [*SPECS, ShardSpec.whole(()), ShardSpec.whole((0, 3)), ShardSpec.whole((5,)), ShardSpec.whole((2, 0))]:
        parts = cut_rows(spec, most)
        assert sum(prod(part.shape) for part in parts) == prod(spec.shape)
        assert all(overlap(part, spec) == part for part in parts if prod(part.shape))
        assert not any(overlap(one, other) for one, other in combinations(parts, 2))
        assert all(prod(part.shape) <= most or part.shape[0] == 1 for part in parts)


def write_format_2(folder, whole, ranks=3):
    """Write the record and the index that earlier versions wrote."""
    owners = owners_of(whole, ranks)
    with files.h5py.File(folder / files.INDEX, "w") as index:
        for name, values in whole.items():
            index.create_dataset(f"tensors/{name}", data=values)
    record = {"format": 2, "step": 5, "ranks": ranks, "owners": owners, "index": "11"}
    record |= {"shards": {files.shard_name(rank): "00" for rank in range(ranks)}}
    record |= {"fixed": ['model.kind = "mlp"', "parallel.dp = 3", "train.seed = 0"]}
    (folder / COMMIT).write_text(json.dumps(record))
    return owners


def test_a_record_of_format_2(tmp_path):
    """A run of an earlier version goes on: whole tensors, and the grid is no longer a setting."""
    whole = whole_tensors()
    owners = write_format_2(tmp_path, whole)
    record = read_commit(tmp_path)
    assert (record.format, record.layout, record.ranks) == (2, "dp=3 pp=1 tp=1", 3)
    assert record.fixed == ['model.kind = "mlp"', "train.seed = 0"]
    assert {name: list(tensor.places()) for name, tensor in record.tensors.items()} == {
        name: [(owners[name], ShardSpec.whole(values.shape))] for name, values in whole.items()
    }
    assert {name: tensor.dtype for name, tensor in record.tensors.items()} == {
        name: str(values.dtype) for name, values in whole.items()
    }


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"owners": {"params/x": 0}}, f"{COMMIT} is damaged .*the index has no params/x"),
        ({"owners": {"params/scale": 3}}, f"{COMMIT} is damaged .*rank 3 of 3 holds it"),
        ({"owners": 7}, f"{COMMIT} is damaged"),
        (None, f"cannot read .*{files.INDEX}"),
    ],
)
def test_a_damaged_record_of_format_2(tmp_path, change, reason):
    write_format_2(tmp_path, whole_tensors())
    record = json.loads((tmp_path / COMMIT).read_text())
    if change is None:
        (tmp_path / files.INDEX).unlink()
    (tmp_path / COMMIT).write_bytes(msgspec.json.encode(record | (change or {})))
    with pytest.raises(DamageError, match=reason):
        read_commit(tmp_path)


def test_the_index_shows_split_tensors_whole(tmp_path):
    whole, grid = whole_tensors(), GridShape(1, 2, 3)
    records, shards = saved(grid, whole)
    for rank, mine in enumerate(shards):
        files.write_shard(tmp_path / files.shard_name(rank), mine, {}, held(grid, rank, whole)[1])
    files.write_index(tmp_path / files.INDEX, records, {})
    with files.h5py.File(tmp_path / files.INDEX) as index:
        for name, values in whole.items():
            assert index[f"tensors/{name}"][()].tobytes() == values.tobytes(), name
    assert files.index_entries(tmp_path / files.INDEX) == {
        name: (values.shape, str(values.dtype)) for name, values in whole.items()
    }
