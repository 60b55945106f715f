"""Sums in segments: however chunks are cut, and whoever is first, the bits are those of whole chunks.

All ranks live in this process and advance in an order drawn at random.
"""

import itertools

import numpy as np
import pytest
from mpi4py import MPI

from mpitrain.codecs.blocks import BlockScaled
from mpitrain.codecs.noise import noise_key
from mpitrain.codecs.registry import CODECS, make_codec
from mpitrain.collectives.base import Bucket, Transport
from mpitrain.collectives.predicted import Sent, sent_for_sum
from mpitrain.collectives.registry import make_reducer
from mpitrain.collectives.run import Turn
from mpitrain.collectives.segments import SEGMENT_BLOCK, cut, in_turns, segment_elements
from mpitrain.comm.frame import Tag
from mpitrain.comm.grid import Axis
from mpitrain.comm.waiting import Requests, Watch
from mpitrain.kernels import delta
from tests.reference.places import Place

STREAMS = [
    ("raw", "none", False),
    ("fp16", "residual", False),
    ("fp16", "delta", False),
    ("int8", "none", True),
    ("int8", "residual", False),
    ("int4", "delta", True),
]
POLLS = 10_000
"""Of a rank at most, until its sum must be complete."""


class World:
    """All ranks of a sum."""

    def __init__(self, collective, codec, memory, size, ranks, segment):
        self.places = [Place(rank, ranks) for rank in range(ranks)]
        transport = Transport(30, segment=segment)
        self.reducers = [make_reducer(collective, Axis(place), transport) for place in self.places]
        self.works = [np.zeros(size, np.float32) for _ in range(ranks)]
        self.states = [r.open(Bucket(w), codec, memory) for r, w in zip(self.reducers, self.works, strict=True)]
        self.steps = 0

    def sum(self, addends, seed=0, end="commit"):
        """Return what became of every rank's addend, and the finished sums."""
        rng, pending = np.random.default_rng(seed), {}
        for rank in rng.permutation(len(self.works)):
            self.works[rank][:] = addends[rank]
            pending[rank] = self.reducers[rank].start(self.states[rank], noise_key(7, self.steps, int(rank)))
        for _ in range(POLLS):
            if not (unfinished := [rank for rank in pending if not pending[rank].poll()]):
                break
            pending[rng.choice(unfinished)].poll()
        assert not unfinished
        for rank, item in pending.items():
            item.wait()
            getattr(self.states[rank], end)()
        self.steps += 1
        return [work.copy() for work in self.works], [pending[rank] for rank in range(len(self.works))]

    def memories(self):
        return [{name: s.current.tobytes() for name, s in state.states().items()} for state in self.states]


def contributions(ranks, size, step=0):
    rng = np.random.default_rng([ranks, size, step])
    return [(rng.standard_normal(size) * 10.0 ** rng.integers(-3, 3)).astype(np.float32) for _ in range(ranks)]


@pytest.mark.parametrize(
    ("collective", "stream"), [*itertools.product(["direct", "ring"], STREAMS), ("server", STREAMS[-2])], ids=str
)
def test_bits_memories_and_bytes(collective, stream):
    """Of odd sizes, of chunks below a segment, of one element more than whole segments, and of none at all."""
    name, memory, stochastic = stream
    codec = make_codec(name, stochastic=stochastic)
    for ranks in range(2 if collective == "server" else 1, 6):
        for size, segments in ((7 % ranks, [256]), (300, [256]), (512 * ranks + 1, [256, 512]), (4097, [256, 1280])):
            worlds = {each: World(collective, codec, memory, size, ranks, each) for each in (None, *segments)}
            for step in range(2):
                sums = {each: world.sum(contributions(ranks, size, step), step) for each, world in worlds.items()}
                whole, memories = sums[None][0][0].tobytes(), worlds[None].memories()
                for each, (works, pending) in sums.items():
                    case = (ranks, size, each, step)
                    assert all(work.tobytes() == whole for work in works), case
                    assert worlds[each].memories() == memories, case
                    sent = [Sent(item.traffic.sent_bytes, item.traffic.messages) for item in pending]
                    assert sent == sent_for_sum(collective, codec, memory, size, ranks, segment=each), case


@pytest.mark.parametrize(("name", "memory"), [("raw", "none"), ("fp16", "delta"), ("int8", "residual")])
@pytest.mark.parametrize("collective", ["direct", "ring", "server"])
def test_one_bad_segment_rejects_the_bucket_everywhere(collective, name, memory):
    """On any rank, in the first, a middle or the last segment; and the memories are those of before."""
    ranks, size = 3, 4000
    world, straight = (World(collective, make_codec(name), memory, size, ranks, 256) for _ in range(2))
    good = contributions(ranks, size)
    world.sum(good)
    straight.sum(good)
    before = world.memories()
    for number, (rank, position) in enumerate(itertools.product(range(ranks), (0, 700, 2100, size - 1))):
        addends = contributions(ranks, size, number)
        addends[rank][position] = (np.nan, np.inf)[number % 2]
        _, pending = world.sum(addends, number, end="rollback")
        assert [item.nonfinite for item in pending] == [True] * ranks, (rank, position)
        assert world.memories() == before
    world.steps = straight.steps
    (works, _), (expected, _) = world.sum(good), straight.sum(good)
    assert [work.tobytes() for work in works] == [work.tobytes() for work in expected]
    assert world.memories() == straight.memories() != before if memory != "none" else True


def test_a_half_beyond_its_range_costs_its_segment_alone():
    """The exception to equal bits: the exponent that makes room for a large value is that of a message."""
    values = [np.full(1024, 1e-3, np.float32) for _ in range(2)]
    values[0][0] = 1e9
    (whole, *_), (cut_up, other) = (
        World("direct", make_codec("fp16"), "none", 1024, 2, segment).sum(values)[0] for segment in (None, 256)
    )
    assert cut_up.tobytes() == other.tobytes()
    assert whole[300] != cut_up[300] == whole[600] == cut_up[600]  # the second segment; another chunk


def test_decoding_begins_before_encoding_ends():
    """Who starts last finds the segments of the other there, and sums them up between its own contributions."""
    size, segment = 16 * 256, 256
    world = World("direct", make_codec("int8"), "none", size, 2, segment)
    first = world.reducers[0].start(world.states[0])
    events = world.reducers[1].events = []
    second = world.reducers[1].start(world.states[1])
    kinds = [what for what, *_ in events]
    contribution, summing = ["encode"], ["decode", "encode"]
    assert kinds == contribution + 7 * (contribution + summing) + summing
    while not (first.poll() and second.poll()):
        pass
    first.wait()
    second.wait()


def test_every_owner_gets_its_first_segment_first():
    """All links have something to do from the start; so a sum is complete long before the last contribution."""
    world = World("direct", make_codec("raw"), "none", 5 * 4 * 256, 5, 256)
    pending = world.reducers[2].start(world.states[2])
    sent = [(tag, dest) for tag, dest, _ in world.places[2].sent]
    assert sent == [(Tag.SCATTER, owner) for owner in (3, 4, 0, 1)] * 4
    others = [world.reducers[rank].start(world.states[rank]) for rank in (0, 1, 3, 4)]
    for item in [pending, *others] * 2:
        item.poll()
    for item in [pending, *others]:
        item.wait()


def test_a_turn_waits_for_nothing():
    watch = Watch()
    sent = Requests([MPI.COMM_SELF.Isend(np.zeros(2**20, np.uint8), 0, 1)], "somebody", watch)
    turn = Turn(watch)
    assert turn.poll()
    assert turn.poll()
    assert not sent.poll()
    MPI.COMM_SELF.Recv(np.zeros(2**20, np.uint8), 0, 1)
    assert turn.poll()
    assert sent.poll()


def test_segments_hold_whole_blocks():
    """So that scales, and the factors of delta, two to a byte, are those of the whole chunk."""
    codecs = [make_codec(name) for name in CODECS]
    assert all(SEGMENT_BLOCK % codec.block == 0 for codec in codecs)
    assert any(isinstance(codec, BlockScaled) for codec in codecs)
    assert SEGMENT_BLOCK % (2 * delta.BLOCK) == 0
    assert [segment_elements(kb) for kb in (0, 1, 2, 256)] == [None, 256, 512, 64_000]


@pytest.mark.parametrize(
    ("start", "stop", "elements", "parts"),
    [
        (0, 0, 256, []),
        (5, 5, None, []),
        (128, 640, None, [(128, 640, 0)]),
        (128, 384, 256, [(128, 384, 0)]),
        (128, 385, 256, [(128, 384, 0), (384, 385, 256)]),
        (0, 3, 256, [(0, 3, 0)]),
    ],
)
def test_cuts(start, stop, elements, parts):
    segments = cut(7, start, stop, elements)
    assert [(s.start, s.stop, s.at) for s in segments] == parts
    assert [(s.chunk, s.index) for s in segments] == [(7, index) for index in range(len(parts))]
    assert sum(s.size for s in segments) == stop - start


def test_turns():
    chunks = [cut(0, 0, 600, 256), [], cut(2, 600, 700, 256), cut(3, 700, 1100, 256)]
    assert [(s.chunk, s.index) for s in in_turns(chunks)] == [(0, 0), (2, 0), (3, 0), (0, 1), (3, 1), (0, 2)]
    assert in_turns([]) == []
