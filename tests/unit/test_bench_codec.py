"""``mpitrain bench codec``: its fields, its arithmetic and its refusals; what it times belongs to nobody's test."""

import json
import math
import sys

import numpy as np
import pytest

from mpitrain.bench import codec as bench
from mpitrain.cli.main import run
from mpitrain.codecs.registry import CODECS, make_codec
from mpitrain.config.codec_names import kind_of

FIELDS = (
    "codec source bits_per_value snr_db shannon_gap_bits gaussian_gap_bits encode_GBps decode_add_GBps memcpy_GBps "
    "encode_ratio decode_add_ratio"
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
        assert "one thread, median of 1" in capsys.readouterr().out
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
    bench.SOURCES["laplace"][0](np.random.default_rng(1), x)
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
        (["--source", "uniform"], "bench: --source: expected one of gaussian, laplace, got 'uniform'"),
    ],
)
def test_refusals(command, capsys, options, told):
    assert command("--size=10", *options) == 2
    assert told in capsys.readouterr().err
