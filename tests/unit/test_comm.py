"""Messages, waiting, faults and the start of MPI, as far as one process can show them."""

import struct
import subprocess
import sys
import time

import numpy as np
import pytest
from mpi4py import MPI

from mpitrain.comm import fault, hints, runtime, waiting
from mpitrain.comm.fault import FaultHook, InjectedFaultError
from mpitrain.comm.frame import HEADER_BYTES, MAX_MESSAGE_BYTES, ORDINARY, VERSION, Expected, Flag, Frame, Tag
from mpitrain.comm.grid import Axis, ProcessGrid, duplicate
from mpitrain.comm.hints import RANK_HINTS, SIZE_HINTS
from mpitrain.comm.waiting import Requests, wait, wait_all
from mpitrain.errors import ConfigError, ExitCode, LaunchError, PeerLostError, ProtocolError
from mpitrain.partition import GridShape

EXPECTED = Expected(format=2, flags=Flag.DELTA, sequence=0x01020304, elements=0x0A0B)


def sealed(payload=b"abcdef", *, expected=EXPECTED, flags=ORDINARY, room=10):
    frame = Frame(room)
    frame.payload[: len(payload)] = np.frombuffer(payload, np.uint8)
    frame.seal(expected, len(payload), flags)
    return frame


# The frame.


def test_golden_bytes_of_the_header():
    frame = sealed()
    assert frame.nbytes == HEADER_BYTES + 6
    assert frame.buffer[: frame.nbytes].tobytes().hex() == (
        "01" + "02" + "0200" + "04030201" + "0b0a0000" + "06000000" + b"abcdef".hex()
    )
    assert sealed(b"", flags=Flag.NONFINITE).buffer[:16].tobytes().hex() == "01020300040302010b0a000000000000"


def test_numbers_of_the_header_never_change():
    assert (VERSION, HEADER_BYTES, MAX_MESSAGE_BYTES) == (1, 16, 4_000_000)
    assert {flag.name: int(flag) for flag in Flag} == {"NONFINITE": 1, "DELTA": 2}
    names = ["SCATTER", "GATHER", "ACTIVATION", "GRADIENT", "PUSH", "REPLY", "CONTROL"]
    assert {tag.name: int(tag) for tag in Tag} == {name: number for number, name in enumerate(names)}


def test_tags_of_buckets_do_not_meet():
    tags = [tag.of_bucket(index) for tag in Tag for index in range(100)]
    assert len(set(tags)) == 100 * len(Tag)


@pytest.mark.parametrize("room", [0, 1, 10, 1000])
def test_payload_lies_on_a_cache_line(room):
    frame = Frame(room)
    assert frame.payload.size == room
    assert frame.payload.ctypes.data % 64 == 0 or not room
    assert np.shares_memory(frame.payload, frame.buffer) or not room


@pytest.mark.parametrize("payload", [b"", b"a", b"abcdefghij"])
def test_a_good_message_is_opened(payload):
    frame = sealed(payload)
    opened = frame.open(frame.nbytes, EXPECTED, "rank 1")
    assert opened.tobytes() == payload
    assert frame.nbytes == HEADER_BYTES + len(payload)


def test_a_flagged_message_has_no_payload():
    frame = sealed(b"", flags=Flag.NONFINITE)
    assert frame.open(frame.nbytes, EXPECTED, "rank 1") is None


def test_sequence_numbers_wrap():
    late = Expected(2, ORDINARY, 2**32 + 5, 1)
    frame = sealed(b"a", expected=late)
    assert frame.buffer[4:8].tobytes() == b"\5\0\0\0"
    assert frame.open(frame.nbytes, late, "rank 1").tobytes() == b"a"


@pytest.mark.parametrize(
    ("offset", "form", "value", "complaint"),
    [
        (0, "B", 2, "expected version 1, got 2"),
        (1, "B", 0, "expected format 2, got 0"),
        (2, "H", 0, "expected flags 2, got 0"),
        (2, "H", 6, "expected flags 2, got 6"),
        (2, "H", 0x8002, "expected flags 2, got 32770"),
        (4, "I", 7, "expected sequence 16909060, got 7"),
        (8, "I", 1, "expected elements 2571, got 1"),
        (12, "I", 5, "expected payload bytes 6, got 5"),
        (12, "I", 7, "expected payload bytes 6, got 7"),
        (12, "I", 2**32 - 1, "expected payload bytes 6, got 4294967295"),
        (2, "H", 3, "expected payload bytes 0, got 6"),  # flagged, yet with a payload
    ],
)
def test_every_altered_field_is_named(offset, form, value, complaint):
    frame = sealed()
    struct.pack_into("<" + form, frame.buffer.data, offset, value)
    with pytest.raises(ProtocolError) as caught:
        frame.open(frame.nbytes, EXPECTED, "rank 1 of the data axis")
    assert str(caught.value) == f"rank 1 of the data axis: {complaint}; do all ranks run the same configuration?"
    assert caught.value.exit_code == ExitCode.MPI


def test_all_fields_that_differ_are_named():
    frame = sealed()
    with pytest.raises(ProtocolError, match=r"expected format 0, got 2; flags 0, got 2; sequence 9, got 16909060; do"):
        frame.open(frame.nbytes, Expected(0, ORDINARY, 9, 0x0A0B), "rank 1")


def test_every_flipped_bit_of_the_header_is_noticed():
    for bit in range(8 * HEADER_BYTES):
        frame = sealed()
        frame.buffer[bit // 8] ^= np.uint8(1 << bit % 8)
        with pytest.raises(ProtocolError):
            frame.open(frame.nbytes, EXPECTED, "rank 1")


@pytest.mark.parametrize("received", [0, 1, 15])
def test_messages_shorter_than_a_header(received):
    with pytest.raises(ProtocolError, match=f"expected a header of 16 bytes, got {received} in all"):
        sealed().open(received, EXPECTED, "rank 1")


@pytest.mark.parametrize("received", [16, 21, 23, 26])
def test_messages_cut_or_extended(received):
    with pytest.raises(ProtocolError, match=f"payload bytes {received - 16}, got 6"):
        sealed().open(received, EXPECTED, "rank 1")


@pytest.mark.parametrize("payload", [b"", b"abc", b"abcdefghij"])
@pytest.mark.parametrize("piece_bytes", [1, 5, 16, 17, 26, 1000])
def test_pieces(piece_bytes, payload):
    """Whatever the size of the message, as many pieces travel as the largest one needs."""
    axis = Axis(MPI.COMM_SELF)
    source, target = sealed(payload), Frame(10)
    receives = target.receive(axis, 0, 3, piece_bytes=piece_bytes)
    sends = source.send(axis, 0, 3, piece_bytes=piece_bytes)
    assert len(sends) == -(-26 // piece_bytes)
    wait_all(sends, "sends", timeout_s=10)
    wait(receives, timeout_s=10)
    assert receives.received_bytes == source.nbytes
    assert target.open(receives.received_bytes, EXPECTED, "rank 0").tobytes() == payload


def test_cancelled_receives_are_gone():
    axis = Axis(MPI.COMM_SELF)
    stale, target = Frame(10), Frame(10)
    stale.receive(axis, 0, 4, piece_bytes=9).cancel()
    receives = target.receive(axis, 0, 4, piece_bytes=9)
    wait_all(sealed().send(axis, 0, 4, piece_bytes=9), "sends", timeout_s=10)
    wait(receives, timeout_s=10)
    assert target.open(receives.received_bytes, EXPECTED, "rank 0").tobytes() == b"abcdef"


# Waiting.


class Fake:
    """Completes after a number of polls, and makes progress at some of them."""

    def __init__(self, polls, progress_at=()):
        self.left, self.progress_at, self.progress = polls, progress_at, 0
        self.polls = 0

    def poll(self):
        self.polls += 1
        self.progress += self.polls in self.progress_at
        return self.polls >= self.left

    def waiting_for(self):
        return "rank 3 of the data axis"


@pytest.fixture
def clock(monkeypatch):
    """Stand in for time: a poll takes nothing, a sleep what it says (at least a microsecond)."""

    class Clock:
        def __init__(self):
            self.now, self.sleeps = 0.0, []

        def perf_counter(self):
            self.now += 1e-6
            return self.now

        def sleep(self, seconds):
            self.sleeps.append(seconds)
            self.now += seconds

    fake = Clock()
    monkeypatch.setattr(waiting, "time", fake)
    return fake


def test_what_is_complete_is_not_waited_for(clock):
    assert wait(Fake(1), timeout_s=1) < 1e-5
    assert not clock.sleeps


def test_waiting_spins_then_sleeps_longer_and_longer(clock):
    seconds = wait(Fake(1000), timeout_s=10)
    assert seconds == pytest.approx(clock.now, abs=1e-5)
    assert len(clock.sleeps) < 999
    assert clock.sleeps == sorted(clock.sleeps)
    assert clock.sleeps[0] <= waiting.SPIN_S
    assert clock.sleeps[-1] == waiting.MAX_SLEEP_S == 0.5e-3


def test_silence_ends_in_an_error_that_names_the_missing(clock):
    with pytest.raises(PeerLostError, match=r"no message for 0.25 s while waiting for rank 3 of the data axis; the"):
        wait(Fake(10**9), timeout_s=0.25)
    assert 0.25 < clock.now < 0.26


def test_progress_restarts_the_clock(clock):
    """Five times nearly the limit, each ended by a message, is no silence."""
    slow = Fake(3600, progress_at=range(600, 3600, 600))
    assert wait(slow, timeout_s=0.2) > 0.8
    with pytest.raises(PeerLostError):
        wait(Fake(3600, progress_at=[600]), timeout_s=0.2)


def test_a_real_silence_is_noticed_in_time():
    start = time.perf_counter()
    with pytest.raises(PeerLostError, match=r"0\.02 s"):
        wait(Fake(10**9), timeout_s=0.02)
    assert time.perf_counter() - start >= 0.02


def test_requests_count_and_name():
    axis = Axis(MPI.COMM_SELF)
    out = np.zeros(5, np.uint8)
    requests = Requests([axis.comm.Irecv([out, MPI.BYTE], 0, 8)], "the sums of rank 0")
    assert (requests.poll(), requests.progress, requests.received_bytes) == (False, 0, 0)
    with pytest.raises(PeerLostError, match="the sums of rank 0"):
        wait(requests, timeout_s=0.001)
    wait_all([axis.comm.Isend([np.arange(3, dtype=np.uint8), MPI.BYTE], 0, 8)], "send", timeout_s=10)
    wait(requests, timeout_s=10)
    assert (requests.poll(), requests.progress, requests.received_bytes) == (True, 1, 3)
    assert out.tolist() == [0, 1, 2, 0, 0]
    assert Requests([], "nothing").poll()


# The grid.


def test_a_grid_of_one():
    with ProcessGrid(MPI.COMM_SELF, GridShape(1)) as grid:
        assert [(axis.name, axis.rank, axis.size) for axis in (grid.world, grid.data)] == [
            ("world", 0, 1),
            ("data", 0, 1),
        ]
        assert grid.world.comm != MPI.COMM_SELF
    assert grid.world.comm == grid.data.comm == MPI.COMM_NULL


def test_a_grid_that_does_not_cover_the_communicator():
    with pytest.raises(LaunchError, match="grid of 2 ranks on a communicator of 1"):
        ProcessGrid(MPI.COMM_SELF, GridShape(2))


# Faults.


@pytest.mark.parametrize("kind", fault.KINDS)
def test_every_kind_is_parsed(kind):
    settings = "rank=1,step=5,tensor=a.b,message=so it is,seconds=0.5,value=-2e3,factor=4,probability=0.15"
    hook = FaultHook(f"{kind}:{settings}", 1)
    found = hook.find(kind, 5)
    assert (found.kind, found.rank, found.step, found.tensor) == (kind, 1, 5, "a.b")
    assert (found.message, found.seconds, found.value) == ("so it is", 0.5, -2000.0)
    assert (found.factor, found.probability) == (4.0, 0.15)
    assert hook.find(kind, 4) is None
    assert all(hook.find(other, 5) is None for other in fault.KINDS if other != kind)


def test_what_is_left_out_matches_everything():
    hook = FaultHook("nan", 7)
    assert hook.find("nan", 0) == hook.find("nan", 10**6) == fault.Fault("nan")
    assert not FaultHook("", 0).faults
    assert not FaultHook(" ; ;", 0).faults


def test_faults_of_other_ranks_do_not_count():
    text = " raise:rank=0,step=1 ;nan:rank=1; inf:step=2;"
    assert [f.kind for f in FaultHook(text, 0).faults] == ["raise", "inf"]
    assert [f.kind for f in FaultHook(text, 1).faults] == ["nan", "inf"]
    assert FaultHook(text, 1).text == text


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("explode", "expected one of raise, kill, .*, got 'explode'"),
        ("raise;explode:rank=1", "got 'explode'"),
        ("Raise", "got 'Raise'"),
        (":rank=1", "got ''"),
        ("raise:when=1", "key of the list, got 'when=1'"),
        ("raise:kind=kill", "key of the list, got 'kind=kill'"),
        ("raise:rank", "expected key=value .*, got 'rank'"),
        ("raise:rank=one", "invalid literal .*'one' in 'raise:rank=one'"),
        ("raise:step=1.5", "'1.5' in"),
        ("delay:seconds=long", "could not convert .*'long'"),
        ("const:value=", "could not convert"),
    ],
)
@pytest.mark.parametrize("rank", [0, 5])
def test_wrong_faults_are_refused_on_every_rank(text, complaint, rank):
    with pytest.raises(ConfigError, match=f"MPITRAIN_FAULT: .*{complaint}"):
        FaultHook(text, rank)


def test_faults_come_from_the_environment(monkeypatch):
    monkeypatch.delenv(fault.VARIABLE, raising=False)
    assert not FaultHook.from_environment(0).faults
    monkeypatch.setenv("MPITRAIN_FAULT", "stop:step=3")
    assert FaultHook.from_environment(0).find("stop", 3)


def test_faults_happen_at_their_step(monkeypatch):
    happened = []
    monkeypatch.setattr(fault.time, "sleep", happened.append)
    monkeypatch.setattr(fault, "kill_self", lambda: happened.append("killed"))
    text = "delay:step=1,seconds=9;kill:step=2;raise:step=3,message=boom;slow_save:step=4,seconds=8"
    hook = FaultHook(text + ";raise_end:message=late", 0)
    for step in (0, 1, 2):
        hook.at_step(step)
        hook.slow_save(step)
    assert happened == [9.0, "killed"]
    with pytest.raises(InjectedFaultError, match="boom"):
        hook.at_step(3)
    hook.slow_save(4)
    assert happened[-1] == 8.0
    with pytest.raises(InjectedFaultError, match="late"):
        hook.at_end()


def test_a_slow_rank_is_slow_at_the_steps_that_everyone_can_tell(monkeypatch):
    happened = []
    monkeypatch.setattr(fault.time, "sleep", happened.append)
    hooks = [FaultHook("slow:rank=1,seconds=2;slow:seconds=0.05,factor=4,probability=0.15", rank) for rank in range(4)]
    steps = range(1, 1001)
    for rank, hook in enumerate(hooks):
        for step in steps:
            hook.at_step(step)
        assert happened == [fault.slow_seconds(hook.faults[0], rank, step) for step in steps]
        if rank == 1:
            assert set(happened) == {2.0}
        else:
            assert set(happened) == {0.05, 0.2}
            assert 110 <= happened.count(0.2) <= 190  # 150 on average, standard deviation 11
        happened.clear()


def test_slow_steps_are_drawn_for_every_rank_and_step():
    """Drawn once and for all: measurements of other versions stay comparable."""
    slow = fault.Fault("slow", seconds=0.05, factor=4.0, probability=0.15)
    drawn = {(rank, step): fault.slow_seconds(slow, rank, step) > 0.1 for rank in range(4) for step in range(1, 13)}
    assert [key for key, value in drawn.items() if value] == [(0, 5), (1, 4), (1, 5), (2, 2)]
    assert fault.slow_seconds(fault.Fault("slow", seconds=3.0, factor=9.0, probability=0.0), 0, 1) == 3.0


# The launcher's hints.


@pytest.fixture
def bare(monkeypatch):
    """Take every launcher's variable away."""
    for name in (*SIZE_HINTS, *RANK_HINTS):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize("name", sorted(SIZE_HINTS))
def test_a_launcher_of_another_mpi_is_noticed(bare, name):
    bare.setenv(name, "4")
    with pytest.raises(LaunchError) as caught:
        runtime.start()
    message = str(caught.value)
    assert message.startswith(f"launch: {SIZE_HINTS[name]} started 4 processes ({name}=4), but ")
    assert f"{runtime.library_name()} sees 1; " in message
    assert message.endswith(f"or unset {name}")
    assert "\n" not in message


def test_a_thread_level_that_is_not_granted(bare):
    """M13."""
    bare.setattr(runtime.MPI, "Query_thread", lambda: MPI.THREAD_SINGLE)
    with pytest.raises(LaunchError, match="grants threads at level SINGLE, but FUNNELED is needed") as refused:
        runtime.start()
    assert refused.value.agreed
    assert "\n" not in str(refused.value)
    for level in (MPI.THREAD_FUNNELED, MPI.THREAD_SERIALIZED, MPI.THREAD_MULTIPLE):
        bare.setattr(runtime.MPI, "Query_thread", lambda level=level: level)
        assert runtime.start() == MPI.COMM_WORLD


WAITING = """
import time
from types import SimpleNamespace
from mpitrain.comm import runtime
runtime.INIT_TIMEOUT_S = 0.1
runtime.MPI = SimpleNamespace(Is_initialized=lambda: False, Init_thread=lambda level: time.sleep(60))
runtime.start()
"""


def test_mpi_that_does_not_start_is_given_up():
    """Whatever MPI waits for; the traceback says where."""
    result = subprocess.run([sys.executable, "-c", WAITING], capture_output=True, text=True, timeout=50, check=False)
    assert result.returncode == 1
    assert "Timeout (0:00:00.1" in result.stderr
    assert "in start" in result.stderr


def test_hints_that_agree_or_mean_nothing(bare):
    assert runtime.start() == MPI.COMM_WORLD
    for name in SIZE_HINTS:
        for value in ("1", "", "many", "-4", "²", "٤", "4" * 5000):
            bare.setenv(name, value)
            assert runtime.start().Get_size() == 1
        bare.delenv(name)


def test_the_most_specific_hint_counts(bare):
    """Under Slurm, mpirun inside an allocation starts its own number of processes."""
    bare.setenv("SLURM_STEP_NUM_TASKS", "8")
    bare.setenv("OMPI_COMM_WORLD_SIZE", "1")
    assert runtime.start().Get_size() == 1
    bare.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with pytest.raises(LaunchError, match="Open MPI started 2 processes"):
        runtime.start()


def test_rank_before_mpi_has_started(bare):
    assert (hints.hinted_rank(), hints.is_launched()) == (0, False)
    bare.setenv("SLURM_PROCID", "3")
    assert (hints.hinted_rank(), hints.is_launched()) == (3, True)
    bare.setenv("OMPI_COMM_WORLD_RANK", "2")
    assert hints.hinted_rank() == 2
    for value in ("", "²", "2" * 5000):
        bare.setenv("OMPI_COMM_WORLD_RANK", value)
        assert hints.hinted_rank() == 3
    bare.delenv("SLURM_PROCID")
    assert (hints.hinted_rank(), hints.is_launched(), hints.hinted_size()) == (0, False, None)
    bare.setenv("PMI_SIZE", "3")
    assert hints.hinted_size() == ("PMI_SIZE", 3)


def test_name_of_the_library_is_one_short_line():
    name = runtime.library_name()
    assert name
    assert len(name) < 60
    assert name.isprintable()


def test_building_on_some_ranks_only_ends():
    """A duplicate that never comes is given up, and what MPI may still write into is kept."""
    copy, buffer = object(), np.zeros(1, np.uint8)
    request = MPI.COMM_SELF.Irecv(buffer, source=0, tag=77)

    class Lonely:
        def Idup(self):  # noqa: N802  (MPI's name)
            return copy, request

    with pytest.raises(PeerLostError, match="all ranks to build the same object"):
        duplicate(Lonely(), timeout_s=0.01)
    assert any(item is copy for item in waiting.abandoned)
    MPI.COMM_SELF.Send(buffer, 0, tag=77)
