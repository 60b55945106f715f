"""M16: what of the exchange was hidden behind computation is measured by what had come, and never claimed."""

import numpy as np
import pytest

from mpitrain.collectives import reducer
from mpitrain.collectives.registry import make_reducer
from mpitrain.comm.grid import Axis
from mpitrain.config.schema import ExchangeConfig
from mpitrain.params import Layout, Params, ParamSpec
from mpitrain.train.buckets import BucketSums
from mpitrain.train.summary import hidden_share, overlap_note
from tests.reference.places import Place

SIZE = 1000


@pytest.fixture
def pair():
    """The sums of two ranks."""
    config = ExchangeConfig(codec="raw", memory="none", bucket_mb=1.0)
    layout = Layout([ParamSpec("w", (SIZE,), decay=True)], lambda spec: "raw")
    grads = [Params(layout, np.float32) for _ in range(2)]
    return [BucketSums(make_reducer("direct", Axis(Place(r, 2))), grads[r], config, seed=0) for r in range(2)]


def test_what_has_come_is_hidden(pair):
    for sums in pair:
        sums.start(1)
    for sums in pair:
        sums.poll()
    for sums in pair:
        traffic = sums.finish().traffic
        assert traffic.received_bytes == 4 * SIZE + 2 * 16
        assert (traffic.hidden_bytes, traffic.exposed_bytes) == (traffic.received_bytes, 0)


def test_what_comes_while_waiting_is_exposed(pair, monkeypatch):
    """One rank starts only when the other one waits; its own sum is complete before it does."""
    late = []

    def wait(what, *, timeout_s):
        if not late:
            late.append(pair[1])
            pair[1].start(1)
        while not what.poll():
            pair[1].poll()

    monkeypatch.setattr(reducer, "wait", wait)
    pair[0].start(1)
    traffic = pair[0].finish().traffic
    assert (traffic.hidden_bytes, traffic.exposed_bytes) == (0, traffic.received_bytes) != (0, 0)
    traffic = pair[1].finish().traffic
    assert (traffic.hidden_bytes, traffic.exposed_bytes) == (traffic.received_bytes, 0) != (0, 0)


def rows(*pairs):
    return [{"hidden_bytes": hidden, "exposed_bytes": exposed} for hidden, exposed in pairs]


@pytest.mark.parametrize(
    ("settings", "measured", "share"),
    [
        ({}, rows((30, 70), (70, 30)), 0.5),
        ({}, rows((0, 100)), 0.0),
        ({}, rows((0, 0)), None),
        ({"overlap": False}, rows((30, 70)), None),
        ({"when": "local"}, rows((30, 70)), None),
        ({"when": "local", "delay": 2}, rows((30, 70)), 0.3),
        ({"when": "server"}, rows((0, 0)), None),
    ],
)
def test_share(settings, measured, share):
    assert hidden_share(ExchangeConfig(**settings), measured) == share


def test_only_an_overlap_that_hides_nothing_is_told():
    assert overlap_note(None) == overlap_note(0.05) == overlap_note(1.0) == []
    (line,) = overlap_note(0.0499)
    assert line.startswith("overlap   is not effective: 5.0% of what the exchange received had come when backward")
