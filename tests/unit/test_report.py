"""The report: what is drawn is what was measured, and what is missing is said."""

import html.parser
import json
import math
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpitrain.errors import ConfigError, ExitCode
from mpitrain.report.axis import linear_ticks, make_axis
from mpitrain.report.chart import Line, line_chart
from mpitrain.report.command import main
from mpitrain.report.facts import differences, fact_table, terminal_table
from mpitrain.report.page import page
from mpitrain.report.read import read_run, read_runs
from mpitrain.report.series import MAX_POINTS, buckets, bytes_text, running_sum, seconds_text, thinned

NAN = math.nan
CONFIG = '[train]\nsteps = {steps}  # --set\n[exchange]\ncodec = "{codec}"  # my.toml\n[run]\nfolder = "{folder}"\n'


def row(step, **changes):
    values = {"step": step, "time_s": 1.8e9 + step, "loss": 2 / step, "accuracy": 0.5, "sent_bytes": 1000, "skipped": 0}
    seconds = {"compute_s": 3.0, "encode_s": 0.5, "decode_s": 0.25, "wait_s": 0.25}
    return values | seconds | changes


def summary(ranks=2, steps=10, **changes):
    per_rank = [
        {"rank": rank, "host": f"bs{rank}", "compute_s": 6.0, "encode_s": 1.0, "decode_s": 1.0, "wait_s": 2.0}
        for rank in range(ranks)
    ]
    values = {
        "metric": {"name": "test_accuracy", "value": 0.875},
        "loss": 0.25,
        "steps": steps,
        "wall_s": 83.0,
        "ranks": ranks,
        "grid": {"dp": ranks, "pp": 1, "tp": 1},
        "collective": "direct",
        "codec": "int8",
        "memory": "residual",
        "sent_bytes_total": 2_000_000,
        "fp32_ring_bytes_total": 7_600_000,
        "ratio": 3.8,
        "num_parameters": 1234,
        "replicas_identical": True,
        "samples_per_s": 1500.0,
        "stopped": None,
        "per_rank": per_rank,
    }
    return values | changes


EVENTS = [["forward", 0.0, 0.01], ["backward", 0.01, 0.03], ["encode", 0.015, 0.016], ["brew", 0.03, 0.04]]
TIMELINE = {"step": 7, "ranks": [{"rank": 0, "host": "bs0", "events": EVENTS}]}


def write(folder, rows=None, *, told=None, config=None, timeline=None):
    """Write a run folder; what is None is left out."""
    folder.mkdir(parents=True)
    if rows is not None:
        (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    for name, content in (("summary.json", told), ("timeline.json", timeline)):
        if content is not None:
            (folder / name).write_text(json.dumps(content))
    if config is not None:
        (folder / "config.toml").write_text(config)
    return folder


def whole(folder, codec="int8", steps=10, **changes):
    rows = [row(step) for step in range(1, steps + 1)]
    rows[-1] |= {"test_loss": 0.25, "test_accuracy": 0.875}
    told, config = summary(steps=steps, codec=codec, **changes), CONFIG.format(steps=steps, codec=codec, folder=folder)
    return write(folder, rows, told=told, config=config, timeline=TIMELINE)


class Balance(html.parser.HTMLParser):
    """Fails on a tag that is closed by another, and collects what is seen."""

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.text = [], set(), ""

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.add(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def check(text):
    """Return the visible text of a page after checking that it is well-formed and asks for nothing."""
    parser = Balance()
    parser.feed(text)
    parser.close()
    assert not parser.open
    assert not parser.tags & {"script", "link", "img", "iframe", "object", "base"}
    assert not re.search(r"(src|href)=|@import|url\(|https?:", text)
    pictures = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    for picture in pictures:
        for element in ET.fromstring(picture).iter():
            for name in ("d", "x", "y", "cx", "cy", "width"):
                assert not re.search("nan|inf", element.get(name, "")), ET.tostring(element)
    return parser.text


def report(*folders):
    return check(page(read_runs(list(folders))))


def test_a_whole_run(tmp_path):
    text = report(whole(tmp_path / "run"))
    for words in ("Training loss", "Test accuracy", "Test loss", "float32 ring", "Timeline of step 7", "rank 1 bs1"):
        assert words in text
    for words in ("int8+residual", "3.8x fewer", "2.0 MB (2,000,000)", "7.6 MB", "1,500", "1:23 min", "0.8750"):
        assert words in text
    assert "yes, bit for bit" in text
    assert "dp 2, pp 1, tp 1" in text
    assert "What is missing" not in text
    assert 'codec = "int8"  # my.toml' in text, "the settings with their sources"


def test_charts_show_the_numbers_of_the_files(tmp_path):
    """The last dot of the metric lies where its tick would; the bytes end at their sum."""
    text = page(read_runs([whole(tmp_path / "run", fp32_ring_bytes_total=76_000)]))
    assert "run: 0.875 at 10<" in text
    kilobytes = next(part for part in text.split("<svg") if "kB sent by rank 0 over step" in part)
    axis = make_axis([0, 10, 38], 256, 12, zero=True)
    assert f"704.0 {axis.place(10.0):.1f}" in kilobytes, "ten steps of 1,000 bytes"
    assert f"704.0 {axis.place(38.0):.1f}" in kilobytes, "a rank's share of the ring"


def test_several_runs_share_charts_and_a_legend(tmp_path):
    runs = [whole(tmp_path / "int8"), whole(tmp_path / "raw", codec="raw", memory="none", ratio=1.001)]
    text = page(read_runs(runs))
    told = check(text)
    assert told.count("Training loss over bytes of gradients") == 1
    assert text.count('class="line c0 d0"') == text.count('class="line c1 d1"')
    assert differences(read_runs(runs)) == {"exchange.codec": ['"int8"', '"raw"']}
    assert fact_table(read_runs(runs))["bytes vs float32 ring"] == ["3.8x fewer", "as many"]


def test_runs_with_other_metrics_get_charts_of_their_own(tmp_path):
    other = write(tmp_path / "other", [row(1, rmse=3.0, test_rmse=2.0)], told=summary(metric={"name": "test_rmse"}))
    told = report(whole(tmp_path / "run"), other)
    assert "Training loss (runs measured by accuracy)" in told
    assert "Training loss (runs measured by rmse)" in told
    assert "Test rmse (runs measured by rmse)" in told
    assert fact_table(read_runs([tmp_path / "run", other]))["test accuracy"] == ["0.8750", "-"]


def missing(folder):
    return " | ".join(read_run(folder, "run").missing)


def test_a_crashed_run_says_what_is_missing(tmp_path):
    folder = write(tmp_path / "run", [row(1), row(2)], config=CONFIG.format(steps=9, codec="int8", folder="x"))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')
    told = missing(folder)
    for words in ("1 damaged or half-written", "summary.json: missing", "only rank 0's", "timeline.json: missing"):
        assert words in told
    assert told.replace(" | ", "run: ") in report(folder).replace("What is missingrun: ", "")
    run = read_run(folder, "run")
    assert [time.seconds for time in run.times] == [{"compute": 6.0, "encode": 1.0, "decode": 0.5, "wait": 0.5}]
    assert fact_table([run])["steps"] == ["2 of 9"]
    assert terminal_table([run]).endswith("unfinished")


WRECKS = {
    "nothing but a summary": ("metrics.jsonl", None, "metrics.jsonl: missing"),
    "empty metrics": ("metrics.jsonl", b"", "metrics.jsonl: holds no step"),
    "metrics of other kinds": ("metrics.jsonl", b'[]\n7\nnull\n{"step": "x"}\n\xff\xfe\n', "5 damaged"),
    "no summary": ("summary.json", b"{", "summary.json: damaged"),
    "a summary that is a list": ("summary.json", b"[1]", "summary.json: damaged"),
    "a summary of other kinds": (
        "summary.json",
        b'{"metric": 3, "grid": [1], "per_rank": {"rank": 0}, "ratio": "x", "codec": 8, "ranks": null, "steps": []}',
        "no per_rank",
    ),
    "numbers beyond all bounds": (
        "summary.json",
        b'{"loss": NaN, "wall_s": Infinity, "ranks": 1e999, "steps": 1' + 400 * b"0" + b', "per_rank": [{}, 3]}',
        "no per_rank",
    ),
    "no settings": ("config.toml", None, "config.toml: missing"),
    "broken settings": ("config.toml", b"a = = 1", "config.toml: damaged"),
    "no timeline": ("timeline.json", None, "timeline.json: missing"),
    "a timeline of other kinds": (
        "timeline.json",
        b'{"ranks": [{"rank": 0, "events": [["a", 2, 1], ["b", NaN, 1], 7, ["c", 0]]}, {"rank": 1, "events": 3}]}',
        "4 events",
    ),
}


@pytest.mark.parametrize("name", WRECKS)
def test_a_wreck_is_told_and_drawn(tmp_path, name):
    file, content, words = WRECKS[name]
    folder = whole(tmp_path / "run")
    (folder / file).unlink()
    if content is not None:
        (folder / file).write_bytes(content)
    assert words in missing(folder)
    assert words in report(folder)
    assert terminal_table(read_runs([folder]))


def test_values_that_are_not_finite(tmp_path):
    rows = [row(1, loss=NAN, grad_norm=None), row(2, loss=None), row(3, loss=math.inf), row(4), row(5, sent_bytes=NAN)]
    told = report(write(tmp_path / "run", rows, told=summary(loss=NAN)))
    assert "run: 3 steps without a finite loss are left out." in told
    nothing = report(write(tmp_path / "none", rows[:3], told=summary(steps=3)))
    assert nothing.count("No step with a finite loss.") == 2


def test_one_step_and_one_rank(tmp_path):
    told = summary(ranks=1, steps=1, sent_bytes_total=0, fp32_ring_bytes_total=0, ratio=None)
    folder = write(tmp_path / "run", [row(1, sent_bytes=0)], told=told)
    text = report(folder)
    assert "Left out, for nothing was sent: run." in text
    assert "Nothing was sent." in text
    assert fact_table(read_runs([folder]))["bytes vs float32 ring"] == ["-"]


def test_native_has_no_ratio(tmp_path):
    told = report(whole(tmp_path / "run", codec="raw", memory="none", collective="native", ratio=None))
    assert "What MPI's own sum sends is not known; drawn is what it was given: run." in told
    assert "raw float32" in told


def test_a_split_model(tmp_path):
    """What stays within replicas, and as what bytes; of a run under way, what its settings tell."""
    settings = '[parallel]\ndp = 2\npp = 2\ntp = 3\ncodec = "int4"\nmemory = "delta"\ngradient_codec = "int8"\n'
    grid, config = {"dp": 2, "pp": 2, "tp": 3}, settings + 'tensor_codec = "raw"\n'
    told = summary(ranks=12, grid=grid, replica_bytes_total=500_000)
    done = write(tmp_path / "done", [row(1)], told=told, config=config)
    under_way = write(tmp_path / "under-way", [row(1)], config=config)
    facts = fact_table(read_runs([done, under_way, whole(tmp_path / "whole")]))
    assert facts["ranks"] == ["12", "12", "2"]
    assert facts["grid"] == ["dp 2, pp 2, tp 3", "dp 2, pp 2, tp 3", "dp 2, pp 1, tp 1"]
    assert facts["of these within replicas"] == ["500.0 kB (500,000)", "-", "-"]
    assert facts["activations travelled as"] == ["int4+delta", "int4+delta", "-"]
    assert facts["their gradients as"] == ["int8", "int8", "-"]
    assert facts["sums of layers travelled as"] == ["raw float32", "raw float32", "-"]
    assert "of these within replicas" not in fact_table(read_runs([tmp_path / "whole"]))


def test_a_step_that_was_taken_again_counts_once(tmp_path):
    rows = [row(1), row(2), row(3, loss=9.0), row(2), row(3, loss=0.5)]
    run = read_run(write(tmp_path / "run", rows), "run")
    assert run.column("step") == [1, 2, 3]
    assert run.column("loss")[-1] == 0.5
    assert "2 rows are left out" in " ".join(run.missing)


def test_text_is_escaped(tmp_path):
    hostile = '<b onload="x">&\'"</b>'
    folder = whole(tmp_path / "run", collective=hostile, per_rank=[{"rank": 0, "host": "<i>"}])
    (folder / "timeline.json").write_text(json.dumps({"ranks": [{"rank": 0, "events": [[hostile, 0, 1]]}]}))
    (folder / "config.toml").write_text(f"[data]\npath = '''{hostile}'''\n")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row(11) | {f"test_{hostile}": 1.0, "test_\ud800": 1.0}) + "\n")
    named = folder.rename(tmp_path / '<u>&"\n\x1b[1mrun')
    text = page(read_runs([named]))
    told = check(text)
    assert not re.search("<[biu][ >]", text)
    assert hostile in told
    assert '<u>&"??[1mrun' in told
    assert "\x1b" not in text + terminal_table(read_runs([named]))


def test_names_that_are_no_text(tmp_path, capsys):
    folder = whole(tmp_path / "run").rename(tmp_path / "r\udcffn")
    assert main([folder], None) == 0
    assert "r?n" in check((folder / "report.html").read_text(encoding="utf-8"))
    assert "r?n" in capsys.readouterr().out


def test_many_ranks(tmp_path):
    """Those that others wait for are shown, and it is said how many are not."""
    per_rank = [{"rank": rank, "host": "a-very-long-host-name", "compute_s": 5.0, "wait_s": rank} for rank in range(64)]
    told = report(whole(tmp_path / "run", per_rank=per_rank))
    assert "run: the 24 of 64 ranks that waited least." in told
    assert "rank 23 a-very-long…" in told
    assert "rank 24" not in told


def test_a_table_for_the_terminal(tmp_path):
    runs = [whole(tmp_path / "quickstart"), whole(tmp_path / "quickstart-raw", codec="raw", memory="none", ratio=1.0)]
    assert terminal_table(read_runs(runs)).splitlines() == [
        "run             travelled as   test accuracy  bytes sent  vs float32      time",
        "quickstart      int8+residual         0.8750      2.0 MB  3.8x fewer  1:23 min",
        "quickstart-raw  raw float32           0.8750      2.0 MB     as many  1:23 min",
    ]


def test_the_table_fits_80_columns(tmp_path):
    per_char = {"metric": {"name": "test_bits_per_char", "value": 1.2345}, "wall_s": 360_000.0, "ratio": 0.1}
    long = whole(tmp_path / ("a-name-" * 10 + "end"), sent_bytes_total=999_900_000_000, **per_char)
    lines = terminal_table(read_runs([long, whole(tmp_path / "run")])).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[1].split()[0].endswith("end")
    assert "10.0x more" in lines[1]


@pytest.mark.parametrize("make", [lambda path: None, Path.mkdir])
def test_a_folder_without_a_run_is_refused(tmp_path, capsys, make):
    make(tmp_path / "run")
    assert main([tmp_path / "run"], None) == ExitCode.CONFIG
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"{tmp_path}/run holds no run: neither metrics.jsonl nor summary.json; give the run.folder" in error


def test_refusals(tmp_path, capsys):
    run = whole(tmp_path / "run")
    with pytest.raises(ConfigError, match="given twice"):
        read_runs([run, tmp_path / "." / "run"])
    (tmp_path / "file").touch()
    assert main([run], tmp_path / "file" / "report.html") == ExitCode.CONFIG
    assert "name another file with --output" in capsys.readouterr().err


def test_equal_last_parts_are_told_apart(tmp_path):
    runs = read_runs([whole(tmp_path / "a" / "run"), whole(tmp_path / "b" / "run")])
    assert [run.name for run in runs] == [f"{tmp_path}/a/run", f"{tmp_path}/b/run"]


def test_needs_neither_mpi_nor_numba(tmp_path):
    """Looked at where nothing else is installed; the file is named, and lies where it was wished."""
    folder = whole(tmp_path / "run")
    code = (
        "import sys\nfor name in ('mpi4py', 'numba', 'h5py', 'numpy'): sys.modules[name] = None\n"
        "from mpitrain.cli.main import run\nrun()"
    )
    command = [sys.executable, "-c", code, "report", str(folder), "--output", str(tmp_path / "new" / "out.html")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(f"report: {tmp_path}/new/out.html\n")
    check((tmp_path / "new" / "out.html").read_text(encoding="utf-8"))
    assert not (folder / "report.html").exists()


def test_ten_long_runs_make_a_small_page(tmp_path):
    """No longer than what can be seen: three times the steps cost no more."""
    short, long = (read_run(whole(tmp_path / f"{steps}", steps=steps), "run") for steps in (800, 2400))
    few, many = (len(page([replace(run, name=f"run {number}") for number in range(10)])) for run in (short, long))
    assert many < 1.1 * few < 3e5


numbers = st.floats(-1e6, 1e6) | st.floats(-1e-6, 1e-6) | st.floats(-1e299, 1e299)


@given(st.lists(numbers | st.just(NAN), min_size=1, max_size=500))
def test_buckets_keep_extremes(values):
    found = buckets([float(number) for number in range(len(values))], values)
    finite = [value for value in values if not math.isnan(value)]
    assert len(found) <= MAX_POINTS
    if finite:
        assert min(point.low for point in found if not math.isnan(point.low)) == min(finite)
        assert max(point.high for point in found if not math.isnan(point.high)) == max(finite)


def test_buckets_and_sums():
    assert [point.mean for point in buckets([1, 2, 3], [1.0, NAN, 3.0])][::2] == [1.0, 3.0]
    size = 2 * MAX_POINTS
    found = buckets(list(range(size)), [float(number) for number in range(size)])
    assert [(point.x, point.mean, point.low, point.high) for point in found[:2]] == [(0.5, 0.5, 0, 1), (2.5, 2.5, 2, 3)]
    falling = buckets(list(range(size)), [float(-number) for number in range(size)])
    assert [(point.low, point.high) for point in falling[:2]] == [(-1, 0), (-3, -2)]
    points = [(float(number), 0.0) for number in range(size + 1)]
    assert thinned(points) == points[1::3], "the last one among them"
    assert running_sum([1.0, NAN, 2.0]) == [1.0, 1.0, 3.0]


@given(numbers, numbers)
def test_ticks_are_round_and_cover(a, b):
    low, high = min(a, b), max(a, b)
    ticks = linear_ticks(low, high)
    step = ticks[1] - ticks[0]
    assert 2 <= len(ticks) <= 12
    assert ticks[0] <= low + 1e-6 * step
    assert ticks[-1] >= high - 1e-6 * step
    mantissa = float(f"{step:e}".partition("e")[0])
    assert round(mantissa, 3) in (1, 2, 5, 10)


def test_a_missing_number_interrupts_line_and_shade():
    points = [(1.0, 1.0), (2.0, 2.0), (3.0, NAN), (4.0, 1.0), (5.0, 1.0), (6.0, NAN), (7.0, 3.0)]
    picture = line_chart([Line("a", 0, points, [(x, y - 0.5, y + 0.5) for x, y in points])], "step", "y")
    for css in ("line", "band"):
        assert re.search(f'class="{css} c0 d0" d="([^"]+)"', picture)[1].count("M") == 3
    assert picture.count("<circle") == 1, "the point that stands alone"


@given(st.lists(numbers, min_size=1, max_size=20), st.booleans())
def test_every_value_lies_inside_its_chart(values, positive):
    values = [abs(value) for value in values] if positive else values
    picture = line_chart([Line("a", 0, list(enumerate(values)), dots=True)], "step", "y")
    places = [float(place) for place in re.findall(r'cy="([^"]+)"', picture)]
    assert len(places) == len(values)
    assert all(11.9 <= place <= 256.1 for place in places)


def test_axes_and_units():
    assert make_axis([0.002, 3.0], 0, 1, log=True).labels() == ["0.001", "0.01", "0.1", "1", "10"]
    assert make_axis([0.0, 3.0], 0, 1, log=True).labels() == ["0", "1", "2", "3"]
    assert make_axis([1.0], 0, 1, zero=True, least=1.0).labels() == ["0", "1"]
    assert make_axis([2000.0, 0.0], 0, 1).labels() == ["0", "500", "1,000", "1,500", "2,000"]
    assert [bytes_text(value) for value in (0, 999, 1e3, 2.5e6, 3e9)] == ["0 B", "999 B", "1.0 kB", "2.5 MB", "3.0 GB"]
    assert [seconds_text(value) for value in (0, 0.0123, 9.87, 60, 3725)] == [
        "0 s",
        "12.3 ms",
        "9.87 s",
        "1:00 min",
        "1:02:05",
    ]
