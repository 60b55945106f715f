"""Configurations: conversion, the order of sources, and the round trip through TOML."""

import tomllib
import typing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpitrain.config import schema
from mpitrain.config.load import resolve
from mpitrain.config.validate import READ_BY, unread_keys
from tests.reference.configs import config_of, from_text, message_of

WINDOWS = {"data": {"kind": "windows", "path": "a.npz"}}


# Values.


@pytest.mark.parametrize("value", ["'0.001'", "1e-3", "1E-3", "0.001", '"1e-3"', "0.1e-2", '"1E-3"'])
def test_numbers_are_read_however_they_are_written(value):
    for config in (config_of(f"optim.lr={value}"), from_text(f"[optim]\nlr = {value}").config):
        assert config.optim.lr == 0.001
        assert isinstance(config.optim.lr, float)


def test_integers_serve_as_floats_and_whole_floats_as_integers():
    config = config_of("optim.lr=1", "train.clip_norm=0", "train.steps=1e3", 'train.batch_size="32"')
    assert (config.optim.lr, config.train.clip_norm, config.train.steps, config.train.batch_size) == (
        1.0,
        0.0,
        1000,
        32,
    )
    assert [type(v) for v in (config.optim.lr, config.train.steps)] == [float, int]


@pytest.mark.parametrize("text", ["true", "false", '"true"', "1", "0", "True", "false "])
def test_booleans(text):
    assert config_of(f"exchange.overlap={text}").exchange.overlap is (text.lower().strip(' "') in ("true", "1"))


@pytest.mark.parametrize(
    ("key", "value", "parts"),
    [
        ("train.steps", "true", ["train.steps", "expected int", "true"]),
        ("train.steps", "1.5", ["train.steps", "expected int", "1.5"]),
        ("train.steps", "0", ["train.steps", ">= 1", "0"]),
        ("train.steps", "many", ["train.steps", "expected int", "'many'"]),
        ("train.steps", "[3]", ["train.steps", "expected int", "[3]"]),
        ("train.steps", "1e400", ["train.steps", "inf"]),
        ("train.seed", "-1", ["train.seed", ">= 0", "-1"]),
        ("optim.lr", "true", ["optim.lr", "expected float", "true"]),
        ("optim.lr", "0", ["optim.lr", "> 0"]),
        ("optim.lr", "fast", ["optim.lr", "expected float", "'fast'"]),
        ("optim.beta1", "1.0", ["optim.beta1", "< 1"]),
        ("optim.beta1", "-0.1", ["optim.beta1", ">= 0"]),
        ("exchange.overlap", "maybe", ["exchange.overlap", "expected bool", "'maybe'"]),
        ("exchange.overlap", "2", ["exchange.overlap", "expected bool", "2"]),
        ("model.hidden", "128", ["model.hidden", "expected array", "128"]),
        ("model.hidden", "[128, 0]", ["model.hidden[1]", ">= 1", "0"]),
        ("run.folder", "3", ["run.folder", "expected str", "3"]),
        ("parallel.dp", "0", ["parallel.dp", ">= 1"]),
    ],
)
def test_wrong_values_are_refused_with_key_expectation_and_value(key, value, parts):
    message = message_of(f"{key}={value}")
    assert message.startswith(f"--set: {parts[0]}: ")
    for part in parts:
        assert part in message or part in message.replace("True", "true")


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", '"nan"', '"inf"'])
@pytest.mark.parametrize("key", ["optim.lr", "optim.weight_decay", "network.peer_timeout_s"])
def test_numbers_that_are_not_finite_are_refused(key, value):
    assert key in message_of(f"{key}={value}")


def literals():
    for section, kind in typing.get_type_hints(schema.Config).items():
        for key, hint in typing.get_type_hints(kind).items():
            for inner in (hint, *typing.get_args(hint)):
                if typing.get_origin(inner) is typing.Literal:
                    yield f"{section}.{key}", typing.get_args(inner)


@pytest.mark.parametrize(("key", "words"), [pytest.param(*found, id=found[0]) for found in literals()])
def test_every_choice_lists_its_words(key, words):
    assert message_of(f"{key}=fancy").startswith(f"--set: {key}: expected one of ")
    for word in words:
        assert f'"{word}"' in message_of(f"{key}=fancy")
    assert "got 'fancy'" in message_of(f"{key}=fancy")


def test_choices_of_a_rule():
    message = message_of(text='[[exchange.rule]]\nmatch = "*"\ncodec = "int3"\n')
    assert message == (
        "run.toml: exchange.rule[0].codec: expected one of raw, fp16, bf16, int8, int4, int2, sign, topk, topk-N, ecq, "
        "ecq-BITS, ecq-XdB, int8-rans, int4-rans, int2-rans, lowrank, lowrank-R, got 'int3'; did you mean int8?"
    )
    assert "match" in message_of(text='[[exchange.rule]]\ncodec = "int8"\n')
    assert "macth" in message_of(text='[[exchange.rule]]\nmacth = "*"\nmatch = "*"\ncodec = "int8"\n')


def bounds():
    """Yield every numeric key with the lower bound that its type declares, and whether the bound itself is legal."""
    for section, kind in typing.get_type_hints(schema.Config).items():
        for key, hint in typing.get_type_hints(kind, include_extras=True).items():
            for inner in (hint, *(h for h in typing.get_args(hint) if typing.get_origin(hint) is not tuple)):
                for meta in getattr(inner, "__metadata__", ()):
                    if meta.ge is not None or meta.gt is not None:
                        yield f"{section}.{key}", meta.ge if meta.gt is None else meta.gt, meta.gt is None


def test_every_number_below_its_bound_is_refused():
    """Sizes and counts of zero or less above all: none reaches the arithmetic behind it."""
    found = list(bounds())
    assert {"train.steps", "train.batch_size", "data.window", "parallel.dp", "exchange.bucket_mb"} <= {
        k for k, *_ in found
    }
    for key, bound, legal in found:
        for value in (-1, bound - 1, *([] if legal else [bound])):
            assert message_of(f"{key}={value}").startswith(f"--set: {key}: expected ")
    assert "model.hidden[0]" in message_of("model.hidden=[0]")
    assert "model.hidden[1]" in message_of("model.hidden=[8, -1]")


# Sources.


def test_overrides_win_in_their_order_and_are_named_as_source():
    resolved = from_text("[optim]\nlr = 1\neps = 2\n[train]\nsteps = 3", "optim.lr=5", "optim.lr=6", "train.seed=7")
    assert resolved.config.optim.lr == 6
    assert resolved.config.optim.eps == 2
    assert {key: source for key, source in resolved.sources.items() if "." in key} == {
        "optim.lr": "--set",
        "optim.eps": "run.toml",
        "train.steps": "run.toml",
        "train.seed": "--set",
    }
    text = resolved.to_toml()
    for line in ("lr = 6.0  # --set", "eps = 2.0  # run.toml", "weight_decay = 0.01  # default"):
        assert line in text.splitlines()


@pytest.mark.parametrize("override", ["", "=", "optim.lr", "lr=1", ".lr=1", "optim.=1", "optim=1", "optim lr=1"])
def test_overrides_of_the_wrong_form(override):
    assert message_of(override) == f"--set: expected section.key=value, got {override!r}"


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("run.folder=out", "out"),
        ("run.folder= out ", "out"),
        (" run.folder=out", "out"),
        ("run.folder =out", "out"),
        ('run.folder="a b"', "a b"),
        ("run.folder=a=b", "a=b"),
        ("run.folder=/tmp/a#b", "/tmp/a#b"),
        ("run.folder='C:\\new'", "C:\\new"),
        ("run.folder=naïve", "naïve"),
    ],
)
def test_overrides_with_text(override, value):
    assert config_of(override).run.folder == value


@pytest.mark.parametrize("override", ["train.steps=5 # five", "train.steps=5\n[optim]\nlr=3"])
def test_an_override_sets_one_key(override):
    config = config_of(override)
    assert (config.train.steps, config.optim.lr) == (5, 1e-3)


@pytest.mark.parametrize("value", ["3", '"a"', "true", "[1]", "[{a = 1}]"])
def test_sections_that_are_no_tables(value):
    message = message_of(text=f"train = {value}")
    assert "[train] must be a table, got " in message
    assert message.startswith("run.toml: ")
    assert "[train] must be a table" in message_of("train.steps=3", text=f"train = {value}")


def test_override_of_a_key_inside_a_table_that_is_none():
    assert "exchange.rule" in message_of("exchange.rule.match=x")
    assert "exchange.rule" in message_of("exchange.rule=x")


# Round trip.


TRICKY = [
    "",
    "a b",
    'say "hi"',
    "it's",
    "two\nlines",
    "C:\\new\\table",
    "naïve ☃ 🙂",
    "#no",
    "\t",
    "a\x7fb",
    "[x]",
]


def round_trip(resolved):
    again = resolve(tomllib.loads(resolved.to_toml()), "again.toml", [])
    assert again.config == resolved.config
    assert again.lines() == resolved.lines()
    return again


@pytest.mark.parametrize("text", TRICKY)
def test_strings_survive_the_round_trip(text):
    tree = {
        "run": {"folder": "x" + text},
        "data": {**WINDOWS["data"], "drop": [text, "b"], "test_groups": [1, text]},
        "exchange": {"rule": [{"match": text, "codec": "fp16"}]},
    }
    round_trip(resolve(tree, "run.toml", []))


@settings(max_examples=50, deadline=None, derandomize=True, database=None)
@given(
    text=st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20),
    number=st.floats(min_value=1e-300, max_value=1e300),
)
def test_any_text_and_number_survives_the_round_trip(text, number):
    round_trip(resolve({"run": {"folder": "x" + text}, "optim": {"lr": number}}, "run.toml", []))


@pytest.mark.parametrize("origin", ["a\nb.toml", "tab\t.toml", "a # b.toml"])
def test_odd_file_names_do_not_break_the_comments(origin):
    resolved = resolve({"train": {"steps": 2}}, origin, [])
    assert tomllib.loads(resolved.to_toml())["train"]["steps"] == 2


def test_rules_survive_the_round_trip_in_their_order():
    text = """
    [exchange]
    codec = "int8"
    [[exchange.rule]]
    match = "*.norm*"
    codec = "raw"
    [[exchange.rule]]
    match = "head.*"
    codec = "fp16"
    [checkpoint]
    every = 7
    """
    again = round_trip(from_text(text))
    assert [(rule.match, rule.codec) for rule in again.config.exchange.rule] == [("*.norm*", "raw"), ("head.*", "fp16")]
    assert again.config.checkpoint.every == 7


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["model.kind=mlp", "model.hidden=[3, 4]"],
        ["data.kind=windows", "data.path=a.h5", "model.task=forecast", "data.horizon=3", "data.test_groups=[1, 'b']"],
        ["data.kind=text", "model.task=lm", "data.path='my text.txt'", "data.test_fraction=0.2", "data.readers=0"],
        ["optim.kind=sgd", "optim.momentum=0.5", "optim.schedule=constant"],
        ["parallel.dp=3", "exchange.bucket_mb=0.25", "model.d_ff=7", "data.stride=2"],
        ["optim.lr=1e-300", "optim.eps=1e16", "network.peer_timeout_s=0.1"],
    ],
)
def test_every_kind_survives_the_round_trip(overrides):
    round_trip(resolve({}, "run.toml", overrides))


def test_keys_that_are_not_read_are_warned_about_and_not_written():
    resolved = resolve({}, "run.toml", ["model.kind=mlp", "model.heads=8", "optim.momentum=0.5"])
    assert resolved.warnings() == [
        'model.heads is set, but model.kind = "mlp" does not read it',
        'optim.momentum is set, but optim.kind = "adamw" does not read it',
    ]
    written = tomllib.loads(resolved.to_toml())
    assert "heads" not in written["model"]
    assert "momentum" not in written["optim"]


def test_a_text_reads_no_columns_and_is_always_causal():
    for task in ("classify", "forecast"):
        assert resolve({}, "run.toml", [f"model.task={task}", "model.causal=true"]).warnings() == []
    overrides = ["data.kind=text", "model.task=lm"]
    assert resolve({}, "run.toml", [*overrides, "data.stations=3", "data.stride=7", "data.window=9"]).warnings() == []
    resolved = resolve({}, "run.toml", [*overrides, "model.causal=true", "data.clip=3", "data.x=a", "data.samples=9"])
    assert resolved.warnings() == [
        'data.clip is set, but data.kind = "text" does not read it',
        'data.samples is set, but data.kind = "text" does not read it',
        'data.x is set, but data.kind = "text" does not read it',
        'model.causal is set, but model.task = "lm" does not read it',
    ]


def test_the_table_of_read_keys_names_keys_and_choices_that_exist():
    hints = {s: typing.get_type_hints(k) for s, k in typing.get_type_hints(schema.Config).items()}
    for choice, readers in READ_BY.items():
        section, _, name = choice.partition(".")
        assert set(readers) == set(typing.get_args(hints[section][name]))
        for key in " ".join(readers.values()).split():
            home, _, inner = key.rpartition(".")
            assert inner in hints[home or section]
    assert not set(unread_keys(schema.Config())) & {"model.kind", "data.kind", "optim.kind"}
