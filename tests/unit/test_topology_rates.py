"""Rates over time: steps, mahimahi and CSV files with their faults, rates drawn from profiles."""

import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpitrain.errors import ConfigError
from mpitrain.topology import rates
from mpitrain.topology.model import Constant
from mpitrain.topology.profiles import PROFILES
from mpitrain.topology.rates import GENERATED_S, Trace, generated
from mpitrain.topology.traces import read_trace

MAHIMAHI = Path(__file__).parents[3] / "shared" / "data" / "mahimahi" / "mahimahi_100ms.npz"


def read(folder, text):
    (folder / "trace").write_text(text, encoding="utf-8")
    return read_trace(folder / "trace")


def carried(rate, begin_s, end_s):
    """Add up bytes from step to step, as a link does."""
    total = 0.0
    while begin_s < end_s:
        bytes_s, until_s = rate.at(begin_s)
        assert until_s > begin_s
        total += bytes_s * (min(until_s, end_s) - begin_s)
        begin_s = until_s
    return total


# Steps.


def test_a_constant_holds_for_ever():
    assert Constant(5.0).at(1e9) == (5.0, math.inf)
    assert Constant(5.0).mean_bytes_s == 5.0


def test_steps_and_laps():
    trace = Trace((0.0, 1.0, 4.0), (8.0, 0.0, 2.0), 6.0)
    assert trace.mean_bytes_s == 2.0
    for time_s, rate, until_s in (
        (0.0, 8, 1),
        (0.5, 8, 1),
        (1.0, 0, 4),
        (3.9, 0, 4),
        (4.0, 2, 6),
        (6.0, 8, 7),
        (7.0, 0, 10),
        (6000.5, 8, 6001),
        (6005.0, 2, 6006),
    ):
        assert trace.at(time_s) == (rate, until_s)
    assert carried(trace, 0, 60) == pytest.approx(120)


@given(
    st.lists(st.floats(1e-3, 10), min_size=1, max_size=8),
    st.floats(0, 1e6),
)
def test_time_always_goes_on(spans, time_s):
    """Whatever rounding does to the ends of steps, the end of a step is later than now."""
    starts = np.concatenate([[0], np.cumsum(spans)])
    trace = Trace(tuple(map(float, starts[:-1])), tuple(map(float, range(1, len(spans) + 1))), float(starts[-1]))
    for _ in range(20):
        rate, until_s = trace.at(time_s)
        assert until_s > time_s
        assert rate in trace.rates
        time_s = until_s


# Files.


def test_mahimahi_packets_become_rates(tmp_path):
    """Two packets in the first 10 ms, none in the next, one at the end of the last 5 ms, which is the period."""
    trace = read(tmp_path, "0\n10\n25\n")
    assert trace == Trace((0.0, 0.01, 0.02), (300_000.0, 0.0, 300_000.0), 0.025, file=str(tmp_path / "trace"))
    assert trace.mean_bytes_s == pytest.approx(3 * 1500 / 0.025)


def test_equal_steps_are_joined(tmp_path):
    assert read(tmp_path, "".join(f"{ms}\n" for ms in range(1, 1001))).starts_s == (0.0,)
    assert read(tmp_path, "time_s,mbps\n0,8\n1,8\n2,4\n").starts_s == (0.0, 2.0)


@given(st.lists(st.integers(0, 500), min_size=1, max_size=60).map(sorted).filter(lambda times: times[-1] > 0))
def test_every_packet_of_a_mahimahi_file_is_carried(tmp_path_factory, times):
    trace = read(tmp_path_factory.mktemp("trace"), "\n".join(map(str, times)))
    assert trace.period_s == times[-1] / 1000
    assert trace.mean_bytes_s * trace.period_s == pytest.approx(1500 * len(times))
    for end_ms in range(10, times[-1], 10):
        sent = carried(trace, 0, end_ms / 1000) / 1500
        assert sent == pytest.approx(sum(time <= end_ms for time in times), abs=1e-6)


def test_csv_steps_hold_until_the_next_line(tmp_path):
    trace = read(tmp_path, "time_s, mbps\n100,8\n100.5,0\n101,16.0\n\n")
    assert trace == Trace((0.0, 0.5, 1.0), (1e6, 0.0, 2e6), 1.5, file=str(tmp_path / "trace"))


def test_csv_of_other_systems(tmp_path):
    (tmp_path / "trace").write_bytes("\ufefftime_s,mbps\r\n0,8\r\n1,16\r\n".encode())
    assert read_trace(tmp_path / "trace").rates == (1e6, 2e6)


def test_uneven_clocks_are_no_gaps(tmp_path):
    assert read(tmp_path, "time_s,mbps\n0,1\n0.98,2\n2.4,3\n3.41,4\n").period_s == pytest.approx(4.42)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "expected at least two lines, got an empty file"),
        ("\n\n \n", "expected at least two lines, got an empty file"),
        ("hello\n", "line 1: expected time_s,mbps, or the millisecond of a packet (mahimahi's format), got 'hello'"),
        (
            "time,rate\n0,1\n",
            "line 1: expected time_s,mbps, or the millisecond of a packet (mahimahi's format), got 'time,rate'",
        ),
        ("-1\n", "line 1: expected time_s,mbps, or the millisecond of a packet (mahimahi's format), got '-1'"),
        ("1\n2.5\n", "line 2: expected a whole number of milliseconds, got '2.5'"),
        ("1\n\n2\n", "line 2: expected a whole number of milliseconds, got ''"),
        ("1\n²\n", "line 2: expected a whole number of milliseconds, got '²'"),
        ("5\n7\n6\n", "line 3: times go back, from 7 to 6 ms; sort them"),
        ("0\n0\n", "expected the last line, its period, at 1 to 86400000 ms, got 0"),
        ("1\n999999999999\n", "expected the last line, its period, at 1 to 86400000 ms, got 999999999999"),
        ("time_s,mbps\n", "expected at least two lines after the first, got 0"),
        ("time_s,mbps\n0,1\n", "expected at least two lines after the first, got 1"),
        ("time_s,mbps\n0,1\n1\n", "line 3: expected seconds and a rate of 0 to 1e+06 Mbit/s, got '1'"),
        ("time_s,mbps\n0,1\n\n2,1\n", "line 3: expected seconds and a rate of 0 to 1e+06 Mbit/s, got ''"),
        ("time_s,mbps\n0,1\n1,\n", "line 3: expected seconds and a rate of 0 to 1e+06 Mbit/s, got '1,'"),
        ("time_s,mbps\n0,1\n1,-2\n", "line 3: expected seconds and a rate of 0 to 1e+06 Mbit/s, got '1,-2'"),
        ("time_s,mbps\n0,1\n1,nan\n", "line 3: expected seconds and a rate of 0 to 1e+06 Mbit/s, got '1,nan'"),
        ("time_s,mbps\n0,1\n1,1e7\n", "line 3: expected seconds and a rate of 0 to 1e+06 Mbit/s, got '1,1e7'"),
        ("time_s,mbps\n0,1\nnan,1\n", "line 3: expected seconds and a rate of 0 to 1e+06 Mbit/s, got 'nan,1'"),
        ("time_s,mbps\n0,1\ninf,1\n", "line 3: expected seconds and a rate of 0 to 1e+06 Mbit/s, got 'inf,1'"),
        ("time_s,mbps\n0,1,2\n1,1,2\n", "line 2: expected seconds and a rate of 0 to 1e+06 Mbit/s, got '0,1,2'"),
        ("time_s,mbps\n0,1\n0,2\n1,1\n", "line 3: expected a time later than 0 s, got 0; sort the lines"),
        ("time_s,mbps\n3,1\n2,2\n1,1\n", "line 3: expected a time later than 3 s, got 2; sort the lines"),
        (
            "time_s,mbps\n0,1\n1,1\n2,1\n6,1\n7,1\n",
            "line 5: a gap of 4 s, where lines are 1 s apart; add the missing lines, with 0 where nothing was carried",
        ),
        ("time_s,mbps\n0,0\n1,0\n", "all rates are zero; a link that never carries anything is left out"),
    ],
)
def test_faults_of_traces(tmp_path, text, expected):
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    assert str(caught.value) == f"trace {tmp_path / 'trace'}: {expected}"


def test_traces_that_are_no_text(tmp_path):
    (tmp_path / "junk").write_bytes(bytes(range(256)))
    (tmp_path / "zeros").write_bytes(b"1\n2\n\0\0\0")
    for name, reason in (
        ("junk", "expected UTF-8 text, got other bytes (invalid start byte)"),
        ("zeros", "expected text, got NUL characters"),
        ("none", "cannot be read: No such file or directory"),
        ("", "cannot be read: Is a directory"),
    ):
        with pytest.raises(ConfigError) as caught:
            read_trace(tmp_path / name)
        assert str(caught.value) == f"trace {tmp_path / name}: {reason}"


@pytest.mark.skipif(not MAHIMAHI.is_file(), reason=f"{MAHIMAHI} is missing")
@pytest.mark.parametrize("name", ["Verizon-LTE-short.up", "ATT-LTE-driving-2016.down", "TMobile-UMTS-driving.up"])
def test_recorded_traces(tmp_path, name):
    """Packets spread evenly over each 100 ms come back as the rate of these 100 ms."""
    with np.load(MAHIMAHI) as file:
        counts = file[name].astype(int)
    counts[-1] = max(counts[-1], 1)  # the last packet is the period
    times = [
        100 * place - (packet + 1) * -100 // count for place, count in enumerate(counts) for packet in range(count)
    ]
    trace = read(tmp_path, "\n".join(map(str, times)))
    assert trace.period_s == pytest.approx(len(counts) / 10)
    assert trace.mean_bytes_s * 8e-6 == pytest.approx(counts.mean() * 0.12)
    for place in range(0, len(counts), 97):
        begin_s = place / 10
        assert carried(trace, begin_s, begin_s + 0.1) * 8e-5 == pytest.approx(counts[place] * 0.12, abs=1e-6)


# Profiles.


@pytest.mark.parametrize("way", ["up", "down"])
@pytest.mark.parametrize("profile", PROFILES)
def test_drawn_rates_have_the_shape_of_the_profile(profile, way, monkeypatch):
    """Median and 95th percentile of what is not a stall, share and length of stalls, correlation, from many hours."""
    monkeypatch.setattr(rates, "GENERATED_S", 40_000)
    measured = getattr(PROFILES[profile], way)
    rate = generated(profile, way, 0, "a-b")
    if measured is None:
        assert rate is None
        return
    if isinstance(rate, Constant):
        assert PROFILES[profile].down.phi is None
        assert rate.bytes_s == measured.p50 * 125_000
        return
    mbps = np.array(rate.rates) / 125_000
    stalled = mbps == 0
    assert stalled.mean() == pytest.approx(measured.stall, abs=0.01)
    if measured.stall:
        runs = sum(after and not before for before, after in pairwise([False, *stalled]))
        assert stalled.sum() / runs == pytest.approx(measured.stall_s, rel=0.2)
    logs = np.log(mbps[~stalled])
    mean = math.log(measured.p50) if measured.ln_mu is None else measured.ln_mu
    spread = math.log(measured.p95 / measured.p50) / 1.6449 if measured.ln_sd is None else measured.ln_sd
    assert np.median(logs) == pytest.approx(mean, abs=0.1)
    assert np.percentile(logs, 95) == pytest.approx(mean + 1.6449 * spread, abs=0.15)
    assert logs.max() == pytest.approx(mean + 2.3263 * spread)
    assert logs.min() == pytest.approx(mean - 2.3263 * spread)
    if not measured.stall:
        assert np.corrcoef(logs[:-1], logs[1:])[0, 1] == pytest.approx(PROFILES[profile].down.phi, abs=0.03)


def test_draws_are_fixed_by_seed_link_and_direction():
    first = generated("5g-driving", "down", 1, "a-b")
    assert first == generated("5g-driving", "down", 1, "a-b")
    assert first.period_s == GENERATED_S
    others = [("5g-driving", "up", 1, "a-b"), ("5g-driving", "down", 2, "a-b"), ("5g-driving", "down", 1, "a-c")]
    assert all(generated(*other).rates != first.rates for other in others)


def test_draws_never_change():
    """Golden: a seed means the same network with every version of Python and of this package."""
    rate = generated("lte-driving", "down", 0, "cell0-core")
    assert [round(bytes_s) for bytes_s in rate.rates[:6]] == [1162234, 1202501, 1541079, 1584044, 3871626, 3099552]
    assert round(rate.mean_bytes_s) == 1492096
