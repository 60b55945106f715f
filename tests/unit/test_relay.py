"""The relay between descriptors that are no network: what goes where, in which order, and how it is counted."""

import os
import socket
import threading
from dataclasses import replace

import pytest

from mpitrain.bench import relay as bench
from mpitrain.emulate.counts import BINS, Counts, Gauge, RelayLoad, link_counts
from mpitrain.emulate.kernel import TUN_HEADER
from mpitrain.emulate.network import Network
from mpitrain.emulate.relay import ASK, Relay, addresses
from mpitrain.topology.model import Constant, Direction, Link, Site, Topology

FAST = Direction(Constant(1e9), delay_s=0.0, queue_bytes=10**9)
STAR = Topology(
    (Site("a"), Site("b"), Site("hub", slots=0)),
    (Link(("a", "hub"), FAST, FAST), Link(("b", "hub"), FAST, FAST)),
    mtu=1500,
)


def packet(source, dest, payload=b"", version=4):
    """Lay out what the relay reads of an IPv4 packet: version and addresses, behind the header of TUN devices."""
    return (
        bytes(TUN_HEADER)
        + bytes([version << 4])
        + bytes(11)
        + socket.inet_aton(source)
        + socket.inet_aton(dest)
        + payload
    )


class Wired:
    """A relay in a thread, with one end for every site; `ask` as the emulator does."""

    def __init__(self, topology):
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in topology.sites]
        self.ends = [one for one, _ in pairs]
        self._others = [other for _, other in pairs]
        self._control, control = socket.socketpair()
        for other in self._others:
            other.setblocking(False)
        for end in (*self.ends, self._control):
            end.settimeout(30)
        self.relay = relay = Relay(topology, [other.fileno() for other in self._others], control)
        self._thread = threading.Thread(target=self._run, args=(relay, control))

    def _run(self, relay, control):
        with control:
            relay.run()

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *error):
        self._control.close()
        self._thread.join(30)
        assert not self._thread.is_alive()
        for end in (*self.ends, *self._others):
            end.close()

    def ask(self):
        self._control.sendall(ASK)
        line = b""
        while not line.endswith(b"\n"):
            line += self._control.recv(4096)
        return Counts.from_json(line)


def test_addresses_of_many_sites():
    many = addresses(Topology(tuple(Site(f"s{number}") for number in range(600)), ()))
    assert many[:2] + many[249:251] + many[-1:] == ["10.77.0.1", "10.77.0.2", "10.77.0.250", "10.77.1.1", "10.77.2.100"]
    assert len(set(many)) == 600


def test_packets_arrive_whole_in_order_and_are_counted():
    a, b, _ = addresses(STAR)
    sent = [packet(a, b, bytes([number % 256]) * number) for number in range(300)]
    with Wired(STAR) as wired:
        for number in range(0, 300, 50):
            for each in sent[number : number + 50]:
                wired.ends[0].send(each)
            assert [wired.ends[1].recv(2000) for _ in range(50)] == sent[number : number + 50]
        wired.ends[1].send(packet(b, a))
        assert wired.ends[0].recv(2000) == packet(b, a)
        counts = wired.ask()
    nbytes = sum(len(each) - TUN_HEADER for each in sent)
    carried = [
        (each.source, each.dest, each.packets, each.arrived_packets, each.arrived_bytes) for each in counts.links
    ]
    assert carried == [
        ("a", "hub", 300, 300, nbytes),
        ("hub", "a", 1, 1, 20),
        ("b", "hub", 1, 1, 20),
        ("hub", "b", 300, 300, nbytes),
    ]
    assert (counts.relay.delivered_packets, counts.relay.delivered_bytes) == (301, nbytes + 20)


def test_what_has_no_way_is_dropped_and_counted():
    a, b, _ = addresses(STAR)
    strange = [
        packet(a, "224.0.0.22"),
        packet(a, b, version=6),
        packet(a, "10.77.0.200"),
        packet(a, a),
        bytes(TUN_HEADER + 1),
    ]
    with Wired(STAR) as wired:
        for each in strange:
            wired.ends[0].send(each)
        wired.ends[0].send(packet(a, b, b"last"))
        assert wired.ends[1].recv(2000) == packet(a, b, b"last")
        counts = wired.ask()
    assert (counts.relay.unroutable_packets, counts.relay.delivered_packets) == (len(strange), 1)
    assert sum(each.packets for each in counts.links) == 2


def test_a_host_that_has_gone_stops_nobody():
    a, b, hub = addresses(STAR)
    with Wired(STAR) as wired:
        wired.ends[1].close()
        wired.ends[0].send(packet(a, b))
        wired.ends[0].send(packet(a, hub))
        assert wired.ends[2].recv(2000) == packet(a, hub)
        counts, busy = wired.ask(), wired.ask()
    assert (counts.relay.refused_packets, counts.relay.delivered_packets) == (1, 1)
    assert counts.relay.unroutable_packets == busy.relay.unroutable_packets == 0
    assert len(wired.relay.watched) == 1 + 2  # for the emulator and two hosts


def test_traffic_that_never_begins_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(bench, "HANG_S", 0.01)
    reader, writer = os.pipe()
    with os.fdopen(reader) as output, os.fdopen(writer, "w") as part:
        assert not bench._is_ready(output)
        part.write("ready\n")
        part.flush()
        assert bench._is_ready(output)


def test_gauge():
    """Delays in bins of 0.01 ms; a second is limited by a busy core, or by more than half of the packets above 1 ms."""
    gauge = Gauge()
    for late_s in [0.0, 0.00012, 0.00012, 0.003, 7.0]:
        gauge.note(late_s)
    assert (gauge.quantile_ms(0.2), gauge.quantile_ms(0.5)) == pytest.approx((0.01, 0.13))
    assert (gauge.quantile_ms(0.8), gauge.quantile_ms(0.99)) == pytest.approx((3.01, BINS / 100), abs=0.011)
    gauge.second(1.0, 0.5)  # 2 of 5 late, half a core
    assert (gauge.seconds, gauge.limited_seconds, gauge.busiest) == (1, 0, 0.5)
    gauge.note(0.0)
    gauge.second(2.0, 1.45)  # 95 % of a core
    gauge.second(3.0, 2.45)  # busy without a packet
    assert (gauge.seconds, gauge.limited_seconds) == (2, 1)
    for late_s in [0.0, 0.002, 0.002]:
        gauge.note(late_s)
    gauge.second(4.0, 2.5)
    assert (gauge.seconds, gauge.limited_seconds, gauge.busiest) == (3, 2, pytest.approx(1.0))


def test_table_and_json():
    cut = replace(STAR.links[0], outages=((0.0, float("inf")),))
    network = Network(replace(STAR, links=(cut, STAR.links[1])))
    network.enter(1.0, network.route(0, 1), b"x" * 1000)
    network.enter(1.0, network.route(1, 2), b"x" * 2500)
    load = RelayLoad(7, 3500, 1, 0, 10.0, 2.5, 0.5, 0.11, 2.5, 4, 0, "nice -10")
    counts = Counts(link_counts(network), load)
    assert Counts.from_json(counts.to_json()) == counts
    assert counts.table() == [
        "link       packets          MB  queue full     lost      cut",
        "a > hub          0       0.000           0        0        1",
        "b > hub          1       0.003           0        0        0",
        "relay: 7 packets, 0.004 MB, late by 0.11 ms at the median, 2.50 ms at the 99th percentile; 25% of a core, "
        "50% in the busiest second (nice -10)",
    ]
    limited = Counts([], RelayLoad(7, 3500, 1, 0, 10.0, 9.5, 0.99, 4.0, 9.0, 8, 3, "nice -10"))
    assert limited.table()[0] == "no link carried anything"
    assert limited.table()[-1].startswith(
        "relay: it was the limit itself in 3 of 8 seconds with traffic: the links were"
    )
