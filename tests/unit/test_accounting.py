"""Bytes of activations: counted once, from the buffers that lie behind the views."""

from dataclasses import dataclass

import numpy as np

from mpitrain.nn.layer import Context
from mpitrain.nn.models import Transformer
from mpitrain.parallel.accounting import Ledger, bases_of, nbytes_of
from mpitrain.params import Layout, Params


@dataclass(frozen=True)
class Cache:
    x: object
    more: object = None


def test_every_kind_of_nest_is_walked():
    a, b, c, d = (np.zeros(n, np.float32) for n in (1, 10, 100, 1000))
    assert nbytes_of(Cache((a, [b]), {"key": Cache(c)}), d, "text", None, 7) == 4 * 1111


def test_views_of_one_buffer_count_once_and_as_a_whole():
    x = np.zeros((10, 10), np.float64)
    assert nbytes_of(x[:, -1]) == 800
    assert nbytes_of(Cache(x[2:3]), x.T.reshape(5, 20), (x, x[:0])) == 800 + 800  # the second one is a copy
    assert nbytes_of(x, exclude=bases_of([x[3]])) == 0


def test_a_model_s_caches_without_parameters_and_batch():
    """Doubling the batch doubles the bytes; what is given from outside does not count."""
    model = Transformer(task="lm", time=6, d_model=8, blocks=2, heads=2, d_ff=16, outputs=5, vocabulary=5, dropout=0.2)
    params = Params(Layout(model.specs()))
    params.initialize(1)
    counts = []
    for batch in (3, 6):
        x = np.ones((batch, 6), np.int32)
        context = Context(train=True, key=3, samples=np.arange(batch))
        _, cache = model.forward(params, x, context)
        counts.append(nbytes_of(cache, exclude=bases_of([*params.values(), x, context.samples])))
        assert nbytes_of(cache, exclude=bases_of(params.values())) == counts[-1] + x.nbytes
    assert counts[1] == 2 * counts[0] > 0


def test_ledger_keeps_the_peak():
    ledger = Ledger()
    for change in (5, 7, -6, 3, -9):
        ledger.change(change)
    assert (ledger.current, ledger.peak) == (0, 12)
