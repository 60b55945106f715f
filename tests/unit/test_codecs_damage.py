"""Damaged payloads of every codec: by hypothesis, and many more with the indices of all kernels checked."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.damage import NAMES, Victim, damage

ROOT = Path(__file__).resolve().parents[2]
CASES = 100_000
VICTIMS = {name: Victim(name, np.random.default_rng(0), range(1, 260, 7)) for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_damaged_payloads(name):
    """Cut, lengthened, flipped, spliced and drawn anew."""
    victim = VICTIMS[name]

    @settings(max_examples=500, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(
        which=st.integers(0, len(victim.wires) - 1),
        other=st.integers(0, len(victim.wires) - 1),
        seed=st.integers(0, 2**32),
        rubbish=st.none() | st.binary(max_size=600),
        add=st.booleans(),
    )
    def check(which, other, seed, rubbish, add):
        size, wire = victim.wires[which]
        if rubbish is None:
            bad = damage(wire, victim.wires[other][1], np.random.default_rng(seed))
        else:
            bad = np.frombuffer(rubbish, np.uint8)
        taken = victim.accepts(bad, size, add)
        if victim.codec.fixed_size:
            assert not taken or bad.size == victim.codec.nbytes(size)

    check()


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
