"""`mpitrain bench pipeline` on any number of ranks, with passes that take next to no time: counts, never seconds."""

import time
from types import SimpleNamespace

import pytest

from mpitrain.bench import stages
from mpitrain.bench.ranks import check_ranks
from mpitrain.bench.stages import CHUNKS, Case, Rig, measure
from mpitrain.comm.agreement import gather
from mpitrain.comm.frame import HEADER_BYTES, Frame
from mpitrain.errors import LaunchError
from mpitrain.parallel.channel import EAGER_BYTES

TINY_S = 1e-4


def test_every_case_has_its_record_on_every_rank(axis):
    cases = [Case(schedule, micros, TINY_S, 5) for schedule in CHUNKS for micros in (1, 3)]
    records = measure(axis, cases, rounds=2)
    assert gather(axis, records) == [records] * axis.size
    assert [(r["schedule"], r["micro_batches"], r["ranks"]) for r in records] == [
        (case.schedule, case.micro_batches, axis.size) for case in cases
    ]
    for row in records:
        assert 0 <= row["lowest_bubble"] <= row["bubble"] <= row["highest_bubble"] < 1


@pytest.mark.parametrize("schedule", CHUNKS)
def test_stages_sleep_once_a_pass_and_send_every_micro_batch(axis, schedule, monkeypatch):
    slept, pieces = [], []
    clock = SimpleNamespace(perf_counter=time.perf_counter, sleep=slept.append)  # others may still sleep
    monkeypatch.setattr(stages, "time", clock)
    send = Frame.send

    def counted(self, *place, piece_bytes):
        requests = send(self, *place, piece_bytes=piece_bytes)
        pieces.append(len(requests))
        return requests

    monkeypatch.setattr(Frame, "send", counted)
    case = Case(schedule, 3, 0.5, 40_000)
    rig = Rig(axis, case)
    rig.run()
    monkeypatch.undo()
    forward = [0.5 / case.chunks] * 3 * case.chunks
    assert sorted(slept) == sorted([*forward, *(2 * seconds for seconds in forward)])
    cuts = case.chunks * axis.size - 1 if axis.size > 1 else 0
    nbytes = HEADER_BYTES + 4 * case.elements
    assert nbytes > 2 * EAGER_BYTES
    traffic = rig.pipeline.traffic
    totals = gather(axis, [traffic.messages, traffic.sent_bytes, len(pieces), sum(pieces)])
    sent = 2 * 3 * cuts
    assert [sum(column) for column in zip(*totals, strict=True)] == [sent, sent * nbytes, sent, 3 * sent]


def test_another_number_of_ranks_than_asked_for(axis):
    check_ranks(None, axis.size)
    check_ranks(axis.size, axis.size)
    with pytest.raises(LaunchError, match=f"--ranks {axis.size + 1}, but {axis.size} ranks run") as refused:
        check_ranks(axis.size + 1, axis.size)
    assert refused.value.agreed
