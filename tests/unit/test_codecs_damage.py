"""Damaged payloads of every codec: by hypothesis, and many more with the indices of all kernels checked."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.damage import KINDS, NAMES, TYPES, damage

ROOT = Path(__file__).resolve().parents[2]
CASES = 100_000
SIZES = range(1, 260, 21)


@pytest.mark.parametrize("name", NAMES)
def test_damaged_payloads(name):
    """Cut, lengthened, flipped, spliced and drawn anew."""
    victims = [kind(name, np.random.default_rng(0), SIZES, dtype) for kind in KINDS.values() for dtype in TYPES]

    @settings(max_examples=500, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(
        victim=st.sampled_from(victims),
        which=st.integers(0, len(victims[0].wires) - 1),
        other=st.integers(0, len(victims[0].wires) - 1),
        seed=st.integers(0, 2**32),
        rubbish=st.none() | st.binary(max_size=600),
        add=st.booleans(),
    )
    def check(victim, which, other, seed, rubbish, add):
        size, wire = victim.wires[which]
        if rubbish is None:
            bad = damage(wire, victim.wires[other][1], np.random.default_rng(seed))
        else:
            bad = np.frombuffer(rubbish, np.uint8)
        taken = victim.accepts(bad, size, add)
        if victim.codec.fixed_size:
            assert not taken or bad.size == wire.size

    check()


LEAVES = """
import numba, numpy as np
from mpitrain.kernels.bits import window

@numba.njit
def first(array, start, count):
    return window(array, start, count)[0]

assert first(np.arange(8), 5, 3) == 5
for start, count in ((6, 3), (8, 1), (-1, 1), (5, -2)):
    try:
        first(np.arange(8), start, count)
    except IndexError as error:
        print(error)
"""


def test_a_window_beyond_its_array_is_seen(tmp_path):
    """With bounds checks, which numba reads when a process begins."""
    environment = os.environ | {"NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", LEAVES]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["window is out of bounds"] * 4


def test_no_kernel_leaves_its_arrays(tmp_path):
    """100,000 payloads a codec, decoded by kernels that are compiled with bounds checks: an IndexError ends it."""
    environment = os.environ | {"NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.damage", str(CASES)]
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == list(NAMES)
    assert all(f" {CASES:,} payloads with bounds checks, " in line for line in lines)
