"""Which fragment is sent and applied at which step of a round, and which buckets it is made of."""

import pytest

from mpitrain.config.schema import ExchangeConfig
from mpitrain.errors import ConfigError
from mpitrain.params import Layout, ParamSpec
from mpitrain.train.buckets import group_of, plan_buckets
from mpitrain.train.fragments import Rounds, deal
from mpitrain.train.outer import deal_buckets

CASES = [
    (h, fragments, delay)
    for h in (1, 2, 3, 7, 10, 30)
    for fragments in (1, 2, 3, 4, 12)
    for delay in range(h)
    if delay < h / fragments
]


def events(rounds, length):
    """List (turn, what, fragment) in the order of a round."""
    found = []
    for turn in range(1, length + 1):
        found += [(turn, "send", k) for k in rounds.sends(turn, length)]
        found += [(turn, "apply", k) for k in rounds.applies(turn, length)]
    return found


def test_offsets_are_staggered():
    rounds = Rounds(h=10, fragments=4, delay=2)
    assert [rounds.applied(k) for k in range(4)] == [3, 5, 8, 10]
    assert [rounds.sent(k) for k in range(4)] == [1, 3, 6, 8]
    assert [rounds.applied(k) for k in range(4)] == [-(-(k + 1) * 10 // 4) for k in range(4)]


@pytest.mark.parametrize(("h", "fragments", "delay"), CASES)
def test_every_fragment_is_sent_once_and_applied_once_a_round(h, fragments, delay):
    """Of any length: nothing is under way at its end, nothing is applied that was not sent, none waits longer."""
    rounds = Rounds(h=h, fragments=fragments, delay=delay)
    for length in range(1, h + 1):
        found = events(rounds, length)
        for what in ("send", "apply"):
            assert sorted(k for _, kind, k in found if kind == what) == list(range(fragments))
        for fragment in range(fragments):
            (sent,) = [i for i, event in enumerate(found) if event[1:] == ("send", fragment)]
            (applied,) = [i for i, event in enumerate(found) if event[1:] == ("apply", fragment)]
            assert sent < applied
            waited = found[applied][0] - found[sent][0]
            assert waited == delay if rounds.applied(fragment) <= length else waited <= delay


def test_a_full_round_spreads_its_fragments():
    assert events(Rounds(h=6, fragments=3, delay=1), 6) == [
        (1, "send", 0),
        (2, "apply", 0),
        (3, "send", 1),
        (4, "apply", 1),
        (5, "send", 2),
        (6, "apply", 2),
    ]


def test_a_short_round_ends_with_the_rest():
    assert events(Rounds(h=6, fragments=3, delay=1), 3) == [
        (1, "send", 0),
        (2, "apply", 0),
        (3, "send", 1),
        (3, "send", 2),
        (3, "apply", 1),
        (3, "apply", 2),
    ]


def test_buckets_are_dealt_whole_and_even():
    dealt = deal([100, 10, 60, 50, 40, 45], 3)
    assert sorted(bucket for fragment in dealt for bucket in fragment) == list(range(6))
    assert dealt == [[0], [2, 4], [1, 3, 5]]  # 100, 100, 105


@pytest.mark.parametrize("fragments", [1, 2, 3, 4])
def test_buckets_that_others_hold_too_change_together(fragments):
    """Whatever else a rank holds, they are in the first fragment."""
    for weights in ([5, 90, 7, 8, 20], [1, 1, 1, 1, 1], [900, 1, 2, 3, 4]):
        dealt = deal(weights, fragments, together={0, 4})
        assert {0, 4} <= set(dealt[0])
        assert all(dealt)
        assert sorted(bucket for fragment in dealt for bucket in fragment) == list(range(5))


def test_more_fragments_than_parts():
    with pytest.raises(ConfigError, match=r"exchange.fragments = 4, but .* in 3 parts; set exchange.fragments = 3"):
        deal([1, 2, 3], 4)
    with pytest.raises(ConfigError, match="in 2 parts"):
        deal([1, 2, 3], 3, together={0, 1})


@pytest.mark.parametrize("others", [[(30, 40), (20, 90)], [(90, 90)], [(12, 100)]])
def test_a_tied_tensor_is_in_the_first_fragment_on_every_stage(others):
    """Beside larger and smaller tensors of the stage alone."""
    config = ExchangeConfig(when="local", h=10, fragments=2, codec="int8", memory="none", bucket_mb=1e-6)
    specs = [ParamSpec("tied", (40, 50)), *(ParamSpec(f"own{i}", shape) for i, shape in enumerate(others))]
    layout = Layout(specs, group_of(config, {"tied": "stages 0, 3"}))
    names = [[segment.spec.name for segment in segments] for segments in plan_buckets(layout, 1e-6, {"tied"})]
    assert names.index(["tied"]) in deal_buckets(layout, config, {"tied"})[0]
