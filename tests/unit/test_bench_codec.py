"""``mpitrain bench codec``: its fields, its arithmetic and its refusals; what it times belongs to nobody's test."""

import json
import math
import sys

import numpy as np
import pytest

from mpitrain.bench import codec as bench
from mpitrain.bench.captured import capture
from mpitrain.bench.sources import DRAWN
from mpitrain.cli.main import run
from mpitrain.codecs.registry import CODECS, make_codec
from mpitrain.config.codec_names import kind_of

FIELDS = (
    "codec source values bits_per_value snr_db shannon_gap_bits gaussian_gap_bits encode_GBps decode_add_GBps "
    "memcpy_GBps encode_ratio decode_add_ratio"
)
SIZE = 2**14


@pytest.fixture
def command(monkeypatch):
    def call(*options):
        monkeypatch.setattr(sys, "argv", ["mpitrain", "bench", "codec", *options])
        with pytest.raises(SystemExit) as ended:
            run()
        return ended.value.code

    return call


@pytest.fixture
def measured(tmp_path, capsys, command):
    def call(*options):
        path = tmp_path / "codec.json"
        assert command(f"--size={SIZE}", "--repeats=1", f"--json={path}", *options) == 0
        assert "One thread, median of 1" in capsys.readouterr().out
        return {(record["codec"], record["source"]): record for record in json.loads(path.read_text())}

    return call


def test_every_codec_there_is_and_both_sources(measured):
    records = measured()
    names = [name for name in bench.DEFAULTS if kind_of(name.partition(":")[0]) in CODECS]
    assert list(records) == [(name, source) for source in ("gaussian", "laplace") for name in names]
    assert {kind_of(name.partition(":")[0]) for name in bench.DEFAULTS} >= set(CODECS)
    for record in records.values():
        assert list(record) == FIELDS.split()
        assert min(record[field] for field in record if field.endswith(("GBps", "ratio"))) > 0
    bits = {name: records[name, "gaussian"]["bits_per_value"] for name in names}
    header = 128 / SIZE
    assert (bits["raw"], bits["fp16"], bits["int8"]) == (32 + header, 16 + header, 8.125 + header)
    assert bits["int8:stochastic"] == bits["int8:residual"] == bits["int8"]
    assert bits["int8:delta"] == bits["int8"] + 4 / 128
    assert records["raw", "gaussian"]["snr_db"] is records["int8:residual", "gaussian"]["snr_db"] is None


def test_the_distance_from_shannon(measured):
    """By hand, with another generator: a Gaussian's bound is 6.02 dB a bit, a Laplacian's lies e/π lower."""
    records = measured("--codec", "int8", "--codec=int4", "--codec", "int8:stochastic")
    assert len(records) == 6
    rng = np.random.default_rng(5)
    for source, x, above in (
        ("gaussian", rng.normal(size=SIZE), 0.0),
        ("laplace", rng.laplace(size=SIZE), 0.5 * math.log2(math.e / math.pi)),
    ):
        for name in ("int8", "int4"):
            record, codec = records[name, source], make_codec(name)
            values, out = x.astype(np.float32), np.empty(SIZE, np.float32)
            wire = np.zeros(codec.max_nbytes(SIZE), np.uint8)
            codec.decode(wire[: codec.encode(values, wire)[0]], out)
            snr_db = 10 * math.log10(np.mean(values**2) / np.mean((out - values) ** 2))
            assert record["snr_db"] == pytest.approx(snr_db, abs=0.3)
            gap = record["bits_per_value"] - record["snr_db"] * math.log2(10) / 20
            assert record["gaussian_gap_bits"] == pytest.approx(gap, abs=1e-9)
            assert record["shannon_gap_bits"] == pytest.approx(gap - above, abs=1e-9)
    assert records["int8", "gaussian"]["shannon_gap_bits"] == pytest.approx(0.87, abs=0.03)
    assert records["int8:stochastic", "laplace"]["snr_db"] == pytest.approx(
        records["int8", "laplace"]["snr_db"] - 3, abs=0.5
    )


def test_one_source(measured):
    assert list(measured("--codec", "fp16", "--source", "laplace")) == [("fp16", "laplace")]


def test_laplacian_values_are_laplacian():
    x = np.empty(2**16, np.float32)
    DRAWN["laplace"][0](np.random.default_rng(1), x)
    assert abs(x.mean()) < 0.02
    assert np.mean(x**2) == pytest.approx(2, rel=0.03)
    assert np.mean(np.abs(x)) == pytest.approx(1, rel=0.02)
    assert np.mean(x**4) == pytest.approx(24, rel=0.15)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--codec", "int9"], "bench: --codec int9: expected one of raw, fp16"),
        (["--codec", "ecq-99"], "bench: --codec ecq-99: expected ecq or ecq-BITS"),
        (["--codec", "int8:all"], "expected CODEC, or one of stochastic, residual, delta behind it, got 'all'"),
        (["--codec", "fp16:stochastic"], "bench: --codec fp16:stochastic: stochastic rounding needs one of int8, int4"),
        (["--codec", "raw:residual"], 'exchange.memory = "residual" has no error to remember'),
        (
            ["--source", "uniform"],
            "bench: --source: expected gaussian, laplace or a configuration (*.toml), got 'uniform'",
        ),
    ],
)
def test_refusals(command, capsys, options, told):
    assert command("--size=10", *options) == 2
    assert told in capsys.readouterr().err


CONFIG = """
[model]
kind = "mlp"
hidden = [64, 48]
[data]
kind = "stations"
window = 8
stations = 4
[train]
steps = 3
batch_size = 16
clip_norm = 1e-3
[exchange]
codec = "int8"
warmup_steps = 2
[[exchange.rule]]
match = "*"
codec = "int4"
"""


@pytest.fixture
def config(tmp_path):
    def write(more=""):
        path = tmp_path / "own.toml"
        path.write_text(CONFIG + more)
        return path

    return write


def test_gradients_of_a_model(measured, config):
    """Of raw, there are all large tensors, 4 bytes a value, and a header a message."""
    records = measured("--source", str(config()), "--step=2", "--codec=raw", "--codec=int8", "--codec=int8:delta")
    assert list(records) == [(name, "own") for name in ("raw", "int8", "int8:delta")]
    raw, int8, delta = records.values()
    values = raw["values"]
    messages = round((raw["bits_per_value"] - 32) * values / 128)
    assert values > 1024
    assert values % 16 == 0
    assert messages >= 1
    assert raw["bits_per_value"] == pytest.approx(32 + messages * 128 / values, abs=1e-9)
    assert 8 < int8["bits_per_value"] < delta["bits_per_value"] < 9
    assert int8["snr_db"] > 35
    assert int8["shannon_gap_bits"] >= int8["gaussian_gap_bits"]
    assert int8["gaussian_gap_bits"] == pytest.approx(int8["bits_per_value"] - int8["snr_db"] * math.log2(10) / 20)


def test_what_is_captured_is_the_gradient_itself(config):
    """Before clipping to 0.001, of the weights of that step, whatever the exchange would have made of it."""
    path = config()
    first, second, again = (capture(path, [], step).values for step in (1, 2, 2))
    assert np.linalg.norm(second) > 0.01
    assert np.array_equal(second, again)
    assert not np.array_equal(first, second)
    for others in (["exchange.codec=sign", "parallel.pp=2"], ["exchange.when=server", "exchange.warmup_steps=0"]):
        assert np.array_equal(second, capture(path, others, 2).values)
    smaller = capture(path, ["exchange.bucket_mb=0.004"], 2)
    assert np.array_equal(second, smaller.values)
    assert len(smaller.messages) == 2


@pytest.mark.parametrize(
    ("options", "code", "told"),
    [
        (["--step=4"], 2, "bench: --step 4, but {path} trains for 3 steps; take an earlier one, or set train.steps"),
        (
            ["--set", "train.init=old", "--step=1"],
            2,
            'train.init = "old", but gradients are captured from the first steps',
        ),
        (["--set", "train.stepz=4"], 2, "stepz"),
        (["--set", "model.hidden=[2]", "--step=1"], 2, "own has no tensor that a codec would serve, all are small"),
        (["--set", "data.kind=windows", "--set=data.path=none.npz", "--step=1"], 3, "none.npz"),
    ],
)
def test_a_model_whose_gradients_cannot_be_had(command, capsys, config, options, code, told):
    path = config()
    assert command("--source", str(path), *options) == code
    assert told.format(path=path) in capsys.readouterr().err


def test_under_a_launcher_nothing_is_captured(command, capsys, config, monkeypatch):
    monkeypatch.setattr("mpitrain.bench.captured.hinted_size", lambda: ("OMPI_COMM_WORLD_SIZE", 2))
    assert command("--source", str(config())) == 5
    assert "bench codec: start it without a launcher" in capsys.readouterr().err
