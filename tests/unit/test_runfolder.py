"""The records of a run: who may write them, what a new start keeps of them, and what stands in them."""

import json
import math
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from mpitrain.cli.main import with_resume_value
from mpitrain.comm.fault import FaultHook
from mpitrain.comm.signals import StopRequest
from mpitrain.comm.supervising import supervise
from mpitrain.config.load import resolve
from mpitrain.config.schema import RunConfig, TrainConfig
from mpitrain.errors import ConfigError, ExitCode
from mpitrain.train.evaluate import Score
from mpitrain.train.runfolder import RunFolder
from mpitrain.train.stopping import Progress, StopWish

RESOLVED = resolve({}, "test", [])


def begin(folder, step=None, **options):
    return folder.begin(RESOLVED, overwrite=False, resumed_step=step, aside=None, ranks=2, **options)


def test_one_run_at_a_time(tmp_path):
    folder = RunFolder(tmp_path / "run")
    with folder.hold(), pytest.raises(ConfigError, match="another run is at work"):
        folder.hold()
    folder.hold().close()


def test_folders_below_each_other_are_made_at_once(tmp_path):
    """S08: tasks of an array that start together all find the folder above theirs, or make it."""
    tasks = 8
    for number in range(20):
        together = threading.Barrier(tasks)

        def make(task, number=number, together=together):
            together.wait()
            RunFolder(tmp_path / f"sweep-{number}" / "runs" / f"task-{task}").hold().close()

        with ThreadPoolExecutor(tasks) as pool:
            list(pool.map(make, range(tasks)))
        assert len(list((tmp_path / f"sweep-{number}" / "runs").iterdir())) == tasks


def test_starts_are_counted_also_after_a_torn_line(tmp_path):
    folder = RunFolder(tmp_path)
    with folder.hold():
        assert begin(folder) == 1
        with (tmp_path / "starts.jsonl").open("a") as file:
            file.write('{"start": 2, "st')
        assert begin(folder) == 3
    lines = (tmp_path / "starts.jsonl").read_text().splitlines()
    assert json.loads(lines[2])["start"] == 3


def test_rows_of_lost_steps_go_and_damaged_ones_too(tmp_path):
    folder = RunFolder(tmp_path)
    rows = b'{"step": 1}\n{"step": 2}\n{"step": 3, "l\xff"}\n{"step": 4}\n{"step": 5'
    (tmp_path / "metrics.jsonl").write_bytes(rows)
    with folder.hold():
        begin(folder, step=2)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'


def test_what_is_not_finite_becomes_null(tmp_path):
    folder = RunFolder(tmp_path)
    folder.append({"step": 1, "loss": math.nan, "grad_norm": math.inf})
    folder.finish({"metric": {"name": "rmse", "value": math.nan}, "per_rank": [{"wait_s": -math.inf}]})
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "loss": None, "grad_norm": None}
    assert folder.summary() == {"metric": {"name": "rmse", "value": None}, "per_rank": [{"wait_s": None}]}


@pytest.mark.parametrize(
    ("steps", "summary", "every", "lost"),
    [(0, False, 2, False), (2, False, 2, False), (3, False, 2, True), (3, False, 0, False), (1, True, 0, True)],
)
def test_a_run_whose_checkpoints_are_gone_is_not_begun_anew(tmp_path, steps, summary, every, lost):
    folder = RunFolder(tmp_path)
    for step in range(1, steps + 1):
        folder.append({"step": step})
    if summary:
        folder.finish({})
    if lost:
        with pytest.raises(ConfigError, match=f"records of {steps} steps, but no checkpoint"):
            folder.check_not_lost(every)
    else:
        folder.check_not_lost(every)


@pytest.mark.parametrize(
    ("losses", "ended"),
    [
        ([3.0, 2.0, 1.0], [None, None, None]),
        ([1.0, 1.0, 2.0], [None, None, "patience"]),
        ([math.nan, 2.0, 1.5], [None, None, None]),
        ([math.nan, math.inf], [None, "patience"]),
        ([2.0, 3.0, 1.0, 1.5], [None, None, None, None]),
    ],
)
def test_patience(losses, ended):
    progress, config = Progress(), TrainConfig(patience=2)
    assert [progress.ended_by(Score(loss, 0.5, "accuracy"), config) for loss in losses] == ended


@pytest.mark.parametrize(
    ("words", "spelled"),
    [
        ([], []),
        (["train", "a", "--resume"], ["train", "a", "--resume=newest"]),
        (["train", "--resume", "a"], ["train", "--resume=newest", "a"]),
        (["train", "--resume", "100", "a"], ["train", "--resume", "100", "a"]),
        (["train", "--resume", "auto", "a"], ["train", "--resume", "auto", "a"]),
        (["train", "--resume", "--overwrite"], ["train", "--resume=newest", "--overwrite"]),
        (["train", "--resume=7"], ["train", "--resume=7"]),
    ],
)
def test_resume_without_a_value_means_the_newest(words, spelled):
    assert with_resume_value(words) == spelled


@pytest.mark.parametrize(
    ("metric", "name", "target", "reached"),
    [
        (0.8, "accuracy", 0.8, True),
        (0.7, "accuracy", 0.8, False),
        (0.8, "rmse", 0.8, True),
        (0.9, "bits_per_char", 0.8, False),
    ],
)
def test_target(metric, name, target, reached):
    ended = Progress().ended_by(Score(1.0, metric, name), TrainConfig(target=target))
    assert ended == ("target" if reached else None)


def test_the_reserve_before_a_time_limit(monkeypatch):
    """S11: the margin, or twice the longest save and step so far, the first one included."""
    now = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    wish = StopWish(StopRequest(), FaultHook("", 0), RunConfig(time_limit_s=100, time_margin_s=10))
    now[0] = 189.0
    assert wish.reason(1) == ""
    now[0] = 191.0
    assert wish.reason(1) == "run.time_limit_s = 100"
    now[0] = 169.0
    wish.took(turn_s=12.0, save_s=3.0)
    wish.took(turn_s=1.0, save_s=1.0)
    assert wish.reason(2) == ""
    now[0] = 171.0
    assert wish.reason(2) == "run.time_limit_s = 100"


def test_launch_that_is_stopped_while_it_loads_starts_nothing(tmp_path, capsys):
    stop = StopRequest()
    stop.note(signal.SIGTERM)
    assert supervise(["touch", str(tmp_path / "started")], stop) == ExitCode.STOPPED
    assert not (tmp_path / "started").exists()
    assert "stopped before the first step" in capsys.readouterr().err
