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
