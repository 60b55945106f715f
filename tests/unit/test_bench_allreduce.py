"""What `mpitrain bench allreduce` measures and makes of it; bounds by hand."""

from itertools import product
from pathlib import Path

import pytest

from mpitrain.bench.allreduce import make_cases, parse_stream
from mpitrain.bench.bound import bound_s
from mpitrain.bench.sums import PEER, Case, Round, peer_of, record, verdicts
from mpitrain.cli import allreduce
from mpitrain.cli.main import run
from mpitrain.codecs.registry import make_codec
from mpitrain.collectives.predicted import sent_between, sent_for_sum
from mpitrain.comm import runtime
from mpitrain.config.schema import ExchangeConfig
from mpitrain.errors import ConfigError
from mpitrain.topology.model import Constant, Direction, Link, Site, Topology


def topology(*links, slots=1):
    """Sites named by letters; a link is (ends, bytes a second, seconds), or with its own way down."""
    names = sorted({end for ends, *_ in links for end in ends})
    made = [
        Link((ends[0], ends[1]), Direction(Constant(rate), delay), Direction(Constant((down or [rate])[0]), delay))
        for ends, rate, delay, *down in links
    ]
    return Topology(tuple(Site(name, slots=slots) for name in names), tuple(made), name="drawn")


STAR = topology(("az", 1000, 0.1), ("bz", 1000, 0.1), ("cz", 1000, 0.1), ("dz", 1000, 0.1))
"""Four cells, and the core as the last rank."""

RAW = Case("direct", "raw", "none", 1200, 256)


@pytest.mark.parametrize("collective", ["direct", "ring", "server"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_bytes_between_ranks_add_up(collective, ranks):
    if collective == "server" and ranks == 1:
        return
    for name, memory, size in (("raw", "none", 0), ("int8", "delta", 1000), ("fp16", "none", 4097)):
        codec = make_codec(name)
        between = sent_between(collective, codec, memory, size, ranks, segment=256)
        sent = sent_for_sum(collective, codec, memory, size, ranks, segment=256)
        assert [sum(row) for row in between] == [one.nbytes for one in sent]
        assert all(between[rank][rank] == 0 for rank in range(ranks))


def test_bound_of_a_star():
    """2 (p - 1) / p of the vector at the rate of a link, and two latencies of two links each."""
    chunk = 1200 + 16
    assert RAW.bound_s(STAR, 4) == pytest.approx(2 * 3 * chunk / 1000 + 2 * 0.2)
    assert peer_of(1200).bound_s(STAR, 4) == RAW.bound_s(STAR, 4)
    assert Case("ring", "raw", "none", 1200, 256).bound_s(STAR, 4) == RAW.bound_s(STAR, 4)
    # The messages of a ring can only follow each other; of a small vector, that is all.
    assert Case("ring", "raw", "none", 4, 256).bound_s(STAR, 4) == pytest.approx(6 * 0.2)
    # The core is a rank of its own: nearer, but it adds to nobody's load.
    chunk = 960 + 16
    assert RAW.bound_s(STAR, 5) == pytest.approx(2 * 4 * chunk / 1000 + 2 * 0.2)


def test_bound_of_shared_and_uneven_links():
    """Two ranks a site: what stays there costs nothing, what leaves shares the slower way of the link."""
    pair = topology(("ab", 1000, 0.1, 500), slots=2)
    between = [[0, 7, 10, 20], [7, 0, 30, 40], [1, 2, 0, 7], [3, 4, 7, 0]]
    assert bound_s(pair, "direct", between, [0, 1, 2, 3]) == pytest.approx(0.1 + 0.2)
    back = [list(column) for column in zip(*between, strict=True)]
    assert bound_s(pair, "direct", back, [0, 1, 2, 3]) == pytest.approx(0.2 + 0.2)
    assert bound_s(pair, "direct", between, [0]) == pytest.approx(0.1 + 0.2)
    # Around the ring a, a, b, b: the longest way is twice around without one of the hops between sites.
    assert bound_s(pair, "ring", between, [0, 1, 2, 3]) == pytest.approx(4 * 0.1 - 0.1)
    assert bound_s(topology(("ab", 1, 1), slots=1), "ring", [[0]], [0]) == 0


def test_all_combinations_and_their_peers():
    cases = make_cases([0.004, 1], ["direct", "native"], ["int8", "raw", "int4:delta", "int8"], [64])
    assert cases[:5] == [
        peer_of(1000),
        Case("direct", "raw", "none", 1000, 64),
        Case("direct", "int8", "residual", 1000, 64),
        Case("direct", "int4", "delta", 1000, 64),
        Case("native", "raw", "none", 1000, 64),
    ]
    assert [case.size for case in cases[5:]] == [250_000] * 5
    both = make_cases([1], ["ring"], ["int8"], [64, 0])
    assert [(case.codec, case.segment_kb) for case in both] == [("raw", 0), *product(["raw", "int8"], [64, 0])]
    assert make_cases([1], ["ring"], ["int8"], [])[1].segment_kb == ExchangeConfig().segment_kb


@pytest.mark.parametrize("text", ["int9", "int8:some", "raw:delta", "int8/none", ""])
def test_unknown_streams(text):
    with pytest.raises(ConfigError, match=f"bench: --cell {text}: "):
        parse_stream(text)


def test_unknown_collectives():
    with pytest.raises(ConfigError, match="--collective: expected one of native, ring, direct, server, got 'star'"):
        make_cases([1], ["star"], ["int8"], [])
    for size in (float("inf"), 1e9):
        with pytest.raises(ConfigError, match=r"--size: expected at most 4,000 MB, got"):
            make_cases([size], ["ring"], ["int8"], [])


def test_records_by_hand():
    coded = Case("direct", "int8", "none", 1200, 256)
    peer = peer_of(1200)
    measured = {
        peer: [Round(24.0, 0, 0, 0)] * 3,
        RAW: [Round(seconds, 0.1, 0.2, 7296) for seconds in (10.0, 30.0, 12.0)],
        coded: [Round(4.0, 0.5, 0.25, 1908)] * 3,
    }
    raw, ours = (record(case, 4, measured, STAR) for case in (RAW, coded))
    assert raw["bound_ms"] == pytest.approx(1e3 * (2 * 3 * 1216 / 1000 + 0.4))
    assert raw == raw | {
        "collective": "direct",
        "codec": "raw",
        "memory": "none",
        "segment_kb": 256,
        "ranks": 4,
        "nbytes": 4800,
        "sent_bytes": 7296,
        "ms": 12_000.0,
        "fastest_ms": 10_000.0,
        "slowest_ms": 30_000.0,
        "encode_ms": 100.0,
        "decode_ms": 200.0,
        "of_bound": 12_000.0 / raw["bound_ms"],
        "mpi_ratio": 2.0,
        "raw_ratio": 1.0,
    }
    assert (ours["mpi_ratio"], ours["raw_ratio"]) == (6.0, 3.0)
    assert record(peer, 4, measured, None) == record(peer, 4, measured, None) | {
        "collective": PEER,
        "sent_bytes": None,
        "bound_ms": None,
        "of_bound": None,
        "mpi_ratio": 1.0,
        "raw_ratio": 1.0,
    }


def test_what_pays_is_told():
    """C13: per codec and collective, over all sizes."""

    def row(codec, collective, nbytes, ratio):
        about = {"codec": codec, "memory": "none", "collective": collective, "segment_kb": 64}
        return about | {"nbytes": nbytes, "raw_ratio": ratio}

    records = [
        row("raw", "direct", 4000, 1.0),
        row("int8", "direct", 4000, 0.5),
        row("int8", "ring", 4000, 0.8),
        row("int8", "direct", 4_000_000, 3.456),
        row("int4", "direct", 4_000_000, 4.0),
    ]
    assert verdicts(records) == [
        "int8:none by direct, segments of 64 kB: pays for some sizes: 2.00 x slower than raw at 0.004 MB, 3.46 x "
        "faster than raw at 4 MB",
        "int8:none by ring, segments of 64 kB: does not pay: 1.25 x slower than raw at 0.004 MB",
        "int4:none by direct, segments of 64 kB: pays: 4.00 x faster than raw at 4 MB",
    ]


@pytest.fixture
def command(monkeypatch):
    """Return a function that runs the command and returns its exit code; signals and MPI stay pytest's."""
    monkeypatch.setattr(allreduce.StopRequest, "listen", lambda request: None)
    monkeypatch.setattr(runtime, "finish", lambda: None)

    def call(*options):
        monkeypatch.setattr("sys.argv", ["mpitrain", "bench", "allreduce", *map(str, options)])
        with pytest.raises(SystemExit) as ended:
            run()
        return ended.value.code

    return call


STAR_FILE = Path(__file__).parents[2] / "jobs" / "topologies" / "star.toml"


@pytest.mark.parametrize(
    ("options", "ranks", "sites"),
    [
        ([], 4, None),
        (["-n", "2"], 2, None),
        (["--topology", STAR_FILE], None, 5),
        (["--topology", STAR_FILE, "-n", "3"], 3, 5),
    ],
)
def test_ranks_that_are_started(command, monkeypatch, options, ranks, sites):
    started = []
    monkeypatch.setattr(allreduce, "start", lambda *given: started.append(given) or 0)
    assert command(*options) == 0
    ((wanted, network, _),) = started
    assert wanted == ranks
    assert network.topology is None if sites is None else len(network.topology.sites) == sites


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--cell", "int9"], "bench: --cell int9: expected one of raw"),
        (["--collective", "star"], "bench: --collective: expected one of"),
        (["--emulate"], "add --topology FILE"),
        (["--topology", "missing.toml"], "missing.toml"),
    ],
)
def test_refusals_before_anything_starts(command, monkeypatch, capsys, options, words):
    monkeypatch.setattr(allreduce, "start", lambda *given: pytest.fail("something was started"))
    assert command(*options) == 2
    assert words in capsys.readouterr().err
