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
STALE = {"mean": 1.5, "max": 9, "histogram": {"0": {"0": 6, "1": 2}, "1": {"0": 4, "3": 2, "9": 2}}}


def per_rank():
    times = {"host": "bs", "compute_s": 6.0, "encode_s": 1.0, "decode_s": 1.0, "wait_s": 2.0, "wait_p95_s": 0.25}
    workers = [times | {"rank": rank, "pushed": 8, "applied": 8 - rank, "dropped": rank} for rank in (0, 1)]
    return [*workers, {"rank": 2, "host": "hub", "wait_s": 3.5}]


def served(folder, **changes):
    grid = {"dp": 2, "pp": 1, "tp": 1, "servers": 1}
    told = summary(ranks=3, grid=grid, per_rank=per_rank(), staleness=STALE) | changes
    rows = [row(step, staleness=step % 3) for step in range(1, 11)]
    return write(folder, rows, told=told, config=SERVER)


def section(text, title):
    return text.partition(f"<h2>{title}</h2>")[2].partition("</section>")[0]


def test_a_run_with_servers(tmp_path):
    run = read_run(served(tmp_path / "run"), "run")
    text = page([run])
    check(text)
    waiting = section(text, "Waiting")
    head = re.findall(r'<th scope="col">([^<]*)</th>', waiting)
    assert head == ["", "waited", "wait of a step, 95 %", "gradients pushed", "applied", "dropped"]
    lines = [re.findall(r"<t[hd][^>]*>([^<]*)</t[hd]>", line) for line in waiting.split("<tr>")[2:]]
    assert lines == [
        ["rank 0 bs", "2 s", "250 ms", "8", "8", "0"],
        ["rank 1 bs", "2 s", "250 ms", "8", "7", "1"],
        ["rank 2 hub", "3.5 s", "-", "-", "-", "-"],
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
    assert "over step" in section(text, "Staleness")
    assert text.index("Where the time went") < text.index("<h2>Waiting") < text.index("<h2>Settings")


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
    assert "Waiting: served" in mixed
    assert "Waiting: run" not in mixed
    assert "staleness" not in report(tmp_path / "run").lower()


WRECKS = [
    7,
    [],
    {"mean": "x", "max": None, "histogram": 3},
    {"histogram": {"0": 7, "x": {"0": 1}, "1": {"a": 1, "-1": 2, "0": None, "1": math.nan, "2": -3}}},
    {"histogram": {"0": {"9" * 5000: 1}, "9" * 5000: {"0": 1}, "²": {"0": 1}}},
]


@pytest.mark.parametrize("wreck", WRECKS, ids=str)
def test_entries_that_make_no_sense_are_left_out(tmp_path, wreck):
    ranks = [{"rank": 0, "pushed": "many"}, {"rank": None, "pushed": 3}, {"rank": 1, "dropped": 2, "host": "<b>"}]
    folder = served(tmp_path / "run", staleness=wreck, per_rank=ranks)
    assert histogram(read_run(folder, "run")) == {}
    text = report(folder)
    assert "Staleness of gradients" not in text
    assert "rank 1 <b>" in text


def test_a_half_sound_histogram(tmp_path):
    folder = served(tmp_path / "run", staleness={"histogram": {"1": {"2": 3, "x": 1}, "0": {"1": 1}, "2": {}}})
    assert histogram(read_run(folder, "run")) == {0: {1: 1}, 1: {2: 3}}


def test_many_ranks_and_workers(tmp_path):
    """Those are shown that waited longest, and that were stalest."""
    ranks = [{"rank": rank, "wait_s": rank, "pushed": 1} for rank in range(64)]
    stale = {"histogram": {str(worker): {str(worker): 1} for worker in range(64)}}
    text = report(served(tmp_path / "run", per_rank=ranks, staleness=stale))
    assert f"The {MAX_RANKS} of 64 ranks that waited longest." in text
    assert f"run: the {MAX_RANKS} of 64 workers that were stalest." in text
    assert "worker 40" in text
    assert "worker 39" not in text
