"""What does not go together in a configuration is refused with a remedy."""

import itertools
import typing

import msgspec
import pytest

from mpitrain.config import schema
from mpitrain.config.codec_names import KINDS
from mpitrain.config.load import resolve
from mpitrain.config.validate import check_consistency, memory_of, refusal, with_derived
from tests.reference.configs import config_of, from_text, message_of

ANSWERS = [
    typing.get_args(schema.CollectiveName),
    [*KINDS, "topk-7", "ecq-2.5", "ecq-20dB"],
    typing.get_args(schema.MemoryName),
    ("nearest", "stochastic"),
]


@pytest.mark.parametrize("answers", list(itertools.product(*ANSWERS)), ids="-".join)
def test_every_combination_is_taken_or_refused_with_a_remedy_that_works(answers):
    collective, codec, memory, rounding = answers
    keys = dict(zip(("collective", "codec", "memory", "rounding"), answers, strict=True))
    overrides = [f"exchange.{key}={word}" for key, word in keys.items()]
    wrong = (
        (collective == "native" and codec != "raw")
        or (codec == "raw" and memory != "none")
        or (memory == "delta" and codec in ("int2", "int2-rans", "sign", "topk", "topk-7"))
        or (rounding == "stochastic" and codec not in ("int8", "int4", "int8-rans", "int4-rans"))
    )
    reason = refusal(*answers)
    assert bool(reason) == wrong
    if not wrong:
        assert config_of(*overrides).exchange.memory == memory
        return
    assert message_of(*overrides) == reason
    assert "; set " in reason
    assert reason.startswith("exchange.")


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (
            ["model.d_model=30", "model.heads=4"],
            ["model.heads = 4", "model.d_model = 30", "[1, 2, 3, 5, 6, 10, 15, 30]"],
        ),
        (["data.kind=windows"], ["data.path is empty", "set data.path"]),
        (["data.clip=3", "data.standardize=false"], ["data.clip = 3.0", "data.standardize = false"]),
        (["model.task=lm"], ['model.task = "lm"', '"classify" or "forecast"', 'data.kind = "text"']),
        (["data.kind=text"], ['data.kind = "text"', 'model.task = "classify"', 'set model.task = "lm"']),
        (["data.kind=text", "model.task=lm", "model.kind=mlp"], ['model.kind = "mlp"', 'model.kind = "transformer"']),
        (
            ["model.d_model=48", "model.heads=6", "parallel.tp=4"],
            ["model.heads = 6 does not divide by parallel.tp = 4; set parallel.tp = 1, 2, 3 or 6"],
        ),
        (["model.d_ff=10", "parallel.tp=4"], ["model.d_ff = 10", "parallel.tp = 4; set parallel.tp = 1 or 2"]),
        (
            ["model.kind=mlp", "model.hidden=[6, 5, 9]", "parallel.tp=2"],
            ["model.hidden[2] = 9 does not divide by parallel.tp = 2; set parallel.tp = 1 or 3"],
        ),
        (["model.kind=mlp", "model.hidden=[7]", "parallel.tp=2"], ["model.hidden[0] = 7", "set parallel.tp = 1 or 7"]),
        (
            ["model.kind=mlp", "parallel.tp=2", "parallel.sequence=true"],
            ["parallel.sequence = true", 'model.kind = "mlp"', "set parallel.sequence = false"],
        ),
        (["train.patience=2", "train.eval_every=0"], ["train.patience = 2", "train.eval_every = 0"]),
        (["train.target=0.5", "train.eval_every=0"], ["train.target = 0.5", "train.eval_every = 0"]),
        (["run.time_margin_s=5"], ["run.time_margin_s = 5", "run.time_limit_s"]),
    ],
)
def test_values_that_do_not_go_together(overrides, parts):
    for part in parts:
        assert part in message_of(*overrides)


def test_rules_with_the_native_collective():
    native = '[exchange]\ncollective = "native"\ncodec = "raw"\n[[exchange.rule]]\nmatch = "*"\ncodec = '
    assert "exchange.rule" in message_of(text=native + '"fp16"')
    from_text(native + '"raw"')


@pytest.mark.parametrize("codec", ["int2", "sign", "topk", "topk-7"])
def test_delta_and_codecs_that_need_feedback(codec):
    """Differences of gradients: refused, also where only a rule says so; not of momenta, nor for servers' answers."""
    remedy = f'"delta" with codec "{codec}" comes near only where what travels changes slowly and goes straight'
    for when in ("sync", "local", "server"):
        overrides = [f"exchange.when={when}", f"exchange.codec={codec}"]
        assert config_of(*overrides).exchange.memory == "residual"
        assert remedy in message_of(*overrides, "exchange.memory=delta")
    rule = f'[exchange]\nmemory = "delta"\n[[exchange.rule]]\nmatch = "*"\ncodec = "{codec}"'
    assert message_of(text=rule).startswith('exchange.rule[0]: exchange.memory = "delta" with')
    config_of("exchange.when=server", f"exchange.server_codec={codec}", "exchange.memory=delta")


@pytest.mark.parametrize("codec", ["int2", "sign", "topk", "topk-7"])
def test_a_biased_codec_without_feedback_is_warned_about_once(codec):
    told = f'exchange.memory = "none" lets codec "{codec}" lose for good'
    rule = {"match": "*", "codec": codec}
    for exchange in ({"codec": codec}, {"codec": codec, "rule": [rule, rule]}, {"codec": "raw", "rule": [rule]}):
        (warning,) = resolve({"exchange": exchange | {"memory": "none"}}, "run.toml", []).warnings()
        assert warning.startswith(told)
        assert resolve({"exchange": exchange}, "run.toml", []).warnings() == []


@pytest.mark.parametrize("key", ["warmup_steps", "raw_last_steps", "reset_every"])
def test_what_varies_with_the_step_needs_an_exchange_at_every_step(key):
    assert getattr(config_of(f"exchange.{key}=5").exchange, key) == 5
    for when in ("local", "server"):
        assert message_of(f"exchange.when={when}", f"exchange.{key}=5") == (
            f'exchange.{key} = 5 is for exchanges at every step, but exchange.when = "{when}" has one codec and memory '
            f"from the first to the last; set exchange.{key} = 0"
        )


def test_a_reset_needs_residuals():
    for memory in ("none", "delta"):
        message = message_of(f"exchange.memory={memory}", "exchange.reset_every=1")
        assert f'exchange.reset_every = 1 zeroes residuals, but exchange.memory = "{memory}" has none; set' in message
    assert "exchange.reset_every = 0" in message_of("exchange.codec=raw", "exchange.reset_every=1")


def test_a_warm_up_that_changes_nothing_or_everything_is_warned_about():
    for key in ("warmup_steps", "raw_last_steps"):
        raw = resolve({}, "x", ["exchange.codec=raw", f"exchange.{key}=1"])
        assert raw.warnings() == ['exchange.warmup_steps and exchange.raw_last_steps change nothing with codec "raw"']
    momenta = resolve({}, "x", ["exchange.codec=raw", "exchange.warmup_steps=1", "exchange.signal=momentum"])
    assert momenta.warnings() == [], "it is what the second moment is learned in"
    ends = ["exchange.warmup_steps=6", "exchange.raw_last_steps=4"]
    assert resolve({}, "x", [*ends, "train.steps=11"]).warnings() == []
    assert resolve({}, "x", [*ends, "train.steps=10"]).warnings() == [
        'exchange.warmup_steps + exchange.raw_last_steps = 10 leave none of the train.steps = 10 to codec "int8"'
    ]


def test_the_two_warm_ups_do_not_collide():
    config = config_of("optim.warmup_steps=3", "exchange.warmup_steps=5")
    assert (config.optim.warmup_steps, config.exchange.warmup_steps) == (3, 5)
    for key, meant in (
        ("train.warmup_steps", "optim.warmup_steps"),
        ("optim.warm_up_steps", "optim.warmup_steps"),
        ("optim.warmup-steps", "optim.warmup_steps"),
        ("exchange.warmup-steps", "exchange.warmup_steps"),
        ("exchange.warmup", "exchange.warmup_steps"),
    ):
        assert message_of(f"{key}=5").endswith(f"did you mean {meant}?")


def test_fine_codecs_may_do_without_memory():
    for codec in ("raw", "fp16", "bf16", "int8", "int4", "ecq", "ecq-2"):
        assert resolve({"exchange": {"codec": codec, "memory": "none"}}, "run.toml", []).warnings() == []


def test_heads_do_not_matter_to_an_mlp():
    assert config_of("model.kind=mlp", "model.d_model=30", "model.heads=4").model.kind == "mlp"


@pytest.mark.parametrize(
    "overrides",
    [
        ["model.heads=8", "parallel.tp=8", "parallel.sequence=true"],
        ["model.kind=mlp", "model.heads=3", "model.hidden=[6, 5]", "parallel.tp=6"],
        ["model.kind=mlp", "model.hidden=[]", "parallel.tp=7"],
    ],
)
def test_models_that_the_tensor_axis_splits(overrides):
    config_of(*overrides)


def test_derived_defaults():
    config = config_of("model.d_model=48", "data.window=10")
    assert (config.model.d_ff, config.data.stride, config.exchange.memory) == (192, 10, "residual")
    config = config_of("model.d_ff=5", "data.stride=3", "exchange.memory=none")
    assert (config.model.d_ff, config.data.stride, config.exchange.memory) == (5, 3, "none")
    assert config_of("exchange.codec=raw").exchange.memory == "none"
    assert memory_of(schema.ExchangeConfig(codec="fp16")) == "residual"
    assert with_derived(config) == config


def test_defaults_are_consistent_and_within_their_own_bounds():
    check_consistency(schema.Config())
    assert msgspec.convert(msgspec.to_builtins(schema.Config()), schema.Config, strict=True) == schema.Config()
    assert resolve({}, "x", []).sources == {}


def test_configurations_cannot_be_changed():
    config = config_of()
    with pytest.raises(AttributeError):
        config.train.steps = 3


def test_lines_are_equal_for_equal_configurations_alone():
    from_set, from_file = resolve({}, "x", ["train.steps=7"]), from_text("[train]\nsteps = 7")
    assert from_set.lines() == from_file.lines()
    differ = [line for line in resolve({}, "x", []).lines() if line not in from_set.lines()]
    assert differ == ["train.steps = 300"]
