"""`mpitrain bench allreduce` on any number of ranks: records and bytes, never seconds."""

from mpitrain.bench.allreduce import make_cases
from mpitrain.bench.sums import PEER, measure
from mpitrain.codecs.registry import make_codec
from mpitrain.collectives.predicted import sent_for_sum
from mpitrain.comm.agreement import gather


def test_every_case_has_its_record_on_every_rank(axis):
    collectives = ["direct", "ring", "native", *(["server"] if axis.size > 1 else [])]
    cases = make_cases([0.0, 0.012], collectives, ["int8", "fp16:delta"], [4])
    records = measure(axis, cases, rounds=2, timeout_s=30)
    assert gather(axis, records) == [records] * axis.size
    for case, row in zip(cases, records, strict=True):
        assert (row["collective"], row["codec"], row["memory"]) == (case.collective, case.codec, case.memory)
        assert (row["nbytes"], row["ranks"]) == (4 * case.size, axis.size)
        assert 0 < row["fastest_ms"] <= row["ms"] <= row["slowest_ms"]
        assert row["bound_ms"] is None
        if case.collective == PEER:
            assert row["sent_bytes"] is None
            continue
        codec = make_codec(case.codec)
        sent = sent_for_sum(case.collective, codec, case.memory, case.size, axis.size, segment=case.segment)
        if case.collective != "native" or axis.size > 1:
            assert row["sent_bytes"] == max(one.nbytes for one in sent), case
