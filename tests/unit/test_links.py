"""The arithmetic of emulated links: when packets leave and arrive, and that none gets lost without being counted."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpitrain.emulate.links import Interrupted, Wire
from mpitrain.emulate.network import Network
from mpitrain.errors import ConfigError
from mpitrain.topology.model import Constant, Direction, Link, Site, Topology
from mpitrain.topology.rates import Trace
from tests.reference.links import departures

FOREVER = float("inf")
PLAIN = Direction(Constant(1000.0), delay_s=0.5, queue_bytes=10**9)


def wire(outages=(), seed="", **changes):
    return Wire(replace(PLAIN, **changes), outages, seed)


def send_all(link, packets):
    return [link.send(now_s, nbytes) for now_s, nbytes in packets]


def test_packets_follow_one_another():
    """1000 bytes/s: 100 bytes take 0.1 s, one after the other; the third comes while the second is being sent."""
    times = send_all(wire(), [(0.0, 100), (0.0, 100), (0.15, 300), (2.0, 500)])
    assert times == [pytest.approx(each) for each in [(0.6,), (0.7,), (1.0,), (3.0,)]]


def test_full_queue_drops_the_tail():
    link = wire(queue_bytes=250, delay_s=0.0)
    times = send_all(link, [(0.0, 100)] * 4 + [(0.05, 50), (0.15, 100), (0.15, 100)])
    # One is being sent, two wait, there is no room for a third, but for half of one; the first of the two has left
    # the queue when the last ones come: 150 bytes wait, and 100 more fit once.
    assert times == [pytest.approx(each) for each in [(0.1,), (0.2,), (0.3,), (), (0.35,), (0.45,), ()]]
    assert (link.tally.full_packets, link.tally.full_bytes) == (2, 200)


def test_no_queue_at_all():
    """What finds the link idle is sent, whatever the length of the queue."""
    assert send_all(wire(queue_bytes=0), [(0.0, 100), (0.05, 1), (0.1, 100)]) == [(0.6,), (), (0.7,)]


def test_rates_are_integrated():
    """250 bytes: 100 in the first second, none in the second, the rest at 300 bytes/s; then the trace begins anew."""
    link = wire(rate=Trace((0.0, 1.0, 2.0), (100.0, 0.0, 300.0), 4.0), delay_s=0.0)
    times = send_all(link, [(0.0, 250), (0.0, 450), (4.5, 50)])
    assert times == [pytest.approx(each) for each in [(2.5,), (4.0,), (5.0,)]]
    # 50 bytes until 5.0 fill the step exactly; the next byte has to wait for the end of the stall.
    assert link.send(5.0, 300) == pytest.approx((7.0,))


def test_outage_keeps_what_waits():
    """100 bytes leave before second 1, the other 50 of the packet after second 3."""
    link = wire(((1.0, 3.0),), rate=Constant(100.0), delay_s=0.25, queue_bytes=80)
    assert send_all(link, [(0.0, 150), (2.0, 80), (2.5, 10)]) == [(3.75,), (4.55,), ()]
    assert (link.tally.full_packets, link.tally.cut_packets) == (1, 0)


def test_permanent_cut():
    link = wire(((1.0, FOREVER),), rate=Constant(100.0), delay_s=0.0)
    assert send_all(link, [(0.0, 90), (0.5, 20), (0.6, 5), (7.0, 1)]) == [pytest.approx((0.9,)), (), (), ()]
    assert (link.tally.cut_packets, link.tally.cut_bytes) == (3, 26)


def test_interrupted_rate():
    rate = Interrupted(Trace((0.0, 2.0), (10.0, 20.0), 4.0), ((1.0, 3.0), (2.5, 3.5), (9.0, FOREVER)))
    wanted = [(10.0, 1.0), (0.0, 3.0), (0.0, 3.5), (20.0, 4.0), (20.0, 8.0), (10.0, 9.0), (0.0, FOREVER)]
    assert [rate.at(time_s) for time_s in (0.0, 1.0, 2.75, 3.5, 7.5, 8.5, 1e9)] == wanted


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 6)), max_size=30),
    st.lists(st.sampled_from([0, 64]), min_size=1, max_size=6).filter(any),
    st.integers(0, 20),
)
def test_equals_a_machine_of_ticks(packets, pattern, queue):
    """A link that sends 64 bytes a tick, or none, leaves packets at the ticks of a simulation that counts them."""
    packets = [(tick, 64 * size) for tick, size in sorted(packets)]
    tick_s = 2.0**-10
    starts = tuple(tick_s * number for number in range(len(pattern)))
    rate = Trace(starts, tuple(each / tick_s for each in pattern), tick_s * len(pattern))
    link = wire(rate=rate, delay_s=0.0, queue_bytes=64 * queue)
    times = send_all(link, [(tick * tick_s, nbytes) for tick, nbytes in packets])
    wanted = departures(packets, pattern, 64 * queue, 3000)
    assert times == [() if tick is None else (tick * tick_s,) for tick in wanted]


faults = {"loss": 0.2, "duplicate": 0.2, "reorder": 0.1, "jitter_s": 0.05}


@given(st.lists(st.tuples(st.floats(0, 2), st.integers(1, 2000)), max_size=60), st.integers(0, 5), st.booleans())
def test_every_packet_is_counted(packets, seed, broken):
    """What came = what arrived + full + lost + cut, in packets and bytes; the same seed has the same fate."""
    packets = sorted(packets)
    outages = ((0.5, 0.7), (1.5, FOREVER)) if broken else ()
    one, other = (wire(outages, str(seed), queue_bytes=3000, **faults) for _ in range(2))
    times = send_all(one, packets)
    assert times == send_all(other, packets)
    assert one.tally == other.tally
    tally = one.tally
    assert tally.packets == len(packets)
    assert tally.bytes == sum(nbytes for _, nbytes in packets)
    assert tally.packets == tally.arrived_packets + tally.full_packets + tally.lost_packets + tally.cut_packets
    assert tally.bytes == tally.arrived_bytes + tally.full_bytes + tally.lost_bytes + tally.cut_bytes
    assert tally.arrived_packets == sum(bool(each) for each in times)
    assert tally.duplicated_packets == sum(len(each) == 2 for each in times)


def test_shares_of_faults():
    """Of 20 000 packets, within four standard deviations."""
    link = wire(seed="1", loss=0.1, duplicate=0.2, reorder=0.05)
    for number in range(20_000):
        link.send(float(number), 1)
    tally = link.tally
    assert tally.lost_packets == pytest.approx(2000, abs=4 * (20_000 * 0.1 * 0.9) ** 0.5)
    assert tally.duplicated_packets == pytest.approx(3600, abs=4 * (18_000 * 0.2 * 0.8) ** 0.5)
    assert tally.reordered_packets == pytest.approx(900, abs=4 * (18_000 * 0.05 * 0.95) ** 0.5)


def test_jitter_keeps_the_order():
    link = wire(seed="2", jitter_s=0.3)
    times = [link.send(0.01 * number, 1)[0] for number in range(2000)]
    assert times == sorted(times)
    delays = [time_s - 0.01 * number for number, time_s in enumerate(times)]
    assert max(delays) - min(delays) > 0.3
    assert min(delays) >= 0


def test_reordered_packets_overtake():
    """A packet that is sent on without its delay arrives before those that were sent up to 0.5 s earlier."""
    link = wire(seed="3", reorder=0.1, rate=Constant(1e6))
    times = [link.send(0.1 * number, 1)[0] for number in range(200)]
    early = [number for number, time_s in enumerate(times) if time_s < 0.1 * number + 0.4]
    assert len(early) == link.tally.reordered_packets > 0
    assert times != sorted(times)
    rest = [time_s for number, time_s in enumerate(times) if number not in early]
    assert rest == sorted(rest)


STAR = Topology(
    (Site("a"), Site("b"), Site("c"), Site("hub", slots=0)),
    (
        Link(("a", "hub"), PLAIN, PLAIN),
        Link(("b", "hub"), replace(PLAIN, delay_s=0.25), PLAIN),
        Link(("c", "hub"), PLAIN, replace(PLAIN, rate=Constant(500.0), delay_s=0.0)),
    ),
)


def test_ways_share_their_links():
    """From a and b to c: both reach the hub on links of their own, and then wait for each other, first come first."""
    network = Network(STAR)
    a_to_c, b_to_c = network.route(0, 2), network.route(1, 2)
    network.enter(0.0, a_to_c, b"A" * 100)  # at the hub at 0.6
    network.enter(0.0, b_to_c, b"B" * 200)  # at the hub at 0.45, gone at 0.85
    network.enter(0.05, b_to_c, b"b" * 50)  # at the hub at 0.5, gone at 0.95
    assert network.next_s == pytest.approx(0.45)
    assert network.due(0.84) == []
    found = network.due(2.0)
    assert [packet[:1] for _, _, packet in found] == [b"B", b"b", b"A"]
    assert [due_s for due_s, _, _ in found] == pytest.approx([0.85, 0.95, 1.15])
    assert {dest for _, dest, _ in found} == {2}
    assert network.next_s == FOREVER


def test_packets_of_one_moment_keep_their_order():
    fast = replace(PLAIN, rate=Constant(1e30))
    network = Network(replace(STAR, links=tuple(replace(link, up=fast, down=fast) for link in STAR.links)))
    for letter in (b"A", b"B", b"C", b"D"):
        network.enter(1.0, network.route(0, 2), letter)
    assert [packet for _, _, packet in network.due(2.0)] == [b"A", b"B", b"C", b"D"]


def test_late_looks_change_no_time():
    """Whoever asks late is told when each packet was due, and the second hop counts from the first one's end."""
    busy, lazy = Network(STAR), Network(STAR)
    for network in (busy, lazy):
        for number in range(20):
            network.enter(0.01 * number, network.route(number % 2, 2), bytes([number]) * 60)
            if network is busy:
                network.due(0.01 * number)
    seen = [each for step in range(400) for each in busy.due(0.2 + step * 0.01)]
    assert seen == lazy.due(10.0)
    assert len(seen) == 20


def test_all_packets_arrive_or_are_counted():
    lossy = replace(PLAIN, loss=0.2, duplicate=0.1, jitter_s=0.1, queue_bytes=400)
    links = tuple(replace(link, up=lossy, down=lossy) for link in STAR.links)
    network = Network(replace(STAR, links=links))
    arrived = []
    for number in range(500):
        arrived += network.due(0.02 * number)
        network.enter(0.02 * number, network.route(number % 3, (number + 1) % 3), b"x" * (10 + number % 40))
    arrived += network.due(100.0)

    def out(up):
        tallies = [wire.tally for (_, way), wire in network.wires.items() if way == up]
        return sum(tally.arrived_packets + tally.duplicated_packets for tally in tallies)

    def into(up):
        return sum(wire.tally.packets for (_, way), wire in network.wires.items() if way == up)

    assert (into(True), into(False), len(arrived)) == (500, out(True), out(False))
    assert network.next_s == FOREVER


def test_no_way():
    network = Network(Topology((Site("a"), Site("b")), ()))
    with pytest.raises(ConfigError, match="no links lead from a to b"):
        network.route(0, 1)
