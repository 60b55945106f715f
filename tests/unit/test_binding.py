"""Which settings bind a resumed run to its past. Released ones stay, and later ones bind only where they are used."""

import pytest

from mpitrain.config.load import resolve
from mpitrain.train.session import binding_lines

MODEL = "kind task d_model layers heads d_ff causal dropout label_smoothing"
DATA = "kind placement window stride stations samples test_samples skew standardize clip"
TRAIN = "batch_size seed class_weights"
EXCHANGE = "when collective codec memory rounding bucket_mb rule"
RELEASED = [
    *(f"model.{key}" for key in MODEL.split()),
    *(f"data.{key}" for key in DATA.split()),
    *(f"train.{key}" for key in TRAIN.split()),
    "optim.kind",
    *(f"exchange.{key}" for key in EXCHANGE.split()),
]


def keys(*overrides):
    return [line.partition(" = ")[0] for line in binding_lines(resolve({}, "defaults", list(overrides)))]


def test_a_checkpoint_of_a_released_version_still_loads():
    """A key more would be missing in it, and refused."""
    assert keys() == RELEASED


@pytest.mark.parametrize("key", ["warmup_steps", "raw_last_steps", "reset_every"])
def test_what_varies_with_the_step_binds_where_it_is_used(key):
    assert set(keys(f"exchange.{key}=3")) - set(RELEASED) == {f"exchange.{key}"}


def test_what_travels_binds():
    found = keys("exchange.signal=momentum", "exchange.warmup_steps=3")
    assert set(found) - set(RELEASED) == {"exchange.signal", "exchange.warmup_steps"}
