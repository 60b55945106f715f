"""Rate and distortion in the report: points where the records say, every name once and free of others, bad files."""

import itertools
import json
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpitrain.errors import ConfigError
from mpitrain.report.chart import LEFT, Line, Mark, point_chart
from mpitrain.report.command import main
from mpitrain.report.labels import Box, Name, place_labels
from mpitrain.report.page import page
from mpitrain.report.rates import bound, rates
from mpitrain.report.rates import read_rates as sort_rates
from mpitrain.report.records import load_records


def read_rates(path):
    return sort_rates(path, load_records(path))


GAUSSIAN = {
    "raw": (32.0, None),
    "bf16": (16.0, 55.59),
    "fp16": (16.0, 73.65),
    "int8": (8.125, 43.72),
    "int4": (4.125, 18.6),
    "int2": (2.125, 7.277),
    "sign": (1.063, 4.415),
    "topk-100": (0.1035, 0.3827),
    "ecq-1": (1.0, 4.575),
    "ecq-2": (1.998, 10.48),
    "ecq-3": (3.001, 16.51),
    "ecq-4": (4.001, 22.53),
    "ecq-6": (6.013, 34.59),
    "int8:stochastic": (8.125, 40.72),
    "int8:residual": (8.125, None),
    "int4:stochastic": (4.125, 15.59),
}
"""Of all default codecs, as measured: bits a value and dB."""


def records(source="gaussian", measured=GAUSSIAN):
    return [
        {
            "codec": codec,
            "source": source,
            "bits_per_value": bits,
            "snr_db": snr_db,
            "shannon_gap_bits": None if snr_db is None else bits - snr_db * math.log2(10) / 20,
        }
        for codec, (bits, snr_db) in measured.items()
    ]


@pytest.fixture
def file(tmp_path):
    def write(content, name="codec.json"):
        path = tmp_path / name
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    return write


def circles(text):
    return [tuple(map(float, found)) for found in re.findall(r'<circle class="c0" cx="([\d.]+)" cy="([\d.]+)"', text)]


def names(text):
    return re.findall(r'<text class="name"[^>]*>([^<]*)<', text)


def test_points_lie_where_the_numbers_say():
    """Both axes begin at 0: with the ends of the picture known, places follow by hand."""
    text, unnamed = point_chart([Mark("far", 8, 40), Mark("near", 2, 10)], [], "bits", "dB")
    (near_x, near_y), (far_x, far_y) = circles(text)
    assert (far_x - LEFT) / (near_x - LEFT) == pytest.approx(4, rel=0.01)
    bottom = float(re.search(r"V([\d.]+)", text)[1])
    assert (bottom - far_y) / (bottom - near_y) == pytest.approx(4, rel=0.01)
    assert unnamed == []


def test_the_bound_is_what_the_gaps_say(file):
    measured = read_rates(file(records())).sources["gaussian"]
    line = bound([each for each in measured if not math.isnan(each.snr_db)])
    assert line[0] == (0, 0)
    assert len(line) == len([snr for _, snr in GAUSSIAN.values() if snr]) + 1
    for bits, snr_db in line:
        assert bits == pytest.approx(snr_db * math.log2(10) / 20)


def test_the_gaussian_bound_is_a_formula(file):
    """Half a bit a factor of two in SNR, whatever gaps the records tell."""
    rows = [row | {"shannon_gap_bits": 0.0} for row in records()]
    measured = read_rates(file(rows)).sources["gaussian"]
    (nothing, (bits, snr_db)) = bound([each for each in measured if not math.isnan(each.snr_db)], "gaussian")
    assert nothing == (0, 0)
    assert snr_db == 73.65
    assert bits == pytest.approx(0.5 * math.log2(10**7.365))


def test_all_default_codecs_are_named_once_and_apart(file):
    text = page([], [read_rates(file(records()))])
    drawn = [codec for codec, (_, snr_db) in GAUSSIAN.items() if snr_db]
    assert sorted(names(text)) == sorted([*drawn, "Shannon&#x27;s bound"])
    assert len(circles(text)) == len(drawn)
    assert "Too close" not in text
    assert "a memory makes good for it: raw, int8:residual." in text
    assert "<td>7.277</td>" in text
    assert "<h1>Codecs: codec.json</h1>" in text


PLACES = st.tuples(st.floats(66, 704), st.floats(12, 436))


@given(
    st.lists(st.tuples(PLACES, st.text("ab-1:", min_size=1, max_size=15)), max_size=25), st.lists(PLACES, max_size=3)
)
def test_names_never_meet(points, line):
    area = Box(66, 12, 704, 436)
    labels = place_labels([Name(text, place) for place, text in points], [line], area)
    assert len(labels) == len(points)
    placed = [label for label in labels if label]
    for one, other in itertools.combinations(placed, 2):
        assert not one.box.meets(other.box)
    for label in placed:
        assert label.box.within(area)
        assert not any(label.box.holds(place) for place, _ in points)


def test_what_has_no_room_is_told():
    marks = [Mark(f"codec-{index}", 1.0, 1.0) for index in range(200)]
    text, unnamed = point_chart(marks, [Line("line", None, [(0, 0), (2, 2)])], "x", "y")
    assert len(circles(text)) == 200
    assert unnamed
    assert len(names(text)) + len(unnamed) == 201


def test_captured_gradients_have_no_known_bound(file):
    told = "".join(rates([read_rates(file(records("text")))]))
    assert "bound of independent Gaussian values with the scales of the tensors" in told
    assert "what they truly need is not known" in told
    assert "Shannon" not in told


def test_names_are_escaped(file):
    row = records("<b>&", {"<i>\n": (2.0, 9.0)})
    text = page([], [read_rates(file(row, "<x>.json"))])
    assert "<i>" not in text
    assert "<b>&" not in text
    assert "<x>" not in text
    assert names(text)[0] == "&lt;i&gt;?"


def test_a_file_of_what_says_nothing_of_noise(file):
    text = page([], [read_rates(file(records(measured={"raw": (32.0, None)})))])
    assert "<svg" not in text
    assert "makes good for it: raw." in text


def test_two_files_are_told_apart(file):
    files = [read_rates(file(records(), name)) for name in ("one.json", "two.json")]
    text = page([], files)
    assert "codecs: gaussian (one.json)" in text
    assert "codecs: gaussian (two.json)" in text


WRECKS = {
    "not JSON": ("{", "got no JSON"),
    "too deep": ("[" * 100_000, "got no JSON"),
    "empty": ("", "got no JSON"),
    "no list": ('{"codec": "int8"}', "got a dict"),
    "nothing in it": ("[]", "got an empty list"),
    "other records": ('[{"ranks": 4, "ms": 3.0}]', "got a record (number 1) without codec, source and bits_per_value"),
    "no record": (json.dumps([*records(), 7]), "got a record (number 17) without codec"),
    "no bits": ('[{"codec": "a", "source": "b", "bits_per_value": NaN}]', "got a record (number 1) without"),
    "twice": (json.dumps(records() + records()), "got raw of gaussian twice"),
}


@pytest.mark.parametrize("name", WRECKS)
def test_other_files_are_refused(name, file, capsys):
    content, told = WRECKS[name]
    path = file(content)
    assert main([path], None) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"mpitrain: report: {path}: expected a run folder or records of codecs or of convergence")
    assert told in error
    assert error.endswith("codec --json FILE or mpitrain bench convergence CONFIG --json FILE\n")
    assert not path.with_suffix(".html").exists()


def test_bytes_that_are_no_text_are_no_json(tmp_path):
    (tmp_path / "x").write_bytes(b"\xff\xfe[]")
    with pytest.raises(ConfigError, match="got no JSON"):
        read_rates(tmp_path / "x")


def test_the_command_writes_beside_the_file(file, capsys):
    path = file(records())
    assert main([path], None) == 0
    assert capsys.readouterr().out == f"report: {path.with_suffix('.html')}\n"
    assert "<svg" in path.with_suffix(".html").read_text()
    assert main([path, path], None) == 2
    assert "is given twice" in capsys.readouterr().err
    assert main([path], path) == 2
    assert "holds the records; name another file with --output" in capsys.readouterr().err
    assert json.loads(path.read_text()) == records()


def test_runs_and_codecs_share_a_page(tmp_path, file, capsys):
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0, "sent_bytes": 10}\n')
    assert main([file(records()), run], None) == 0
    text = (run / "report.html").read_text()
    assert "<h1>Training report: run, codec.json</h1>" in text
    assert "Training loss" in text
    assert "Rate and distortion of codecs: gaussian" in text
