"""What `mpitrain bench pipeline` makes of its measurements."""

import json

import numpy as np
import pytest

from mpitrain.bench import stages
from mpitrain.bench.pipeline import make_cases
from mpitrain.bench.records import show
from mpitrain.bench.stages import Case, FixedTime, Round, record
from mpitrain.errors import ConfigError
from mpitrain.nn.layer import EVALUATE


@pytest.mark.parametrize(
    ("schedule", "micro_batches", "theory"),
    [("afab", 4, 3 / 7), ("1f1b", 8, 3 / 11), ("interleaved", 4, 3 / 11), ("interleaved", 8, 3 / 19)],
)
def test_theory_of_four_stages(schedule, micro_batches, theory):
    case = Case(schedule, micro_batches, 0.05, 8)
    assert case.theory(4) == pytest.approx(theory, rel=1e-15)
    assert case.planned(4) == pytest.approx(theory, rel=1e-12)


def test_a_plan_of_uneven_groups_has_more_bubble_than_theory():
    case = Case("interleaved", 5, 0.05, 8)
    assert case.planned(4) > case.theory(4) + 0.01


def test_record_by_hand():
    """Four stages with 2 s of work each: they waited 0.5, 0.6 and 0.2 of the time; theory says 3 / 11."""
    rounds = [Round(4.0, 8.0), Round(5.0, 8.0), Round(2.5, 8.0)]
    made = record(Case("interleaved", 4, 0.05, 512), 4, rounds)
    assert made == pytest.approx(
        {
            "schedule": "interleaved",
            "ranks": 4,
            "chunks": 2,
            "micro_batches": 4,
            "forward_ms": 50.0,
            "message_bytes": 2048,
            "makespan_ms": 4000.0,
            "theory_bubble": 3 / 11,
            "plan_bubble": 3 / 11,
            "bubble": 0.5,
            "lowest_bubble": 0.2,
            "highest_bubble": 0.6,
            "excess_pct": 100 * (0.5 * 11 / 3 - 1),
        }
    )


def test_one_stage_has_no_bubble_to_exceed(tmp_path):
    made = record(Case("1f1b", 4, 0.05, 512), 1, [Round(4.0, 4.0)])
    assert (made["theory_bubble"], made["bubble"], made["excess_pct"]) == (0, 0, None)
    show("one stage", [made], tmp_path / "records.json")
    assert json.loads((tmp_path / "records.json").read_text(encoding="utf-8")) == [made]


class Clock:
    """Time that passes only in sleep, and always half a second more than was asked for."""

    now = 0.0

    def perf_counter(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds + 0.5


def test_work_is_what_was_really_slept(monkeypatch):
    monkeypatch.setattr(stages, "time", Clock())
    layer, x = FixedTime(1.0, 2.0), np.ones((1, 3), np.float32)
    y, cache = layer.forward({}, x, EVALUATE)
    assert y is x
    assert layer.busy_s == 1.5
    assert layer.backward({}, cache, x, {}) is x
    assert layer.busy_s == 4.0


def test_every_schedule_with_every_number_of_micro_batches():
    cases = make_cases(["afab", "interleaved"], [4, 2], 0.05, 8)
    assert [(case.schedule, case.micro_batches) for case in cases] == [
        ("afab", 4),
        ("afab", 2),
        ("interleaved", 4),
        ("interleaved", 2),
    ]
    with pytest.raises(ConfigError) as refused:
        make_cases(["1f1b", "gpipe"], [4], 0.05, 8)
    assert str(refused.value) == "bench: --schedule: expected one of afab, 1f1b, interleaved, got 'gpipe'"
