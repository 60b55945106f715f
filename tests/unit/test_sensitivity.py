"""What `mpitrain sensitivity` measures, against numpy; what it chooses, and the rules that say so."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mpi4py import MPI

from mpitrain.bench.precision import Budget, choose_codecs, rules_for, settled, usable_codecs, with_rules
from mpitrain.bench.sensitivity import Effect, Probe, Sample, effect_of
from mpitrain.bench.tensor_rules import escaped, make_rules, rules_toml
from mpitrain.codecs.registry import make_codec
from mpitrain.comm.fault import FaultHook
from mpitrain.comm.grid import ProcessGrid
from mpitrain.config.load import resolve
from mpitrain.config.plain import parse_toml
from mpitrain.config.schema import ExchangeConfig, RuleConfig
from mpitrain.errors import ConfigError, DivergedError
from mpitrain.params import ParamSpec
from mpitrain.partition import GridShape
from mpitrain.train.buckets import codec_of

TREE = {
    "model": {"kind": "mlp", "hidden": [64, 8]},
    "data": {"samples": 200, "test_samples": 30, "window": 4},
    "train": {"batch_size": 20, "steps": 8, "clip_norm": 0.0},
    "optim": {"lr": 0.01, "weight_decay": 0.1, "beta2": 0.9, "eps": 1e-6},
}
CODECS = ["raw", "fp16", "int8", "int2", "sign", "topk-10"]


@pytest.fixture
def grid():
    with ProcessGrid(MPI.COMM_SELF, GridShape(1)) as grid:
        yield grid


@pytest.fixture
def probe_of(grid):
    probes = []

    def make(*overrides, **options):
        probes.append(Probe(resolve(TREE, "test", list(overrides)).config, grid, steps=8, **options))
        return probes[-1]

    yield make
    for probe in probes:
        probe.close()


def through(name, values):
    """Encode and decode."""
    codec, out = make_codec(name), np.zeros_like(values)
    wire = np.zeros(codec.max_nbytes(values.size), np.uint8)
    nbytes, _ = codec.encode(values, wire)
    codec.decode(wire[:nbytes], out)
    return nbytes, out


def preconditioned(values, moment, step):
    """Divide by the root of the corrected second moment, as AdamW does."""
    return values / (np.sqrt(moment / (1 - 0.9**step)) + 1e-6)


def test_the_error_of_adamw_by_numpy(probe_of):
    """The moments are followed from the first step on, independently of the optimizer's own."""
    probe = probe_of("optim.schedule=constant")
    names = list(probe.segments)
    second = {name: np.zeros(probe.parts.grads[name].size) for name in names}
    for step in (1, 2, 3):
        found = probe.measure(dict.fromkeys(names, CODECS))
        grads = {name: probe.parts.grads[name].ravel().astype(np.float64) for name in names}
        past = second
        second = {name: 0.9 * past[name] + 0.1 * grads[name] ** 2 for name in names}
        own = {name: np.sum(preconditioned(grads[name], second[name], step) ** 2) for name in names}
        for (name, codec), sample in found.items():
            nbytes, decoded = through(codec, probe.parts.grads[name].ravel())
            larger = 0.9 * past[name] + 0.1 * np.maximum(grads[name], np.abs(decoded.astype(np.float64))) ** 2
            larger = np.maximum(larger, second[name])
            square = np.sum(preconditioned(decoded - grads[name], larger, step) ** 2)
            expected = (nbytes, square / sum(own.values()), square / own[name], 0.01**2 * square)
            # The optimizer's moments are float32.
            assert (sample.nbytes, sample.share, sample.relative, sample.moved) == pytest.approx(expected, rel=2e-5)


def test_a_gradient_is_clipped_after_it_was_coded(probe_of):
    """Errors shrink with the gradient: their share is that without clipping."""
    clipped, free = probe_of("train.clip_norm=0.05", "optim.eps=1e-30"), probe_of("optim.eps=1e-30")
    names = {name: ["int8", "int2"] for name in free.segments}
    expected = free.measure(names)
    for key, sample in clipped.measure(names).items():
        assert (sample.nbytes, sample.share) == pytest.approx((expected[key].nbytes, expected[key].share), rel=1e-3)
    assert np.linalg.norm(clipped.parts.grads.flat) == pytest.approx(0.05, rel=1e-5)


def test_the_error_of_sgd_is_that_of_the_gradient(probe_of):
    probe = probe_of("optim.kind=sgd", "optim.schedule=constant", with_loss=False)
    probe.measure({})
    found = probe.measure(dict.fromkeys(probe.segments, CODECS))
    whole = np.sum(probe.parts.grads.flat.astype(np.float64) ** 2)
    for (name, codec), sample in found.items():
        gradient = probe.parts.grads[name].ravel()
        error = np.sum((through(codec, gradient)[1].astype(np.float64) - gradient) ** 2)
        assert (sample.share, sample.moved) == pytest.approx((error / whole, 1e-4 * error), rel=1e-12)
        assert math.isnan(sample.loss)


@pytest.mark.parametrize("optim", ["optim.kind=adamw", "optim.kind=sgd"])
def test_the_loss_of_another_step(probe_of, optim):
    """A codec that loses nothing changes no bit; another one moves the weights as the optimizer would have."""
    probe, twin = probe_of(optim), probe_of(optim)
    for name in probe.segments:
        found = probe.measure({name: ["raw", "int2"]})
        assert found[name, "raw"].loss == found[name, "raw"].share == 0.0

        before = twin.parts.params.flat.copy()
        state = twin.parts.exchange.weights.state
        buffers = {key: buffer.flat.copy() for key, buffer in state.buffers.items()}
        lr, _ = twin.advance()
        exact, grads = twin.parts.params.flat.copy(), twin.parts.grads
        kept = {key: buffer.flat.copy() for key, buffer in state.buffers.items()}
        loss = twin.loss()
        # The whole step is taken again; of its result, that of one tensor counts.
        segment = twin.segments[name]
        place = slice(segment.start, segment.stop)
        original = grads.flat[place].copy()
        grads.flat[place] = through("int2", original)[1]
        twin.parts.params.flat[:] = before
        for key, values in buffers.items():
            state.buffers[key].flat[:] = values
        state.step -= 1
        twin.parts.exchange.weights.optimizer.step(twin.parts.params, grads, state, lr)
        moved = exact.copy()
        moved[place] = twin.parts.params.flat[place]
        twin.parts.params.flat[:] = moved
        assert found[name, "int2"].loss == twin.loss() - loss
        twin.parts.params.flat[:] = exact
        for key, values in kept.items():
            state.buffers[key].flat[:] = values


def test_looking_changes_nothing(probe_of):
    probe, twin = probe_of(), probe_of()
    for _ in range(3):
        probe.measure(dict.fromkeys(probe.segments, CODECS))
        probe.measure_together(ExchangeConfig(codec="int2"))
        twin.advance()
        twin.advance()
    assert probe.step == twin.step == 6
    assert probe.parts.params.flat.tobytes() == twin.parts.params.flat.tobytes()


def test_weights_without_gradients_do_not_move_further_than_adam_lets_them(probe_of):
    """``sign`` sends something for zeros: with v = 0 it would count 1/eps^2 times."""
    probe = probe_of("train.clip_norm=0")
    name = next(iter(probe.segments))
    probe.advance()
    moment, grads = probe.parts.exchange.weights.state.buffers["second"][name], probe.parts.grads[name]
    moment[...], grads[...] = 0, 0
    segment = probe.segments[name]
    bound = math.sqrt((1 - 0.9**1) / (1 - 0.9))
    assert probe._squared_error(segment, np.full(grads.size, 1e-3, np.float32)) <= grads.size * bound**2


def test_all_together_travel_in_the_buckets_of_the_run(probe_of):
    """Of a codec with blocks the errors of all tensors add up, and the payload is what the buckets take."""
    exchange = ExchangeConfig(codec="int4", bucket_mb=1e-6)
    probe, twin = probe_of(), probe_of()
    names = {spec.name: [codec_of(spec, exchange)] for spec in probe.parts.params.layout.specs}
    assert {codec for codecs in names.values() for codec in codecs} == {"int4", "fp16"}
    single = probe.measure(names)
    together = twin.measure_together(exchange)
    assert together.share == pytest.approx(sum(sample.share for sample in single.values()), rel=1e-12)
    assert together.nbytes == sum(sample.nbytes for sample in single.values())
    raw = twin.measure_together(ExchangeConfig(codec="raw", memory="none"))
    assert (raw.share, raw.loss) == (0.0, 0.0)


def test_a_step_that_is_not_finite_is_refused(probe_of):
    probe = probe_of()
    probe.parts.params.flat[:] = np.nan
    with pytest.raises(DivergedError, match="sensitivity: the gradient of step 1 is not finite"):
        probe.measure({})


def test_a_gradient_of_zeros_is_refused(probe_of):
    probe = probe_of()
    probe._loop._faults = FaultHook("const:rank=0,step=1,value=0", 0)
    with pytest.raises(ConfigError, match="sensitivity: the gradient of step 1 is zero"):
        probe.measure({})


def test_means_and_standard_errors():
    samples = [Sample(10, 0.1, 0.5, 1e-4, loss) for loss in (1.0, 2.0, 6.0)]
    effect = effect_of(samples)
    spread = math.sqrt(((1 - 3) ** 2 + (2 - 3) ** 2 + (6 - 3) ** 2) / 2 / 3)
    assert (effect.nbytes, effect.share, effect.loss) == pytest.approx((10, 0.1, 3))
    assert effect.loss_error == pytest.approx(spread)
    assert effect.loss_bound == pytest.approx(3 + 2 * spread)
    assert Effect(1, 0, 0, 0, loss=-5, loss_error=1).loss_bound == 0
    assert math.isnan(effect_of(samples[:1]).loss_error)


def specs(*names, shape=(64, 64)):
    return [ParamSpec(name, shape) for name in names]


NAMES = st.lists(st.text("a.0*[]?!-", min_size=1, max_size=8), min_size=1, max_size=6, unique=True)


@given(NAMES, st.randoms())
def test_rules_fit_exactly_their_tensors(names, random):
    """Whatever the names, every tensor gets its codec, and no rule fits one without."""
    codecs = {name: random.choice(["int4", "int8", None]) for name in names}
    rules = make_rules({name: codec for name, codec in codecs.items() if codec}, names)
    exchange = ExchangeConfig(codec="raw", rule=tuple(rules))
    assert {spec.name: codec_of(spec, exchange) for spec in specs(*names)} == {
        name: codec or "raw" for name, codec in codecs.items()
    }


def test_layers_share_a_rule_where_it_stays_exact():
    names = ["blocks.0.w", "blocks.1.w", "blocks.0.v", "blocks.1.v", "head.w", "blocks.9.extra.w"]
    codecs = {"blocks.0.w": "int8", "blocks.1.w": "int8", "blocks.0.v": "int4", "blocks.1.v": "int2", "head.w": "int4"}
    rules = {"blocks.0.w": "int8", "blocks.1.w": "int8", "blocks.0.v": "int4", "blocks.1.v": "int2", "head.w": "int4"}
    assert {rule.match: rule.codec for rule in make_rules(codecs, names)} == rules, "blocks.*.w fits the last one, too"
    assert [rule.match for rule in make_rules(codecs, names[:-1])] == [
        "blocks.*.w",
        "blocks.0.v",
        "blocks.1.v",
        "head.w",
    ]
    assert escaped("a[0].*?") == "a[[]0].[*][?]"


def test_rules_as_toml():
    rules = [RuleConfig(match='a"[*]\n', codec="int4"), RuleConfig(match="b", codec="ecq-2")]
    tree = parse_toml(f'[exchange]\ncodec = "int8"\n\n{rules_toml(rules)}')
    assert resolve(tree, "test", []).config.exchange.rule == tuple(rules)


def test_what_is_settled():
    rule = RuleConfig(match="embed", codec="int8")
    model = [*specs("embed", "w"), *specs("gain", shape=(64,)), *specs("tiny", shape=(8, 8))]
    fixed = settled(model, ExchangeConfig(rule=(rule,)))
    assert fixed == {"embed": ("int8", "rule of CONFIG"), "gain": ("fp16", "small"), "tiny": ("fp16", "small")}
    with pytest.raises(ConfigError, match="no tensor to choose a codec for"):
        settled(model, ExchangeConfig(rule=(RuleConfig(match="*", codec="int8"),)))

    chosen = {"embed": "int8", "w": "int2", "gain": "fp16", "tiny": "fp16"}
    exchange = ExchangeConfig(rule=(rule,))
    assert [rule.match for rule in rules_for(chosen, model, exchange)] == ["w"]
    exchange = ExchangeConfig(codec="raw", rule=(rule,))
    assert [rule.match for rule in rules_for(chosen, model, exchange)] == ["w", "gain", "tiny"]


def effects(**errors):
    """Two tensors of 1,000 values: with int8 and int2, or fp16."""
    found = {("a", "int8"): (1000, 0.01), ("a", "int2"): (250, errors.get("a", 0.2)), ("b", "int8"): (1000, 0.01)}
    found |= {("b", "int2"): (250, 0.1), ("g", "fp16"): (20, 0.0)}
    return {key: Effect(nbytes, share, share, share, share / 10, 0.001) for key, (nbytes, share) in found.items()}


CANDIDATES = {"a": ["int8", "int2"], "b": ["int8", "int2"], "g": ["fp16"]}


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        ({"bytes_per_value": 1270 / 2010}, ["int8", "int2"]),
        ({"ratio": 4 * 2010 / 1270}, ["int8", "int2"]),
        ({"ratio": 4 * 2010 / 520}, ["int2", "int2"]),
        ({"error": 0.11}, ["int8", "int2"]),
        ({"error": 0.31}, ["int2", "int2"]),
        ({"loss_pct": 1.0}, ["int8", "int8"]),
        ({"loss_pct": 1.7}, ["int8", "int2"]),
        ({}, ["int2", "int2"]),
    ],
)
def test_budgets(budget, expected):
    """Bytes: 20 are settled. Loss: every bound is a tenth of the error and two standard errors. Ten times less: 804."""
    chosen = choose_codecs(CANDIDATES, effects(), Budget(**budget), values=2010, loss=1.0)
    assert [chosen["a"], chosen["b"], chosen["g"]] == [*expected, "fp16"]


@pytest.mark.parametrize(
    ("budget", "words"),
    [
        (
            {"ratio": 100},
            "80 bytes a gradient, but .* take 520, which are 15.46 times less than float32 and 0.2587 byt",
        ),
        ({"bytes_per_value": 0.01}, "20 bytes a gradient, but .* take 520"),
        ({"error": 0.001}, "the budget is an error of 0.001, but with the best codecs of all it is an error of 0.02"),
        ({"loss_pct": 0.1}, "the budget is 0.1 % of the loss, but with the best codecs of all it is 0.8 % of the loss"),
    ],
)
def test_budgets_that_cannot_be_kept_to(budget, words):
    with pytest.raises(ConfigError, match=words):
        choose_codecs(CANDIDATES, effects(), Budget(**budget), values=2010, loss=1.0)


def test_one_budget():
    assert str(Budget()) == "10 times less than float32"
    with pytest.raises(ConfigError, match="--ratio and --loss-pct are different budgets; give one of them"):
        Budget(ratio=3, loss_pct=1)


def test_codecs_that_can_be_chosen():
    every, notes = usable_codecs(TREE, "test", [], [])
    assert (every[0], every[-1], notes) == ("fp16", "topk-100", [])
    fewer, notes = usable_codecs(TREE, "test", ["exchange.memory=delta"], [])
    assert set(every) - set(fewer) == {"int2", "sign", "topk-100"}
    assert all('exchange.memory = "delta"' in note for note in notes)
    assert usable_codecs(TREE, "test", [], ["int8", "ecq-2.5", "int8"])[0] == ["int8", "ecq-2.5"]
    for asked, overrides, words in [
        (["int9"], [], "sensitivity: --codec: expected one of .* got 'int9'; did you mean int8"),
        (["int2"], ["exchange.memory=delta"], "sensitivity: no rule can have codec int2: .*comes near only where"),
        (
            [],
            ["exchange.collective=native", "exchange.codec=raw"],
            'no rule can have codec fp16: .*collective "native"',
        ),
    ]:
        with pytest.raises(ConfigError, match=words):
            usable_codecs(TREE, "test", overrides, asked)


def test_rules_stand_behind_those_of_the_configuration():
    tree = TREE | {"exchange": {"codec": "raw", "rule": [{"match": "a*", "codec": "int8"}]}}
    resolved = with_rules(tree, "test", ["optim.lr=0.5"], [RuleConfig(match="*[*]", codec="int4")])
    assert [(rule.match, rule.codec) for rule in resolved.config.exchange.rule] == [("a*", "int8"), ("*[*]", "int4")]
    assert (resolved.config.optim.lr, resolved.config.exchange.memory) == (0.5, "residual")
    again = resolve(parse_toml(resolved.to_toml()), "written", []).config
    assert again == resolved.config
