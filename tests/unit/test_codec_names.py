"""Names of codecs: what they mean, wherever they are written, and what a wrong one is told."""

import subprocess
import sys

import numpy as np
import pytest

from mpitrain.bench.allreduce import parse_stream
from mpitrain.bench.cells import parse_cell
from mpitrain.codecs.int8 import Int8
from mpitrain.codecs.raw import Raw
from mpitrain.codecs.registry import CODECS, make_codec
from mpitrain.collectives.predicted import Sent, sent_for_sum, sent_for_vector
from mpitrain.config.codec_names import KINDS, forms, is_coarse, kind_of, parse_codec, rounds_at_random
from mpitrain.config.load import resolve
from mpitrain.errors import ConfigError
from tests.reference.configs import config_of, message_of

ALL = "expected one of raw, fp16, bf16, int8, int4, int2, sign, topk, topk-N, ecq, ecq-BITS, ecq-XdB, "
ALL += "int8-rans, int4-rans, int2-rans"
TENSOR = f"{ALL}, lowrank, lowrank-R"
TOPK = "expected topk or topk-N (whole N from 2 to 100,000)"
ECQ = "expected ecq or ecq-BITS (BITS from 0.1 to 7) or ecq-XdB (X from 1 to 40)"


class Variable(Raw):
    """Stands in for a codec whose bytes depend on the values."""

    wire_id = "ecq"
    format_number = 8
    fixed_size = False

    def __init__(self, dtype=np.float32, *, bits=None, snr_db=None):
        super().__init__(dtype)
        self.bits, self.snr_db = bits, snr_db


class Largest(Raw):
    """Stands in for a codec with a whole number."""

    wire_id = "topk"
    format_number = 7

    def __init__(self, dtype=np.float32, *, one_in=100):
        super().__init__(dtype)
        self.one_in = one_in


@pytest.fixture
def stand_ins(monkeypatch):
    for kind in (Variable, Largest):
        monkeypatch.setitem(CODECS, kind.wire_id, kind)


@pytest.mark.parametrize(
    ("name", "kind", "options"),
    [
        *((name, name, {}) for name in KINDS),
        ("topk-2", "topk", {"one_in": 2}),
        ("topk-100000", "topk", {"one_in": 100_000}),
        ("ecq-3", "ecq", {"bits": 3.0}),
        ("ecq-2.5", "ecq", {"bits": 2.5}),
        ("ecq-0.1", "ecq", {"bits": 0.1}),
        ("ecq-7", "ecq", {"bits": 7.0}),
        ("ecq-20dB", "ecq", {"snr_db": 20.0}),
        ("ecq-1dB", "ecq", {"snr_db": 1.0}),
        ("ecq-40dB", "ecq", {"snr_db": 40.0}),
    ],
)
def test_names_mean(name, kind, options):
    choice = parse_codec(name)
    assert (choice.kind, dict(choice.options)) == (kind, options)
    assert kind_of(name) == kind
    assert (rounds_at_random(name), is_coarse(name)) == (KINDS[kind].stochastic, KINDS[kind].coarse)
    assert config_of(f"exchange.codec={name}").exchange.codec == name
    assert config_of(f"exchange.codec='{name}'", f"exchange.server_codec={name}").exchange.server_codec == name


def test_whole_numbers_stay_whole():
    assert isinstance(parse_codec("topk-100").options["one_in"], int)


@pytest.mark.parametrize(
    ("name", "expected", "near"),
    [
        ("int3", ALL, "int8"),
        ("Int4", ALL, "int4"),
        ("int-8", ALL, "int8"),
        ("fp32", ALL, "raw"),
        ("bfloat16", ALL, "bf16"),
        ("top-k", ALL, "topk"),
        ("topk100", ALL, "topk-100"),
        ("Top-K-100", ALL, "topk-100"),
        ("ecq3", ALL, "ecq-3"),
        ("ecq_2.5", ALL, "ecq-2.5"),
        ("zip", ALL, ""),
        ("", ALL, ""),
        ("-", ALL, ""),
        ("topk-1", TOPK, ""),
        ("topk-100001", TOPK, ""),
        ("topk-2.5", TOPK, ""),
        ("topk-1e3", TOPK, ""),
        ("topk-10dB", TOPK, ""),
        ("topk-", TOPK, ""),
        ("ecq-0", ECQ, ""),
        ("ecq-7.1", ECQ, ""),
        ("ecq--3", ECQ, "ecq-3"),
        ("ecq-nan", ECQ, ""),
        ("ecq-0.9dB", ECQ, ""),
        ("ecq-41dB", ECQ, ""),
        ("ecq-20db", ECQ, "ecq-20dB"),
        ("ecq-20 dB", ECQ, "ecq-20dB"),
        ("ecq-\u0663", ECQ, ""),
        ("ecq-3\n", ECQ, "ecq-3"),
        ("ecq-" + "1" * 5000, ECQ, ""),
        ("int8-3", "expected int8", ""),
    ],
)
def test_wrong_names_are_told_what_was_meant(name, expected, near):
    with pytest.raises(ConfigError) as caught:
        parse_codec(name)
    message = str(caught.value)
    assert message.startswith(f"{expected}, got {name!r:.40}"[: len(expected) + 40])
    assert message.partition("; did you mean ")[2] == (f"{near}?" if near else "")
    assert len(message) < 300


@pytest.mark.parametrize("value", [3, 2.5, True, ["int8"], {"kind": "int8"}])
def test_what_is_no_name(value):
    with pytest.raises(ConfigError) as caught:
        resolve({"exchange": {"codec": value}}, "run.toml", [])
    assert str(caught.value) == f"run.toml: exchange.codec: {TENSOR}, got {value!r}"


@pytest.mark.parametrize(
    "key",
    [
        "exchange.codec",
        "exchange.server_codec",
        "exchange.factor_codec",
        "parallel.codec",
        "parallel.gradient_codec",
        "parallel.tensor_codec",
    ],
)
def test_every_key_that_names_a_codec_is_checked(key):
    assert message_of(f"{key}=ecq-99") == f"--set: {key}: {ECQ}, got 'ecq-99'"
    known = TENSOR if key == "exchange.codec" else ALL
    assert message_of(f"{key}=int9").startswith(f"--set: {key}: {known}, got 'int9'; did you mean int")


def test_rules_are_checked_one_by_one():
    rules = [{"match": "*", "codec": "int8"}, {"match": "*", "codec": "topk-1"}]
    with pytest.raises(ConfigError) as caught:
        resolve({"exchange": {"rule": rules}}, "run.toml", [])
    assert str(caught.value) == f"run.toml: exchange.rule[1].codec: {TOPK}, got 'topk-1'"


def test_the_registry_passes_parameters_on(stand_ins):
    assert (make_codec("ecq").bits, make_codec("ecq").snr_db) == (None, None)
    assert make_codec("ecq-2.5").bits == 2.5
    assert make_codec("ecq-20dB", np.float64).snr_db == 20
    assert make_codec("ecq-20dB", np.float64).dtype == np.float64
    assert make_codec("topk-7").one_in == 7
    assert type(make_codec("int8", stochastic=True)) is Int8
    with pytest.raises(ConfigError, match="codec: stochastic rounding needs one of int8, int4.*, got 'ecq-3'"):
        make_codec("ecq-3", stochastic=True)
    with pytest.raises(ConfigError, match="codec: expected topk or topk-N"):
        make_codec("topk-0")


def test_codecs_take_what_their_names_allow():
    for name, kind in KINDS.items():
        for parameter in kind.parameters if name in CODECS else ():
            for number in (parameter.least, parameter.most):
                make_codec(f"{name}-{number:.15g}{parameter.unit}")


def test_cells_and_streams_take_parameters():
    assert parse_cell("ecq-2.5").overrides[1:] == ("exchange.codec=ecq-2.5", "exchange.memory=residual")
    cell = parse_cell("fine=server-sync/ecq-20dB:delta+topk-100,optim.lr=1")
    assert cell.name == "fine"
    assert cell.overrides[2:] == (
        "exchange.codec=ecq-20dB",
        "exchange.memory=delta",
        "exchange.server_codec=topk-100",
        "optim.lr=1",
    )
    assert parse_stream("ecq-2.5") == ("ecq-2.5", "residual")
    assert parse_stream("ecq-20dB:none") == ("ecq-20dB", "none")
    assert parse_stream("raw") == ("raw", "none")
    for text, told in (
        ("ecq-99", f"bench: --cell ecq-99: {ECQ}"),
        ("int8:", "expected a memory of none, residual, delta, got ''"),
        ("int8:all", "expected a memory of none, residual, delta, got 'all'"),
    ):
        with pytest.raises(ConfigError) as caught:
            parse_stream(text)
        assert told in str(caught.value)


def test_bytes_that_depend_on_values_are_told_as_such():
    assert not sent_for_vector(Raw(), "none", 10).about
    assert sent_for_vector(Variable(), "none", 10) == Sent(16 + 40, 1, about=True)
    for collective in ("direct", "ring", "server"):
        assert all(sent.about for sent in sent_for_sum(collective, Variable(), "none", 512, 3))
        assert not any(sent.about for sent in sent_for_sum(collective, Raw(), "none", 512, 3))
    assert (Sent() + Sent(1, 1, about=True)).about
    assert (Sent(1, 1, about=True) * 3).about


def test_the_reference_names_the_forms():
    assert forms() == ALL.removeprefix("expected one of ").split(", ")


def test_checking_a_configuration_needs_no_kernels():
    """`validate` and `--help` start fast."""
    code = "import sys, mpitrain.config.load; print([m for m in sys.modules if 'numba' in m or 'kernels' in m])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.strip() == "[]"
