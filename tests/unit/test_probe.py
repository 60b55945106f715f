"""What `mpitrain probe` makes of its measurements; tests/mpi measures on real ranks."""

import json

import numpy as np
import pytest

from mpitrain.bench.probe import Station, _write, find_stations, measured
from mpitrain.bench.probe import _tell as tell
from mpitrain.comm import probing
from mpitrain.comm.probing import (
    FIRST_BYTES,
    LONG_ENOUGH_S,
    PIECE_BYTES,
    STREAMS,
    Limits,
    Peer,
    Way,
    _pieces,
    later_bytes,
)
from mpitrain.errors import ConfigError, LaunchError
from mpitrain.topology.load import load_topology


def test_one_station_a_host():
    names = ["n1.lan", "n1.lan", "10.0.0.2", "n1.wan", "n1.lan", "_odd host_"]
    assert find_stations(names) == [
        Station("n1", "n1.lan", 0, 3),
        Station("10-0-0-2", "10.0.0.2", 2, 1),
        Station("n1-2", "n1.wan", 3, 1),
        Station("odd-host", "_odd host_", 5, 1),
    ]


def test_every_rank_of_a_single_host_is_a_station():
    assert find_stations(["box", "box"]) == [Station("box-0", "", 0, 1), Station("box-1", "", 1, 1)]
    with pytest.raises(LaunchError, match="one rank has no link to measure; start at least two"):
        find_stations(["box"])


def test_names_are_never_too_long_nor_used_twice():
    stations = find_stations(["x" * 90, "x" * 90 + "y", "x" * 90 + "z", "..."])
    assert [len(station.name) for station in stations] == [40, 42, 42, 4]
    assert len({station.name for station in stations}) == 4


STATIONS = [Station("a", "10.0.0.1", 0, 2), Station("b", "b", 2, 1), Station("c", "c", 3, 1)]
WAYS = [
    Way(source, dest, 0.001 * (source + dest), 1e6 * (1 + source + 10 * dest), 100)
    for first, second in ((0, 2), (0, 3), (2, 3))
    for source, dest in ((first, second), (second, first))
]


def test_the_file_says_what_was_measured(tmp_path):
    path = tmp_path / "new folder" / "my links.toml"
    _write(path, measured(STATIONS, WAYS))
    read = load_topology(path)
    assert [(site.name, site.slots, site.host) for site in read.sites] == [
        ("a", 2, "10.0.0.1"),
        ("b", 1, "b"),
        ("c", 1, "c"),
    ]
    ranks = {"a": 0, "b": 2, "c": 3}
    assert len(read.links) == 3
    for way in WAYS:
        names = [next(name for name, rank in ranks.items() if rank == end) for end in (way.source, way.dest)]
        path_between = read.path(*names)
        assert path_between.alpha_s == pytest.approx(way.alpha_s)
        assert 1 / path_between.beta_s == pytest.approx(way.bytes_s, rel=1e-3)
    with pytest.raises(ConfigError, match="cannot write"):
        _write(tmp_path, measured(STATIONS, WAYS))


def test_the_table_and_the_records(tmp_path, capsys):
    tell(STATIONS, WAYS, 4, tmp_path / "ways.json")
    records = json.loads((tmp_path / "ways.json").read_text())
    assert records[0] == {"source": "a", "dest": "b", "alpha_ms": 2.0, "mbps": 168.0, "sent_bytes": 100}
    assert len(records) == 6
    assert "probe, 4 ranks on 3 sites" in capsys.readouterr().out
    tell(find_stations(["box", "box"]), [Way(0, 1, 1e-6, 1e9, 1), Way(1, 0, 1e-6, 1e9, 1)], 2, None)
    assert "all ranks are on one host" in capsys.readouterr().out


class Link(Peer):
    """The receiving end of a link whose rate is known."""

    def __init__(self, bytes_s, limits, monkeypatch):
        super().__init__(None, 1, limits)
        self.now, self.bytes_s, self.asked = 0.0, bytes_s, []
        monkeypatch.setattr(probing.time, "perf_counter", lambda: self.now)

    def _receive(self, size):
        self.asked.append(size)
        self.now += size / self.bytes_s
        return later_bytes(size) / self.bytes_s, size / self.bytes_s

    def _tell(self, number):
        self.asked.append(number)


@pytest.mark.parametrize("bytes_s", [1e5, 1e6, 1e8])
def test_streams_grow_until_they_are_long_enough(bytes_s, monkeypatch):
    link = Link(bytes_s, Limits(seconds=100), monkeypatch)
    rate, sent = link.time_streams()
    assert rate == pytest.approx(bytes_s)
    *streams, end = link.asked
    assert end == 0
    assert sent == sum(streams)
    assert len(streams) >= STREAMS
    assert len(set(streams[-STREAMS:])) == 1
    assert streams == sorted(streams)
    assert streams[0] == FIRST_BYTES
    assert later_bytes(streams[-1]) / bytes_s >= LONG_ENOUGH_S


def test_fast_links_end_at_the_largest_stream(monkeypatch):
    link = Link(1e12, Limits(stream_bytes=2**20), monkeypatch)
    assert link.time_streams()[0] == pytest.approx(1e12)
    assert link.asked == [2**16, 2**18, 2**20, 2**20, 2**20, 0]


def test_streams_that_come_all_at_once(monkeypatch):
    """Through memory, the later half is there when the first has been noticed."""
    link = Link(1e9, Limits(stream_bytes=FIRST_BYTES), monkeypatch)
    link._receive = lambda size: (1e-7, size / 1e9)
    assert link.time_streams() == (pytest.approx(1e9), STREAMS * FIRST_BYTES)


def test_slow_links_end_when_their_time_is_up(monkeypatch):
    """At least one stream is measured: here it takes a minute."""
    link = Link(1e3, Limits(seconds=1.0), monkeypatch)
    assert link.time_streams() == (pytest.approx(1e3), FIRST_BYTES)
    assert link.asked == [FIRST_BYTES, 0]


@pytest.mark.parametrize("size", [1, PIECE_BYTES, PIECE_BYTES + 1, FIRST_BYTES, 10**6, 16 * PIECE_BYTES])
def test_the_later_half_of_the_pieces(size):
    pieces = _pieces(np.zeros(size, np.uint8))
    assert sum(piece.size for piece in pieces) == size
    assert sum(piece.size for piece in pieces[len(pieces) // 2 :]) == later_bytes(size)
    assert max(piece.size for piece in pieces) <= PIECE_BYTES


@pytest.mark.parametrize(("mbps", "mtu"), [(10, 9000), (9.99, 1500)])
def test_packets_are_small_where_a_measured_link_is_slow(tmp_path, mbps, mtu):
    """As small as those of a topology that somebody has written."""
    ways = [Way(0, 2, 0.01, 1e8, 100), Way(2, 0, 0.01, mbps * 125_000, 100)]
    _write(tmp_path / "t.toml", measured(STATIONS[:2], ways))
    assert load_topology(tmp_path / "t.toml").mtu == mtu


@pytest.mark.parametrize("host", ["1234", "0xBEEF", "x" * 39 + "-y.lan"])
def test_every_site_name_can_be_read_back(tmp_path, host):
    (tmp_path / "t.toml").write_text(
        f'[[site]]\nname = "{find_stations([host, "other"])[0].name}"\nhost = "{host}"\n'
        f'[[site]]\nname = "other"\n[[link]]\nbetween = ["{find_stations([host, "other"])[0].name}", "other"]\n'
        "rate_mbps = 1\ndelay_ms = 1\n"
    )
    assert load_topology(tmp_path / "t.toml").sites[0].host == host
