"""N07: kernels called from several threads, and then from child processes, end with the right bytes and no abort."""

import multiprocessing
import os
import warnings
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

import numpy as np
import pytest

from mpitrain.codecs.registry import CODECS, make_codec

SIZE, CALLS = 1000, 1000


def encoded(name, seed):
    """Encode one of two arrays."""
    x = np.random.default_rng(seed).standard_normal(SIZE).astype(np.float32)
    codec = make_codec(name, np.float32, stochastic=False)
    wire = np.zeros(codec.max_nbytes(SIZE), np.uint8)
    nbytes, nonfinite = codec.encode(x, wire)
    assert not nonfinite
    return wire[:nbytes].tobytes()


def distinct(name, seed):
    """Encode the same array very often; one result if all is well."""
    return {encoded(name, seed) for _ in range(CALLS)}


@pytest.mark.parametrize("name", CODECS)
def test_two_threads_at_once(name):
    expected = [encoded(name, seed) for seed in (0, 1)]
    assert expected[0] != expected[1]
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(distinct, [name, name], [0, 1]))
    assert found == [{expected[0]}, {expected[1]}]


def test_children_after_threads():
    """Both ways to get one: a fresh interpreter, and a copy of this process."""
    with ThreadPoolExecutor(2) as threads:
        expected = list(threads.map(encoded, CODECS, range(len(CODECS))))
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as child:
        assert list(child.map(encoded, CODECS, range(len(CODECS)), timeout=60)) == expected
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of threads; that is what is tried
        pid = os.fork()
    if pid == 0:
        right = False
        try:
            right = [encoded(name, seed) for seed, name in enumerate(CODECS)] == expected
        finally:
            os._exit(0 if right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
