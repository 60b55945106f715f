"""Units of a chain and where to cut it, against counting by hand and trying every partition."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpitrain.errors import ConfigError
from mpitrain.nn.layer import EVALUATE, Chain, Context
from mpitrain.nn.linear import Linear
from mpitrain.nn.models import Mlp, Transformer
from mpitrain.nn.pooling import Flatten
from mpitrain.parallel.accounting import bases_of, nbytes_of
from mpitrain.parallel.cuts import SLACK, check_cuts, cuts, pieces, stage_layers
from mpitrain.parallel.units import Unit, kept_bytes, measured, units
from mpitrain.params import Layout, Params

FAST = settings(max_examples=200, deadline=None, derandomize=True, database=None)
MLP = {"inputs": 18, "hidden": (7, 5), "outputs": 4}
SHAPE = {"time": 6, "d_model": 8, "blocks": 2, "heads": 2, "d_ff": 16}


def mlp(**changes):
    return Mlp(**(MLP | changes))


def transformer(task="classify", **changes):
    ends = {"vocabulary": 9, "outputs": 9} if task == "lm" else {"features": 3, "outputs": 4}
    return Transformer(task=task, **(SHAPE | ends | changes))


def plain(works, sizes):
    """Units of these costs and numbers of elements that leave them."""
    pairs = zip(works, sizes, strict=True)
    return [Unit(f"u{i}", i, i + 1, (), work, (size,)) for i, (work, size) in enumerate(pairs)]


def test_layers_without_parameters_stay_with_the_one_before():
    """A leading Flatten goes with the first map, activations and dropout with theirs."""
    found = units(mlp(), (6, 3))
    assert [(unit.name, unit.start, unit.stop) for unit in found] == [
        ("hidden.0", 0, 4),
        ("hidden.1", 4, 7),
        ("head", 7, 8),
    ]
    assert [unit.output_shape for unit in found] == [(7,), (5,), (4,)]
    found = units(transformer(), (6, 3))
    assert [unit.name for unit in found] == ["input", "positions", "blocks.0", "blocks.1", "norm", "head"]
    assert [unit.output_shape for unit in found] == [*[(6, 8)] * 4, (8,), (4,)]
    assert [(unit.start, unit.stop) for unit in found][1] == (1, 3)
    assert [unit.name for unit in units(Chain([Flatten()]), (2,))] == ["layers"]
    found = units(transformer("lm", tied=True), (6,), "u1")
    assert [(unit.name, [spec.name for spec in unit.specs]) for unit in found][-1] == (
        "head",
        ["embedding.weight", "head.bias"],
    )


def test_parameters_of_units_are_those_of_the_chain():
    for model, shape, dtype in ((mlp(), (18,), "f4"), (transformer(), (6, 3), "f4"), (transformer("lm"), (6,), "u1")):
        found = units(model, shape, dtype)
        assert [spec.name for unit in found for spec in unit.specs] == [spec.name for spec in model.specs()]
        assert sum(unit.num_parameters for unit in found) == Layout(model.specs()).num_parameters


def test_multiply_adds_by_hand():
    first, second, head = [unit.work for unit in units(mlp(), (6, 3))]
    assert first == 18 + 18 * 7 + 7 + 7  # flatten, map, activation, dropout
    assert second == 7 * 5 + 5 + 5
    assert head == 5 * 4
    embedding, positions, block, _, norm, head = [unit.work for unit in units(transformer("lm"), (6,), "u1")]
    rows, width, inner = 6, 8, 16
    maps = rows * width * (3 * width + width + 2 * inner)
    attention = 2 * rows * rows * width
    rest = rows * (2 * width + 2 * width + inner)  # two norms, two dropouts, an activation
    assert block == maps + attention + rest
    assert embedding == norm == rows * width
    assert positions == 2 * rows * width
    assert head == rows * width * 9


def test_what_backward_keeps_by_hand():
    found = units(mlp(), (6, 3))
    assert [kept_bytes([unit]) for unit in found] == [4 * (18 + 7), 4 * (7 + 5), 4 * 5]
    assert kept_bytes(found) == 4 * (18 + 7 + 5)  # an activation's output is the next map's input
    dropped = units(mlp(dropout=0.5), (6, 3))  # with the mask, and the masked output apart
    assert [kept_bytes([unit]) for unit in dropped] == [4 * (18 + 7 + 7), 4 * (7 + 5 + 5), 4 * 5]
    assert kept_bytes(dropped) == 4 * (18 + 7 + 7 + 7 + 5 + 5 + 5)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_what_backward_keeps_is_what_a_batch_keeps(dropout):
    """A batch of the whole chain, counted array by array, is as many samples."""
    model = transformer(dropout=dropout)
    params = Params(Layout(model.specs()))
    x = np.zeros((5, 6, 3), np.float32)
    _, cache = model.forward(params, x, Context(train=True, samples=np.arange(5)))
    assert nbytes_of(cache, exclude=bases_of(params.values())) == 5 * kept_bytes(units(model, (6, 3)))


class Remembering(Linear):
    """Keeps its weight beside its input."""

    def forward(self, params, x, context):
        y, _ = super().forward(params, x, context)
        return y, (x, params[f"{self.name}.weight"].T)


def test_parameters_are_not_kept_once_more():
    found = units(Chain([Remembering("a", 3, 5), Remembering("b", 5, 2)]), (3,))
    assert [kept_bytes([unit]) for unit in found] == [12, 20]


def test_float64():
    assert kept_bytes(units(mlp(), (6, 3), np.float64)) == 8 * (18 + 7 + 5)


def test_measured_seconds_of_every_unit():
    for model, shape, dtype in ((mlp(dropout=0.5), (6, 3), "f4"), (transformer("lm"), (6,), "u1")):
        found = units(model, shape, dtype)
        seconds = measured(model, found, shape, dtype)
        assert len(seconds) == len(found)
        assert all(second > 0 for second in seconds)


def every_partition(number, stages):
    return [list(chosen) for chosen in itertools.combinations(range(1, number), stages - 1)]


def cost(found, chosen):
    """Return elements over the cuts and the heaviest stage."""
    heaviest = max(sum(unit.work for unit in piece) for piece in pieces(found, chosen))
    return sum(found[cut - 1].output_size for cut in chosen), heaviest


@FAST
@given(st.data())
def test_cuts_are_the_best_of_all_partitions(data):
    number = data.draw(st.integers(1, 9))
    stages = data.draw(st.integers(1, number))
    works = data.draw(st.lists(st.integers(0, 40).map(float), min_size=number, max_size=number))
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=number, max_size=number))
    found = plain(works, sizes)
    costs = {tuple(chosen): cost(found, chosen) for chosen in every_partition(number, stages)}
    limit = min(heaviest for _, heaviest in costs.values()) * (1 + SLACK)
    best = min(one for one in costs.values() if one[1] <= limit)
    chosen = cuts(found, stages)
    assert costs[tuple(chosen)] == best
    assert cuts(found, stages) == chosen


def test_bytes_decide_within_the_slack_only():
    """The heaviest of two stages may be 5 % above what is possible, for fewer bytes; no more."""
    assert cuts(plain([100, 5, 100], [9, 1, 1]), 2) == [2]
    assert cuts(plain([100, 5, 100], [1, 9, 1]), 2) == [1]
    assert cuts(plain([100, 10, 100, 0], [9, 1, 1, 1]), 2) == [2]
    assert cuts(plain([100, 0, 6, 94], [9, 9, 1, 1]), 2) == [1]  # 106 would send less, but is too much
    assert cuts(plain([100, 0, 5, 95], [9, 9, 1, 1]), 2) == [3]


def test_a_transformer_is_cut_between_blocks():
    found = units(transformer(blocks=4), (6, 3))
    assert [unit.name for unit in found][2:6] == [f"blocks.{i}" for i in range(4)]
    assert cuts(found, 1) == []
    assert cuts(found, 2) == [4]
    assert cuts(found, 4) == [3, 4, 5]


def test_more_stages_than_units():
    found = units(mlp(), (6, 3))
    assert cuts(found, 3) == [1, 2]
    with pytest.raises(ConfigError) as caught:
        cuts(found, 4)
    assert str(caught.value) == (
        "parallel: pp times chunks = 4 needs as many units or more, but the model has 3: 0 hidden.0, 1 hidden.1, "
        "2 head; set parallel.pp and chunks so that their product is 3 or less"
    )


@pytest.mark.parametrize("given", [[], [1, 2, 3], [2, 1], [1, 1], [0, 1], [1, 3], [-1, 1]])
def test_cuts_that_cannot_be(given):
    found = units(mlp(), (6, 3))
    with pytest.raises(ConfigError) as caught:
        check_cuts(given, found, 3)
    assert str(caught.value) == (
        f"parallel.cuts = {given}: 3 stages need 2 cuts, ascending, from 1 to 2: the number of the unit with which a "
        "stage begins; the units are 0 hidden.0, 1 hidden.1, 2 head"
    )


def test_cuts_that_can_be():
    found = units(mlp(), (6, 3))
    assert check_cuts((1, 2), found, 3) == [1, 2]
    assert check_cuts((), found, 1) == []
    with pytest.raises(ConfigError, match="pp times chunks = 4"):
        check_cuts((1, 2, 3), found, 4)


@pytest.mark.parametrize(("stages", "chunks"), [(1, 1), (2, 1), (3, 2), (2, 3), (6, 1)])
def test_stages_compute_what_the_chain_does(stages, chunks):
    """Every layer is on one stage; one piece after the other, dealt out in turns, is the whole chain."""
    model = transformer("lm")
    found = units(model, (6,), "u1")
    params = Params(Layout(model.specs()))
    params.initialize(1)
    tokens = np.arange(12).reshape(2, 6) % 9
    expected, _ = model.forward(params, tokens, EVALUATE)
    held = stage_layers(model, found, cuts(found, stages * chunks), stages, chunks)
    assert [len(mine) for mine in held] == [chunks] * stages
    y = tokens
    for piece in range(stages * chunks):
        y, _ = held[piece % stages][piece // stages].forward(params, y, EVALUATE)
    assert y.tobytes() == expected.tobytes()
    layers = [layer for chunk in range(chunks) for stage in range(stages) for layer in held[stage][chunk].layers]
    assert layers == list(model.layers)
