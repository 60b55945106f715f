"""Bad input: one message that says where, expected, got and the remedy; its exit code; nothing written."""

import shutil

import numpy as np
import pytest

from mpitrain.errors import ExitCode
from tests.system.helpers import as_anyone, drive, execute, messages, rows, snapshot, write_config

BROKEN_TOML = "[train\nsteps = 1\n"
WINDOWS = ["data.kind=windows", "data.window=4", "data.y=label", "data.group=trace", "data.test_groups=[3]"]


def sets(*overrides):
    return [part for item in overrides for part in ("--set", item)]


def windows(path, *overrides):
    return sets(*WINDOWS, f"data.path={path}", *overrides)


def characters(path):
    return sets("data.kind=text", "model.kind=transformer", "model.task=lm", f"data.path={path}")


CASES = {
    "misspelt key": (sets("optim.learing_rate=1"), ExitCode.CONFIG, ["optim.learing_rate", "optim.lr"]),
    "key of another section": (sets("train.lr=1"), ExitCode.CONFIG, ["train.lr", "optim.lr"]),
    "hyphen": (sets("train.num-epochs=3"), ExitCode.CONFIG, ["num-epochs", "train.steps"]),
    "unknown section": (sets("trian.steps=3"), ExitCode.CONFIG, ["trian", "train"]),
    "no section": (["--set", "lr=1"], ExitCode.CONFIG, ["section.key=value", "'lr=1'"]),
    "text for a number": (sets("optim.lr=abc"), ExitCode.CONFIG, ["optim.lr", "'abc'", "float"]),
    "number for a list": (sets("model.hidden=3"), ExitCode.CONFIG, ["model.hidden", "got 3"]),
    "list for a number": (sets("train.steps=[1]"), ExitCode.CONFIG, ["train.steps", "[1]"]),
    "fraction of a step": (sets("train.steps=1.5"), ExitCode.CONFIG, ["train.steps", "1.5"]),
    "zero steps": (sets("train.steps=0"), ExitCode.CONFIG, ["train.steps", "1", "got 0"]),
    "no samples": (sets("data.samples=0"), ExitCode.CONFIG, ["data.samples", "1", "got 0"]),
    "negative batch": (sets("train.batch_size=-4"), ExitCode.CONFIG, ["train.batch_size", "got -4"]),
    "zero width": (sets("model.hidden=[8, 0]"), ExitCode.CONFIG, ["model.hidden", "0"]),
    "negative rate": (sets("optim.lr=-1e-3"), ExitCode.CONFIG, ["optim.lr", "-0.001"]),
    "infinite rate": (sets("optim.lr=inf"), ExitCode.CONFIG, ["optim.lr", "inf"]),
    "NaN rate": (sets("optim.lr=nan"), ExitCode.CONFIG, ["optim.lr", "nan"]),
    "unknown word": (sets("exchange.codec=int9"), ExitCode.CONFIG, ["exchange.codec", "'int9'; did you mean int8?"]),
    "parallel HDF5": (sets("checkpoint.driver=mpio"), ExitCode.CONFIG, ["checkpoint.driver", "no parallel HDF5"]),
    "digits without end": (sets("train.steps=" + "1" * 5000), ExitCode.CONFIG, ["train.steps", "too many digits"]),
    "brackets without end": (sets("train.steps=" + "[" * 5000), ExitCode.CONFIG, ["train.steps", "nested too deeply"]),
    "no UTF-8": (sets("data.path=a\udcff"), ExitCode.CONFIG, ["data.path", "expected UTF-8", "udcff"]),
    "native with int8": (sets("exchange.collective=native"), ExitCode.CONFIG, ["native", '"raw"', "int8"]),
    "memory with raw": (
        sets("exchange.codec=raw", "exchange.memory=delta"),
        ExitCode.CONFIG,
        ["exchange.memory", "delta", "raw"],
    ),
    "rounding of fp16": (
        sets("exchange.codec=fp16", "exchange.rounding=stochastic"),
        ExitCode.CONFIG,
        ["exchange.rounding", "int8"],
    ),
    "heads": (
        sets("model.kind=transformer", "model.d_model=8", "model.heads=3"),
        ExitCode.CONFIG,
        ["model.heads = 3", "model.d_model = 8", "[1, 2, 4, 8]"],
    ),
    "heads over ranks": (  # T11
        sets("model.kind=transformer", "model.d_model=12", "model.heads=6", "parallel.tp=4"),
        ExitCode.CONFIG,
        ["model.heads = 6", "parallel.tp = 4", "set parallel.tp = 1, 2, 3 or 6"],
    ),
    "no token data": (sets("model.task=lm"), ExitCode.CONFIG, ["lm", "stations"]),
    "mlp of tokens": (sets("model.task=lm", "data.kind=text", "model.kind=mlp"), ExitCode.CONFIG, ["mlp", "lm"]),
    "no path": (sets("data.kind=windows"), ExitCode.CONFIG, ["data.path"]),
    "too many ranks wanted": (sets("parallel.dp=7"), ExitCode.CONFIG, ["parallel", "7", "start 7 ranks"]),
    "missing config": (None, ExitCode.CONFIG, ["missing.toml", "No such file"]),
    "broken config": (None, ExitCode.CONFIG, ["broken.toml", "not TOML", "line"]),
    "key before all sections": (None, ExitCode.CONFIG, ["'lr'", "flat.toml", "did you mean optim.lr?"]),
    "missing data": (windows("nowhere.npz"), ExitCode.DATA, ["nowhere.npz"]),
    "not an archive": (windows("noise.npz"), ExitCode.DATA, ["noise.npz"]),
    "NaN in data": (windows("nan.npz"), ExitCode.DATA, ["nan.npz", "17", "nan"]),
    "missing array": (windows("good.npz", "data.y=target"), ExitCode.DATA, ["good.npz", "target", "label"]),
    "unequal lengths": (windows("short.npz"), ExitCode.DATA, ["short.npz", "59", "60"]),
    "unknown test group": (windows("good.npz", "data.test_groups=[9]"), ExitCode.DATA, ["good.npz", "9"]),
    "window too long": (windows("good.npz", "data.window=40"), ExitCode.DATA, ["good.npz", "40", "15"]),
    "text that is not UTF-8": (characters("latin1.txt"), ExitCode.DATA, ["latin1.txt", "byte 3", "0xe9", "UTF-8"]),
    "text too short": (characters("short.txt"), ExitCode.DATA, ["short.txt", "6 sections", "data.stations"]),
    "folder below a file": (sets("run.folder=broken.toml/run"), ExitCode.CONFIG, ["run.folder", "broken.toml/run"]),
    "nothing to resume": (["--resume"], ExitCode.CHECKPOINT, ["no complete step", "--resume"]),
}
CONFIGS = {"missing config": "missing.toml", "broken config": "broken.toml", "key before all sections": "flat.toml"}


def write_data(folder):
    """Four traces of fifteen rows, and what may be wrong with such a file."""
    rng = np.random.default_rng(0)
    x, label, trace = rng.standard_normal((60, 3)).astype(np.float32), np.arange(60) % 2, np.arange(60) // 15
    np.savez(folder / "good.npz", x=x, label=label, trace=trace)
    np.savez(folder / "short.npz", x=x, label=label[:-1], trace=trace)
    x[17, 1] = np.nan
    np.savez(folder / "nan.npz", x=x, label=label, trace=trace)
    (folder / "latin1.txt").write_bytes("café ".encode("latin-1") * 100)
    (folder / "short.txt").write_text("too short\n")
    (folder / "noise.npz").write_bytes(b"no archive at all" * 10)
    (folder / "broken.toml").write_text(BROKEN_TOML)
    (folder / "flat.toml").write_text("lr = 1e-3\n")


def arguments(config, name, options):
    return ["train", CONFIGS.get(name, str(config)), *(options or [])]


@pytest.fixture(scope="module", params=[1, 3])
def refusals(request, tmp_path_factory):
    """What every rank said to every case, and what the case left on the disk."""
    folder = tmp_path_factory.mktemp(f"bad{request.param}")
    config, _ = write_config(folder)
    write_data(folder)
    before = snapshot(folder)
    runs = [folder / f"run{number}" for number in range(len(CASES))]
    lines = [
        [*arguments(config, name, sets(f"run.folder={run}")), *(options or [])]
        for run, (name, (options, _, _)) in zip(runs, CASES.items(), strict=True)
    ]
    reports = drive(folder, lines, request.param)
    written = [sorted(run.rglob("*")) if run.exists() else [] for run in runs]
    for run in runs:
        shutil.rmtree(run, ignore_errors=True)
    assert snapshot(folder) == before
    return dict(zip(CASES, zip(reports, written, strict=True), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_refusal(refusals, name):
    """Also U02: printed once, by rank 0."""
    _, code, words = CASES[name]
    ranks, written = refusals[name]
    assert [report["code"] for report in ranks] == [code] * len(ranks), ranks
    assert not written
    first, *others = (report["stderr"] for report in ranks)
    assert not any(others), others
    assert first.startswith("mpitrain: ")
    assert len(first.splitlines()) == 1
    for word in words:
        assert word in first, first


@pytest.mark.parametrize("text", ["1e-3", "1E-3", "0.001", "'0.001'"])
def test_numbers_in_any_spelling(tmp_path, text):
    """U01: all four are the same number."""
    from mpitrain.config.load import load_config

    config, _ = write_config(tmp_path)
    config.write_text(config.read_text() + f"[optim]\nlr = {text}\n")
    assert load_config(config).config.optim.lr == 1e-3
    assert load_config(config, [f"optim.lr={text}"]).config.optim.lr == 1e-3


TWO_A_STEP = ("data.placement=shuffled", "data.samples=11", "train.batch_size=2")


def test_more_ranks_than_samples(tmp_path):
    """D02: both numbers, once, on 5 ranks; the same for stations. One test sample is enough, and so are 2 in a step."""
    config, run = write_config(tmp_path)
    cases = [
        arguments(config, "", sets("data.samples=3", "data.placement=shuffled")),
        arguments(config, "", sets("data.stations=3")),
        arguments(config, "", sets("data.test_samples=1", "train.steps=12", *TWO_A_STEP)),
    ]
    few, stations, one_test = drive(tmp_path, cases, 5)
    for reports, words in ((few, ("5", "3", "samples")), (stations, ("5", "3", "station"))):
        assert [report["code"] for report in reports] == [ExitCode.DATA] * 5, reports
        assert [bool(report["stderr"]) for report in reports] == [True, False, False, False, False]
        assert all(word in reports[0]["stderr"] for word in words), reports[0]
    assert [report["code"] for report in one_test] == [0] * 5, one_test
    assert (run / "summary.json").exists()
    # D01: 11 samples, 2 a step: the last of an epoch is ragged, three ranks or four have nothing to do, none are lost.
    assert [row["samples"] for row in rows(run)] == 2 * [2, 2, 2, 2, 2, 1]
    assert [row["epoch"] for row in rows(run)] == 6 * [0] + 6 * [1]


MISTAKES = {
    ExitCode.CONFIG: [
        [],
        ["--resume", "--overwrite"],
        ["--overwrite", *sets("train.steps=0")],
        ["--resume", *sets("exchange.codec=int9")],
        ["--resume", *sets("train.steps=1")],
    ],
    ExitCode.DATA: [["--overwrite", *windows("nowhere.npz")]],
    ExitCode.CHECKPOINT: [
        ["--resume", *sets("model.hidden=[9]")],
        ["--resume", *sets("model.hidden=[8, 8]")],
        ["--resume", *sets("optim.kind=sgd")],
        ["--resume", *sets("train.seed=1")],
    ],
    ExitCode.DONE: [["--resume"]],
}


def test_a_folder_that_holds_a_run(tmp_path):
    """Nothing of an earlier run is touched, whatever the mistake; another model is refused by its checkpoint.

    A complete run that is resumed has nothing left to do, and stays as it is.
    """
    config, run = write_config(tmp_path, steps=2)
    cases = [(code, options) for code, several in MISTAKES.items() for options in several]
    lines = [arguments(config, "", options) for options in ([], *(options for _, options in cases))]
    (good,), *reports = drive(tmp_path, lines, 1, watched=run)
    assert good["code"] == 0, good
    for (code, options), (report,) in zip(cases, reports, strict=True):
        assert report["code"] == code, (options, report)
        assert len(report["stderr"].splitlines()) == (code != ExitCode.DONE), (options, report)
        assert report["digest"] == good["digest"], options


def test_a_folder_that_cannot_be_written(tmp_path):
    config, _ = write_config(tmp_path)
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o555)
    command = as_anyone("-m", "mpitrain", "train", config, *sets(f"run.folder={locked}/run"))
    result = execute(command, cwd=tmp_path)
    assert result.returncode == ExitCode.CONFIG, result.stderr
    assert len(messages(result)) == 1
    assert "run.folder: cannot write" in result.stderr
    assert not list(locked.iterdir())
