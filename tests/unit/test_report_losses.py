"""Losses against bytes in the report: places, intervals, names apart, what is missing, bad files."""

import itertools
import json
import math
import re

import pytest

from mpitrain.intervals import paired_percent
from mpitrain.report.command import main
from mpitrain.report.losschart import TICKS, byte_axis, size
from mpitrain.report.losses import interval

CELLS = {"raw": (1.0, 1000), "int8": (1.02, 100), "ecq-1": (1.1, 10)}


def records(cells=CELLS, config="text", seeds=3):
    """Make runs whose losses differ by 1 % of the yardstick from seed to seed, beside raw runs that do not."""
    return [
        {
            "config": f"{config} {cell}",
            "seed": seed,
            "metric": 2 * loss,
            "loss": loss + (0.01 * (seed - 1) if cell != "raw" else 0.0),
            "train_loss": 3 * loss,
            "bytes": nbytes,
        }
        for cell, (loss, nbytes) in cells.items()
        for seed in range(seeds)
    ]


@pytest.fixture
def draw(tmp_path):
    def run(*contents):
        paths = [tmp_path / f"{index}.json" for index in range(len(contents))]
        for path, content in zip(paths, contents, strict=True):
            path.write_text(json.dumps(content))
        assert main(paths, tmp_path / "page.html") == 0
        return (tmp_path / "page.html").read_text()

    return run


def circles(text):
    return [tuple(map(float, found)) for found in re.findall(r'<circle class="c0" cx="([\d.]+)" cy="([\d.]+)"', text)]


def names(text):
    return re.findall(r'<text class="name"[^>]*>([^<]*)<', text)


def test_points_and_whiskers_lie_where_the_numbers_say(draw):
    text = draw(records())
    (few_x, few_y), (mid_x, mid_y), (raw_x, raw_y) = circles(text)
    assert raw_x - mid_x == pytest.approx(mid_x - few_x, abs=0.2)  # a factor of ten each
    assert (raw_y - few_y) / (raw_y - mid_y) == pytest.approx(5, rel=0.02)  # 10 % and 2 %
    whiskers = re.findall(r'class="whisker" d="M[\d.]+ ([\d.]+)V([\d.]+)', text)
    assert len(whiskers) == 2
    half = 4.303 / math.sqrt(3)
    for low, high in whiskers:
        assert (float(low) - float(high)) / (raw_y - mid_y) == pytest.approx(2 * half / 2, rel=0.02)
    band = [
        float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", re.search(r'class="band yardstick" d="([^"]*)', text)[1])
    ]
    assert (max(band) - min(band)) / (raw_y - mid_y) == pytest.approx(1, rel=0.02)


def test_the_table_tells_the_numbers(draw):
    text = draw(records())
    half = 4.303 / math.sqrt(3)
    assert f"<td>+2.00 ({2 - half:+.2f} … {2 + half:+.2f})</td>" in text
    row = re.search(r'<th scope="row">ecq-1</th>(.*?)</tr>', text)[1]
    assert re.findall("<td>([^<]*)", row)[:2] == ["2.2000", "1.1000"]
    assert re.findall("<td>([^<]*)", row)[3:] == ["+10.00 (+10.00 … +10.00)", "10 B", "100"]
    assert "<h1>Convergence: 0.json</h1>" in text
    assert 'role="img" aria-label="final loss against bytes' in text


def test_every_cell_is_named_once(draw):
    cells = {"raw": (1.0, 10**9)} | {f"codec-{i}": (1 + i / 500, 10**8 - i * 10**6) for i in range(12)}
    text = draw(records(cells))
    assert sorted(names(text)) == sorted(cells)
    assert "Too close" not in text


def test_a_picture_a_configuration_and_file(draw):
    text = draw(records() + records(config="image"), records())
    for title in ("text (0.json)", "image (0.json)", "text (1.json)"):
        assert f"<h2>Final loss against bytes: {title}</h2>" in text
    assert text.count('role="img"') == 3


def test_runs_that_diverged_are_told(draw):
    rows = records()
    for row in rows[6:]:
        row.update(dict.fromkeys(("loss", "train_loss", "metric", "bytes")))
    text = draw(rows)
    assert "ecq-1 (3 of 3 diverged)" in text
    assert "Without a point, for no run can be compared: ecq-1." in text
    assert len(circles(text)) == 2


def test_one_seed_has_no_interval(draw):
    text = draw(records(seeds=1))
    assert 'whisker"' not in text
    assert interval(*paired_percent([3.0], [2.0])) == "+50.00"


def test_names_are_escaped(draw):
    assert "<b>" not in draw(records({"raw": (1.0, 10), "<b>": (1.0, 9)}))


@pytest.mark.parametrize("most", [1, 3, 80, 5000, 1e9])
@pytest.mark.parametrize("least", [1, 0.4, 0.001])
def test_the_axis_of_bytes_holds_all(most, least):
    values = [1e9, 1e9 / most, 1e9 / least]
    axis = byte_axis(values, 1e9)
    assert 2 <= len(axis.ticks) <= TICKS + 1
    assert all(one < other for one, other in itertools.pairwise(axis.ticks))
    assert axis.ticks[0] <= min(values) * (1 + 1e-6)
    assert axis.ticks[-1] >= max(values) * (1 - 1e-6)


def test_sizes():
    assert [size(n) for n in (12, 999, 1000, 999_900, 1.17e9)] == ["12 B", "999 B", "1 kB", "1 MB", "1.17 GB"]


WRECKS = {
    "no cell": ([{"config": "text", "seed": 0}], "a record (number 1) without config and cell"),
    "no bytes": (
        [{key: value for key, value in records()[0].items() if key != "bytes"}],
        "a record (number 1) without",
    ),
    "codec behind": ([*records(), {"codec": "a", "source": "b"}], "a record (number 10) without"),
    "twice": (records() * 2, "text raw, seed 0 twice"),
}


@pytest.mark.parametrize("name", WRECKS)
def test_other_files_are_refused(name, tmp_path, capsys):
    content, told = WRECKS[name]
    path = tmp_path / "x.json"
    path.write_text(json.dumps(content))
    assert main([path], None) == 2
    error = capsys.readouterr().err
    assert f"{path}: expected a run folder or records of codecs or of convergence, got {told}" in error
    assert not path.with_suffix(".html").exists()
