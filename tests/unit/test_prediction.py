"""What a replica sends and keeps, counted by hand; tests/mpi holds it against what ranks count."""

from dataclasses import replace

import pytest

from mpitrain.codecs.registry import make_codec
from mpitrain.collectives.predicted import Sent
from mpitrain.nn.models import Mlp, Transformer
from mpitrain.parallel.prediction import (
    ALIGNING_BYTES,
    Replica,
    activation_bytes,
    messages_in_a_row,
    pipeline_sent,
    reference_bytes,
    replicated_sent,
    swap_sent,
    tensor_sent,
    tied_sent,
)
from mpitrain.parallel.units import CountingSplit, Swap, Unit, units

RAW, FP16, INT8 = (make_codec(name) for name in ("raw", "fp16", "int8"))
SHAPE = {"time": 6, "d_model": 8, "blocks": 2, "heads": 2, "d_ff": 16}


def plain(*sizes, kept=None):
    """Units that read, keep and hand on arrays of so many elements; the array behind unit i is number i + 1."""
    return [
        Unit(f"u{i}", i, i + 1, (), 1.0, (size,), source=i, kept=(kept or {}).get(i, {}))
        for i, size in enumerate(sizes)
    ]


def transformer(size, rank=0, sequence=False, **changes):
    split = CountingSplit(rank, size, sequence=sequence)
    ends = {"task": "lm", "vocabulary": 9, "outputs": 9}
    return units(Transformer(**(SHAPE | ends | changes), split=split), (6,), "u1", split)


def test_every_micro_batch_crosses_every_cut_there_and_back():
    replica = Replica(units=[plain(10, 20, 30)], cuts=[1, 2], stages=3, micro_batches=2)
    assert replica.parts(5) == [3, 2]
    there = [16 + 2 * 3 * size + 16 + 2 * 2 * size for size in (10, 20)]
    back = [16 + 4 * 3 * size + 16 + 4 * 2 * size for size in (10, 20)]
    sent = pipeline_sent(replica, 5, FP16, RAW, "none")
    assert sent == [[Sent(there[0], 2)], [Sent(there[1] + back[0], 4)], [Sent(back[1], 2)]]
    factors = 1  # of two blocks, in each of the messages
    delta = pipeline_sent(replica, 5, FP16, RAW, "delta")
    assert [row[0].nbytes for row in delta] == [there[0] + 2 * factors, there[1] + 2 * factors + back[0], back[1]]


def test_chunks_are_dealt_out_in_turns():
    """Four pieces on two stages: the second cut leads back to the first stage."""
    replica = Replica(
        units=[plain(1, 2, 3, 4)], cuts=[1, 2, 3], stages=2, chunks=2, schedule="interleaved", micro_batches=1
    )
    sent = pipeline_sent(replica, 1, RAW, RAW, "none")
    first, second, third = 16 + 4, 16 + 8, 16 + 12
    assert sent == [[Sent(first + second + third, 3)], [Sent(first + second + third, 3)]]
    assert [[unit.name for unit in chunk] for chunk in replica.held(1, 0)] == [["u1"], ["u3"]]


def test_one_stage_sends_nothing_and_no_samples_send_headers():
    assert pipeline_sent(Replica(units=[plain(1, 2)], cuts=[], stages=1), 4, RAW, RAW, "none") == [[Sent()]]
    empty = pipeline_sent(Replica(units=[plain(1, 2)], cuts=[1], stages=2, micro_batches=4), 0, INT8, RAW, "none")
    assert empty == [[Sent(16, 1)], [Sent(16, 1)]]


def test_swaps():
    """A sum of 12 elements on 3 ranks; slices of 7 time steps: 3, 2 and 2."""
    assert swap_sent(Swap("sum", 6), 2, RAW, 3) == [Sent(4 * (16 + 16), 4)] * 3
    gather, scatter = swap_sent(Swap("gather", 14, 7), 5, RAW, 3), swap_sent(Swap("scatter", 14, 7), 5, RAW, 3)
    slices = [16 + 4 * steps * 2 * 5 for steps in (3, 2, 2)]
    assert gather == [Sent(2 * nbytes, 2) for nbytes in slices]
    assert scatter == [Sent(sum(slices) - nbytes, 2) for nbytes in slices]


def test_a_block_sums_twice_each_way():
    """Megatron's count: one sum a half-block forward and one backward, of (T, C); the ends of "lm" one each."""
    found = transformer(2)
    whole = Swap("sum", 6 * 8)
    assert [unit.forward_swaps for unit in found] == [(whole,), (), (whole,) * 2, (whole,) * 2, (), ()]
    assert [unit.backward_swaps for unit in found] == [(), (), (whole,) * 2, (whole,) * 2, (), (whole,)]
    assert all(not unit.forward_swaps and not unit.backward_swaps for unit in transformer(1))


def test_recomputation_sums_again():
    found = transformer(2, recompute=True)
    assert [len(unit.backward_swaps) for unit in found] == [0, 0, 4, 4, 0, 1]
    assert [len(unit.forward_swaps) for unit in found] == [1, 0, 2, 2, 0, 0]


def test_time_slices_swap_halves():
    found = transformer(2, sequence=True)
    gather, scatter = Swap("gather", 48, 6), Swap("scatter", 48, 6)
    assert found[2].forward_swaps == found[2].backward_swaps == (gather, scatter) * 2
    assert found[1].forward_swaps == ()
    assert found[1].backward_swaps == (gather,)
    assert found[4].forward_swaps == (gather,)


def test_tensor_ranks_of_a_whole_step():
    """Every sum and every micro-batch, and five float64 a target for the loss of split logits."""
    replica = Replica(units=[transformer(2), transformer(2, 1)], cuts=[3], stages=2, micro_batches=2, split_loss=True)
    one = [sum(swap_sent(Swap("sum", 48), part, FP16, 2)[0].nbytes for part in (2, 1))]
    first, second = tensor_sent(replica, 3, FP16)
    assert first == [Sent(5 * one[0], 5 * 2 * 2)] * 2
    assert second == [Sent(5 * one[0] + 3 * 6 * 5 * 8, 5 * 2 * 2 + 2)] * 2


def test_gradients_of_tensors_that_several_ranks_hold():
    found = transformer(2, sequence=True, tied=True)
    replica = Replica(units=[found, transformer(2, 1, sequence=True, tied=True)], cuts=[2, 4], stages=3)
    rows = [5, 4]  # of nine tokens
    message = [[16 + 4 * size for size in ([20, 20], [16, 16])[place]] for place in range(2)]
    assert [rows[place] * 8 for place in range(2)] == [40, 32]
    tied = tied_sent(replica)
    assert tied == [[Sent(sum(message[place]), 2) for place in range(2)], [Sent()] * 2, tied[0]]
    whole = [6 * 8, 2 * (4 * 8 + 2 * 8), 2 * 8]  # positions; of two blocks two norms, two biases; the last norm
    assert [row[0].messages for row in replicated_sent(replica)] == [2, 2, 2]
    assert [row[0].nbytes for row in replicated_sent(replica)] == [2 * 16 + 4 * size for size in whole]
    together = replace(replica, cuts=[], stages=1)
    assert tied_sent(together) == [[Sent()] * 2]
    assert len(together.specs(0, 0)) == len({spec.name for spec in together.specs(0, 0)})


@pytest.mark.parametrize(
    ("schedule", "micro_batches", "expected"),
    [
        ("afab", 1, 4),
        ("afab", 6, 4),  # two there, two back, whatever the number
        ("1f1b", 1, 4),
        ("1f1b", 3, 6),  # the middle stage takes the third one when the first is back from the last stage
        ("1f1b", 6, 10),
    ],
)
def test_messages_in_a_row(schedule, micro_batches, expected):
    replica = Replica(units=[plain(1, 1, 1)], cuts=[1, 2], stages=3, schedule=schedule, micro_batches=micro_batches)
    assert messages_in_a_row(replica, 6) == expected


def test_swaps_follow_each_other_too():
    found = [transformer(2), transformer(2, 1)]
    swaps, replicated = 2 * 5 + 2 * 5, 2
    assert messages_in_a_row(Replica(units=found, cuts=[], stages=1), 4) == swaps + replicated
    assert messages_in_a_row(Replica(units=found, cuts=[], stages=1, split_loss=True), 4) == swaps + replicated + 1
    assert messages_in_a_row(Replica(units=[transformer(1)], cuts=[], stages=1), 4) == 0


def test_what_a_stage_keeps_at_most():
    """The first stage of two keeps two micro-batches, the last one and the gradients of its loss."""
    kept = {0: {0: 40, 7: 100}, 1: {1: 400, 8: 1000}}  # bytes a sample: the batch itself (0), what arrived (1), inside
    replica = Replica(units=[plain(10, 20, kept=kept)], cuts=[1], stages=2, micro_batches=4)
    received = ALIGNING_BYTES + 2 * 10 * 4
    assert activation_bytes(replica, 8, 0, 0) == 2 * 2 * 100 + received  # the batch lives anyway
    assert activation_bytes(replica, 8, 1, 0) == 2 * 1000 + received + 2 * 20 * 4
    afab = replace(replica, schedule="afab")
    assert activation_bytes(afab, 8, 0, 0) == 4 * 2 * 100 + received
    forgets = Replica(units=[plain(10, 20, kept={1: {8: 1000}})], cuts=[1], stages=2, micro_batches=4)
    assert activation_bytes(forgets, 8, 1, 0) == 2 * 1000 + received + 2 * 20 * 4  # what arrived is there for a moment
    alone = Replica(units=[plain(10, 20, kept=kept)], cuts=[], stages=1)
    assert activation_bytes(alone, 8, 0, 0) == 8 * (100 + 400 + 1000 + 20 * 4)


def test_past_activations():
    replica = Replica(units=[plain(10, 20, 5)], cuts=[1, 2], stages=3)
    of_sample = (40, 80)
    all_fit = [100 * (nbytes + 8) + 6 * nbytes for nbytes in of_sample]
    assert [reference_bytes(replica, 6, 100, 10**6, stage, 0) for stage in range(3)] == [
        all_fit[0],
        sum(all_fit),
        all_fit[1],
    ]
    assert reference_bytes(replica, 6, 100, 130, 0, 0) == 3 * 48 + 3 * 40
    assert reference_bytes(replica, 6, 100, 39, 0, 0) == 0
    assert reference_bytes(replace(replica, cuts=[], stages=1), 6, 100, 10**6, 0, 0) == 0


def test_an_mlp_cut_inside_a_pair_sends_parts():
    """Between a column- and a row-parallel map, what crosses is this rank's part."""
    found = []
    for rank in range(2):
        split = CountingSplit(rank, 2)
        found.append(units(Mlp(inputs=6, hidden=(8, 4), outputs=3, split=split), (6,), "f4", split))
    replica = Replica(units=found, cuts=[1], stages=2)
    assert pipeline_sent(replica, 1, RAW, RAW, "none") == [[Sent(16 + 4 * 4, 1)] * 2] * 2
    assert [unit.forward_swaps for unit in found[0]] == [(), (Swap("sum", 4),), ()]
