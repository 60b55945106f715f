"""A launcher that outlives its ranks is ended where they end together, and only there."""

import signal
import subprocess
import sys

import pytest

from mpitrain.comm import supervising
from mpitrain.comm.signals import STOP_SIGNALS, StopRequest
from mpitrain.errors import ExitCode

RANK = "import sys; print(flush=True); sys.stdin.read()"


@pytest.fixture
def handlers():
    """Give the signals back to whoever had them."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_ranks_are_known_by_their_variable():
    script = (
        "import os, subprocess, sys;"
        f"rank = subprocess.Popen([sys.executable, '-c', {RANK!r}], stdin=subprocess.PIPE, stdout=subprocess.PIPE,"
        " env=os.environ | {'OMPI_COMM_WORLD_RANK': '0'});"
        "rank.stdout.readline(); print(flush=True); sys.stdin.readline();"
        "rank.communicate(); print(flush=True); sys.stdin.readline()"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as launcher:
        launcher.stdout.readline()
        assert supervising.has_ranks(launcher.pid)
        launcher.stdin.write(b"\n")
        launcher.stdin.flush()
        launcher.stdout.readline()
        assert not supervising.has_ranks(launcher.pid)
        launcher.communicate(b"\n")
    assert not supervising.has_ranks(launcher.pid)


def test_a_launcher_without_ranks_is_ended(monkeypatch, capfd, handlers):
    """It had some, and would wait for ever; what had none is not judged, and neither is who may go on."""
    monkeypatch.setattr(supervising, "GRACE_S", 0.01)
    monkeypatch.setattr(supervising, "LINGER_S", 0.1)
    seen = iter([False, False, True, True, False, False])
    monkeypatch.setattr(supervising, "has_ranks", lambda launcher: next(seen, False))
    assert supervising.supervise(["sleep", "1000"], StopRequest(), together=True) == ExitCode.MPI
    assert "the launcher waits for others, whose host it has lost; ended it" in capfd.readouterr().err
    assert supervising.supervise(["sh", "-c", "sleep 0.5; exit 3"], StopRequest(), together=True) == 3
    monkeypatch.setattr(supervising, "has_ranks", lambda launcher: pytest.fail("nobody asked"))
    assert supervising.supervise(["sh", "-c", "sleep 0.5; exit 4"], StopRequest()) == 4


@pytest.mark.parametrize(("trains", "code"), [(True, ExitCode.STOPPED), (False, 128 + signal.SIGUSR1)])
def test_what_does_not_train_needs_no_other_start(handlers, trains, code):
    """Told to stop while it was being started, a launcher dies of the signal that asks ranks for a checkpoint."""

    class Late:
        reasons = iter(["", "SIGTERM"])

        @property
        def reason(self):
            return next(self.reasons)

    assert supervising.supervise(["sleep", "1000"], Late(), trains=trains) == code


class Deaf:
    """A launcher that goes on until it is killed, on a clock of its own; ``orders`` come while it is waited for."""

    pid = 0

    def __init__(self, ordered, orders):
        self.now_s = 100.0
        self.killed_s = None
        self._ordered, self._orders = ordered, orders

    def wait(self, timeout=None):
        if self.killed_s is not None:
            return -signal.SIGKILL
        end_s = self.now_s + timeout
        self._ordered += [each for each in self._orders if self.now_s <= each < end_s]
        self.now_s = end_s
        raise subprocess.TimeoutExpired("deaf", timeout)

    def kill(self):
        self.killed_s = self.now_s


@pytest.mark.parametrize("together", [False, True])
def test_from_the_order_to_the_kill(monkeypatch, together):
    """The first order counts, whenever it comes."""
    ordered = []
    job = Deaf(ordered, [107.9, 109.5])
    monkeypatch.setattr(supervising.time, "monotonic", lambda: job.now_s)
    monkeypatch.setattr(supervising, "has_ranks", lambda launcher: True)
    assert supervising._wait(job, ordered, together=together) == -signal.SIGKILL
    assert job.killed_s == pytest.approx(107.9 + supervising.GRACE_S)


def test_an_exit_code_is_kept_whatever_was_inherited(handlers):
    """A parent that ignores the end of its children hands that on."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert supervising.supervise(["sh", "-c", "exit 3"], StopRequest()) == 3
    finally:
        signal.signal(signal.SIGCHLD, before)
