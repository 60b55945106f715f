"""What the report tells of staleness and waiting, and that it does without."""

import math
import re

import pytest

from mpitrain.report.facts import fact_table
from mpitrain.report.page import page
from mpitrain.report.read import read_run, read_runs
from mpitrain.report.sections import MAX_RANKS, ring_bytes
from mpitrain.report.staleness import histogram, staleness
from tests.unit.test_report import check, report, row, summary, whole, write

SERVER = '[exchange]\nwhen = "server"\nmode = "ssp"\nstaleness = 4\nserver_codec = "int8"\ncodec = "int4"\n'
STALE = {"mean": 1.5, "max": 9}
HISTOGRAMS = [{"0": 6, "1": 2}, {"0": 4, "3": 2, "9": 2}]


def workers():
    numbers = {"pushed": 8, "rejected": 0, "wait_p95_s": 0.25}
    return [
        numbers | {"worker": 0, "applied": 8, "dropped": 0, "staleness": HISTOGRAMS[0], "staleness_max": 1},
        numbers | {"worker": 1, "applied": 7, "dropped": 1, "staleness": HISTOGRAMS[1], "staleness_mean": 3.0},
        {"worker": 2, "wait_p95_s": 3.5},
    ]


def served(folder, **changes):
    grid = {"dp": 2, "pp": 1, "tp": 1, "servers": 1}
    told = summary(ranks=3, grid=grid, workers=workers(), staleness=STALE) | changes
    rows = [row(step, staleness=step % 3) for step in range(1, 11)]
    return write(folder, rows, told=told, config=SERVER)


def section(text, title):
    return text.partition(f"<h2>{title}</h2>")[2].partition("</section>")[0]


def test_a_run_with_servers(tmp_path):
    run = read_run(served(tmp_path / "run"), "run")
    text = page([run])
    check(text)
    pushes = section(text, "Gradients on the servers")
    head = re.findall(r'<th scope="col">([^<]*)</th>', pushes)
    counts = ["gradients pushed", "applied", "dropped, too late", "rejected"]
    assert head == ["", *counts, "staleness, mean", "most", "wait of a step, 95 %"]
    lines = [re.findall(r"<t[hd][^>]*>([^<]*)</t[hd]>", line) for line in pushes.split("<tr>")[2:]]
    assert lines == [
        ["worker 0", "8", "8", "0", "0", "-", "1", "250 ms"],
        ["worker 1", "8", "7", "1", "0", "3.00", "-", "250 ms"],
        ["worker 2", "-", "-", "-", "-", "-", "-", "3.5 s"],
    ]
    bars = section(text, "Staleness of gradients")
    assert re.findall(r'rect class="a-(s\d)" x="[^"]*" y="([^"]*)"', bars) == [
        ("s0", "4"),
        ("s1", "4"),
        ("s0", "24"),
        ("s2", "24"),
        ("s4", "24"),
    ]
    widths = [float(width) for width in re.findall(r'y="[^"]*" width="([^"]*)" height="16"', bars)]
    assert widths == pytest.approx([490 * n / 8 for n in (6, 2, 4, 2, 2)], abs=0.1), "eight gradients are a whole bar"
    assert "0.25, ≤ 1" in bars
    assert "3.00, ≤ 9" in bars
    assert "over step" in section(text, "Staleness, mean over workers")
    assert text.index("Where the time went") < text.index("<h2>Gradients on") < text.index("<h2>Settings")


def test_facts_of_a_run_with_servers(tmp_path):
    runs = read_runs([served(tmp_path / "served"), whole(tmp_path / "run")])
    facts = fact_table(runs)
    assert facts["grid"] == ["dp 2, pp 1, tp 1, servers 1", "dp 2, pp 1, tp 1"]
    assert facts["exchanged"] == ["with servers, ssp of up to 4", "-"]
    assert facts["collective"] == ["-", "direct"]
    assert facts["weights travelled as"] == ["int8+delta", "-"]
    assert facts["staleness, mean and most"] == ["1.50, 9", "-"]
    # Two of three ranks train: the ring is theirs.
    assert ring_bytes(runs[0]) == ring_bytes(runs[1]) == 7_600_000 / 2 / 10
    local = write(tmp_path / "local", [row(1)], config='[exchange]\nwhen = "local"\nh = 30\n')
    sync = write(tmp_path / "sync", [row(1)], config='[exchange]\nwhen = "sync"\n')
    assert fact_table(read_runs([local, sync]))["exchanged"] == ["every 30 steps", "every step"]


def test_runs_that_do_not_tell_have_no_such_sections(tmp_path):
    run = read_run(whole(tmp_path / "run"), "run")
    assert run.missing == []
    assert staleness([run]) == []
    mixed = report(served(tmp_path / "served"), tmp_path / "run")
    assert "Gradients on the servers: served" in mixed
    assert "Gradients on the servers: run" not in mixed
    assert "staleness" not in report(tmp_path / "run").lower()


WRECKS = [
    7,
    {"worker": 0},
    [3, {}, {"worker": "x", "staleness": {"0": 1}}, {"worker": None}, {"worker": 1, "staleness": [1]}],
    [{"worker": 0, "staleness": {"a": 1, "-1": 2, "0": None, "1": math.nan, "2": -3, "²": 1, "9" * 5000: 1}}],
]


@pytest.mark.parametrize("wreck", WRECKS, ids=str)
def test_entries_that_make_no_sense_are_left_out(tmp_path, wreck):
    folder = served(tmp_path / "run", workers=wreck, staleness=wreck)
    assert histogram(read_run(folder, "run")) == {}
    assert "Staleness of gradients" not in report(folder)


def test_a_half_sound_histogram(tmp_path):
    told = [{"worker": 1, "staleness": {"2": 3, "x": 1}}, {"worker": 0, "staleness": {"1": 1}}, {"worker": 2}]
    assert histogram(read_run(served(tmp_path / "run", workers=told), "run")) == {1: {2: 3}, 0: {1: 1}}


def test_many_workers(tmp_path):
    """Those are shown that waited longest, and that were stalest."""
    told = [{"worker": n, "wait_p95_s": 64 - n, "pushed": 1, "staleness": {str(n): 1}} for n in range(64)]
    text = page([read_run(served(tmp_path / "run", workers=told), "run")])
    pushes, bars = section(text, "Gradients on the servers"), section(text, "Staleness of gradients")
    assert f"The {MAX_RANKS} of 64 workers that waited longest." in pushes
    assert "worker 23<" in pushes
    assert "worker 24<" not in pushes
    assert f"run: the {MAX_RANKS} of 64 workers that were stalest." in bars
    assert "worker 40<" in bars
    assert "worker 39<" not in bars
