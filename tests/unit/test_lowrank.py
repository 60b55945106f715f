"""Sums of matrices by their factors: one rank and the pieces; tests/mpi/test_lowrank.py has the others."""

import numpy as np
import pytest

from mpitrain.bench.allreduce import parse_stream
from mpitrain.bench.codec import parse_subject
from mpitrain.codecs.registry import make_codec
from mpitrain.collectives.registry import make_reducer
from mpitrain.comm.grid import Axis
from mpitrain.config.codec_names import is_coarse, kind_of, parse_codec, parse_tensor_codec, rank_of
from mpitrain.config.load import resolve
from mpitrain.config.schema import ExchangeConfig, RuleConfig
from mpitrain.errors import ConfigError
from mpitrain.params import Layout, Params, ParamSpec
from mpitrain.train.buckets import codec_of, group_of
from mpitrain.train.lowrank import Factored, LowRankSums
from tests.reference.configs import config_of, message_of
from tests.reference.places import Place

M, N = 40, 60


def drawn(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


class Group:
    """Ranks that sum in numpy what their factors are; what the second factors lose is made up."""

    def __init__(self, ranks, rank, *, residual=True):
        self.grads = [np.zeros((M, N), np.float32) for _ in range(ranks)]
        self.left = [np.zeros((rank, M), np.float32) for _ in range(ranks)]
        self.right = [np.zeros((rank, N), np.float32) for _ in range(ranks)]
        three = zip(self.grads, self.left, self.right, strict=True)
        self.ranks = [Factored(*one, seed=0, name="w", residual=residual) for one in three]

    def step(self, grads, losses=None):
        for mine, grad in zip(self.grads, grads, strict=True):
            mine[:] = grad
        for one in self.ranks:
            one.begin()
        self._sum(self.left)
        for one in self.ranks:
            one.divide()
        lost = losses if losses is not None else [np.zeros_like(self.right[0]) for _ in self.ranks]
        self._sum(self.right)
        for one, factor, loss in zip(self.ranks, self.right, lost, strict=True):
            np.subtract(factor, sum(lost), out=factor)
            one.finish(loss)
        for one in self.ranks:
            for memory in one.memories().values():
                memory.commit()
        return self.grads[0]

    @staticmethod
    def _sum(factors):
        total = sum(factors)
        for factor in factors:
            factor[:] = total

    def residuals(self):
        return sum(one.residual.current.astype(np.float64) for one in self.ranks).reshape(M, N)


def test_a_residual_that_fades_away_becomes_zero():
    """Not subnormal numbers, which would slow every step that touches them (C17)."""
    group = Group(2, 3)
    for one in group.ranks:
        one.residual.current[:] = np.random.default_rng(1).choice(np.array([1e-41, -3e-45, 2e-38], "f4"), M * N)
    group.step([np.zeros((M, N), np.float32)] * 2)
    for one in group.ranks:
        sizes = np.abs(one.residual.current)
        assert sizes.any()
        assert not ((sizes > 0) & (sizes < np.finfo(np.float32).tiny)).any()


def test_a_step_is_that_of_numpy():
    """By QR, whose signs and bases cancel in the product; warm start and residual over three steps."""
    group, guess, errors = Group(3, 4), None, np.zeros((3, M, N))
    guess = group.ranks[0].guess.current.reshape(4, N).T.astype(np.float64)
    for step in range(3):
        grads = drawn(3, M, N, seed=step)
        matrices = grads + errors
        left = np.linalg.qr(sum(matrix @ guess for matrix in matrices))[0]
        rights = [matrix.T @ left for matrix in matrices]
        expected = left @ sum(rights).T
        errors = np.stack([matrix - left @ right.T for matrix, right in zip(matrices, rights, strict=True)])
        guess = np.linalg.qr(sum(rights))[0]
        np.testing.assert_allclose(group.step(grads), expected, atol=2e-5)
        for one, error in zip(group.ranks, errors, strict=True):
            np.testing.assert_allclose(one.residual.current.reshape(M, N), error, atol=2e-5)


def test_nothing_is_lost():
    """The sum and what all ranks have lost are what they had, also where the second factors were rounded."""
    group, before = Group(3, 2), np.zeros((M, N))
    for step in range(4):
        grads = drawn(3, M, N, seed=step)
        lost = [0.1 * drawn(2, N, seed=10 * step + rank) for rank in range(3)]
        total = group.step(grads, lost)
        np.testing.assert_allclose(total + group.residuals(), grads.sum(axis=0) + before, atol=2e-5)
        before = group.residuals()


def test_a_warm_start_finds_the_largest_directions():
    """Of a fixed matrix without feedback, the error falls with every step to that of the best matrix of rank 4."""
    matrix = drawn(M, M) @ np.diag(0.8 ** np.arange(M)).astype(np.float32) @ drawn(M, N, seed=1)
    values = np.linalg.svd(matrix, compute_uv=False)
    best = np.sqrt((values[4:] ** 2).sum())
    group = Group(1, 4, residual=False)
    errors = [np.linalg.norm(matrix - group.step([matrix])) for _ in range(12)]
    assert all(after < before * (1 + 1e-6) for before, after in zip(errors, errors[1:], strict=False))
    assert errors[0] > 1.2 * best
    assert errors[-1] < 1.001 * best


def descend(*, residual):
    """Least squares beside a disturbance that comes and goes, and hides all else; return how far is still to go."""
    goal, weight = np.outer(drawn(M), drawn(N, seed=1)).astype(np.float32), np.zeros((M, N), np.float32)
    hiding = 3 * np.outer(drawn(M, seed=2), drawn(N, seed=3)).astype(np.float32)
    group = Group(1, 1, residual=residual)
    for step in range(300):
        weight -= np.float32(0.02) * group.step([weight - goal + (-1) ** step * hiding])
    return np.linalg.norm(weight - goal) / np.linalg.norm(goal)


def test_without_a_residual_training_suffers():
    assert descend(residual=True) < 0.5 * descend(residual=False)


def test_zeros_and_dependent_rows():
    """Nothing becomes NaN, and a guess that came to nothing is drawn anew: the next matrix is found."""
    group = Group(1, 3, residual=False)
    assert not group.step([np.zeros((M, N), np.float32)]).any()
    one = np.outer(drawn(M), drawn(N, seed=1)).astype(np.float32)
    for _ in range(2):
        np.testing.assert_allclose(group.step([one]), one, atol=1e-5)
    assert group.ranks[0].guess.current.reshape(3, N).any(axis=1).all()
    three = (drawn(M, 3) @ drawn(3, N, seed=1)).astype(np.float32)
    group.step([three])
    np.testing.assert_allclose(group.step([three]), three, atol=1e-4)


SPECS = [
    ParamSpec("a.weight", (M, N)),
    ParamSpec("a.bias", (N,)),
    ParamSpec("b.weight", (20, 60)),
    ParamSpec("c", (9, 5)),
]


def alone(**exchange):
    config = resolve({"exchange": {"codec": "lowrank-4"} | exchange}, "test", []).config.exchange
    values = Params(Layout(SPECS, group_of(config)))
    return values, LowRankSums(make_reducer("direct", Axis(Place(0, 1))), values, config, seed=0, steps=9)


def run(sums, values, step, *, accept=True):
    for name in values:
        values[name][...] = drawn(*values[name].shape, seed=step)
    sums.begin(step)
    sums.finished(list(values)[::-1])
    summed = sums.finish()
    sums.commit() if accept and summed.finite else sums.rollback()
    return values.flat.copy(), summed


def test_tensors_find_what_carries_them():
    """Small ones fp16, one of two thousand elements is twice its factors of rank 4, another one is not."""
    config = ExchangeConfig(codec="lowrank-4", factor_codec="int8")
    assert [codec_of(spec, config) for spec in SPECS] == ["lowrank-4", "fp16", "lowrank-4", "fp16"]
    assert codec_of(ParamSpec("x", (16, 64)), config) == "lowrank-4"
    assert codec_of(ParamSpec("x", (16, 64)), ExchangeConfig(codec="lowrank-7", factor_codec="int8")) == "int8"
    assert codec_of(ParamSpec("x", (4, 4, 64)), config) == "int8"
    raw = ExchangeConfig(codec="lowrank-4", factor_codec="raw", collective="native")
    assert [codec_of(spec, raw) for spec in SPECS] == ["lowrank-4", "raw", "lowrank-4", "raw"]
    rule = ExchangeConfig(codec="int8", rule=(RuleConfig(match="a.*", codec="lowrank-2"),))
    assert [codec_of(spec, rule) for spec in SPECS] == ["lowrank-2", "fp16", "int8", "fp16"]
    assert alone()[1].tensors_by_codec() == {"lowrank-4": ["a.weight", "b.weight"], "fp16": ["a.bias", "c"]}


def test_a_rejected_step_leaves_no_trace():
    values, sums = alone()
    run(sums, values, 1)
    expected = run(sums, values, 2)[0]
    values, sums = alone()
    run(sums, values, 1)
    before = {name: memory.current.copy() for name, memory in sums.state().items()}
    run(sums, values, 2, accept=False)
    assert all((memory.current == before[name]).all() for name, memory in sums.state().items())
    assert run(sums, values, 2)[0].tobytes() == expected.tobytes()


def test_what_is_not_finite_is_told():
    values, sums = alone()
    run(sums, values, 1)
    for name in ("a.weight", "a.bias"):
        sums.begin(2)
        values.flat[:] = 1
        values[name].reshape(-1)[3] = np.inf
        sums.finished(list(values))
        assert not sums.finish().finite
        assert sums.not_finite() == [name]
        sums.rollback()
    assert all(np.isfinite(memory.current).all() for memory in sums.state().values())


def test_steps_that_travel_raw_touch_no_memory():
    values, sums = alone(warmup_steps=1, raw_last_steps=1)
    before = {name: memory.current.copy() for name, memory in sums.state().items()}
    for step in (1, 9):
        run(sums, values, step)
        assert all(np.array_equal(values[name], drawn(*values[name].shape, seed=step)) for name in values)
    assert all((memory.current == before[name]).all() for name, memory in sums.state().items())
    run(sums, values, 2)
    assert sums.state()["a.weight.residual"].current.any()


def test_a_reset_zeroes_residuals_and_keeps_guesses():
    values, sums = alone(reset_every=2)
    for step in (1, 2):
        run(sums, values, step)
        kept = {name: bool(memory.current.any()) for name, memory in sums.state().items() if "weight" in name}
        assert kept == {
            "a.weight.guess": True,
            "a.weight.residual": step == 1,
            "b.weight.guess": True,
            "b.weight.residual": step == 1,
        }


def test_names():
    assert [rank_of(name) for name in ("lowrank", "lowrank-1", "lowrank-64", "int8", "topk-4")] == [
        4,
        1,
        64,
        None,
        None,
    ]
    assert (kind_of("lowrank-2"), is_coarse("lowrank-2")) == ("lowrank", True)
    for wrong in ("lowrank-0", "lowrank-65", "lowrank-1.5"):
        with pytest.raises(ConfigError, match=r"lowrank-R \(whole R from 1 to 64\), got"):
            parse_tensor_codec(wrong)
    with pytest.raises(ConfigError, match="did you mean lowrank"):
        parse_tensor_codec("powersgd")
    with pytest.raises(ConfigError, match="which carries matrices and no other values; it is for exchange.codec"):
        parse_codec("lowrank-4")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["parallel.codec=lowrank-4"], "carries matrices"),
        (["parallel.tensor_codec=lowrank-4"], "carries matrices"),
        (["exchange.server_codec=lowrank-4"], "carries matrices"),
        (["exchange.factor_codec=lowrank-4"], "carries matrices"),
        (["exchange.when=local"], 'set exchange.when = "sync"'),
        (["exchange.when=server"], 'set exchange.when = "sync"'),
        (["exchange.memory=delta"], 'set memory = "residual"'),
        (["exchange.collective=native"], 'set factor_codec = "raw"'),
        (["exchange.rounding=stochastic"], 'set factor_codec = "int8"'),
    ],
    ids=str,
)
def test_what_does_not_go_together(overrides, expected):
    assert expected in message_of("exchange.codec=lowrank-4", *overrides)


def test_what_goes_together():
    tree = "exchange.codec=lowrank-4"
    assert config_of(tree).exchange.memory == "residual"
    assert config_of(tree, "exchange.memory=none").exchange.memory == "none"
    assert config_of(tree, "exchange.collective=native", "exchange.factor_codec=raw").exchange.memory == "residual"
    assert config_of(tree, "exchange.factor_codec=int8", "exchange.rounding=stochastic")
    unread = resolve({"exchange": {"factor_codec": "int8"}}, "test", []).warnings()
    assert unread == ['exchange.factor_codec is set, but exchange.codec = "int8" does not read it']


def test_only_tensors_travel_as_matrices():
    """Streams of values, wherever they are named, refuse the name and say what it is for."""
    for refused in (make_codec, parse_stream, parse_subject):
        with pytest.raises(ConfigError, match=r"got 'lowrank-4', which carries matrices.*exchange.rule"):
            refused("lowrank-4")
