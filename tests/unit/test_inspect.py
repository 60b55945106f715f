"""``mpitrain inspect``: everything that is wrong is named, nothing is touched, and two steps compare as wholes."""

import fcntl
import hashlib
import json
import sys

import h5py
import numpy as np
import pytest

from mpitrain.checkpoint import files
from mpitrain.checkpoint.compare import difference
from mpitrain.checkpoint.record import COMMIT, Commit, write_commit
from mpitrain.checkpoint.steps import step_folder
from mpitrain.cli import inspect, main
from mpitrain.errors import ExitCode
from tests.reference.checkpoints import owners_of, record_tensors
from tests.system.helpers import execute, snapshot

FIXED = ['model.kind = "mlp"', "parallel.dp = 3"]


@pytest.fixture(autouse=True)
def no_power_cuts(monkeypatch):
    """Spare the wait for the disk: it guards against what no test here does."""
    monkeypatch.setattr(files.os, "fsync", lambda handle: None)


def tensors(step):
    rng = np.random.default_rng(step)
    shapes = {"params/w": (6, 4), "params/b": (4,), "params/s": (), "params/none": (0, 3)}
    shapes |= {"optimizer/first/w": (6, 4), "optimizer/first/b": (4,)}
    return {name: np.asarray(rng.standard_normal(shape), np.float32) for name, shape in shapes.items()}


def write_step(root, step, ranks=3, values=None, config="[run]\nshared_fs = true\n", layout="dp=3 pp=1 tp=1"):
    """Write a step as that many ranks would."""
    folder, values = step_folder(root, step), values or tensors(step)
    owners, records = owners_of(values, ranks), record_tensors(values, ranks)
    for rank in range(ranks):
        mine = {name: array for name, array in values.items() if owners[name] == rank}
        local = {"bucket0.residual": np.full(5, step + rank, np.float32)}
        files.write_shard(folder / files.shard_name(rank), mine, local)
    files.write_index(folder / files.INDEX, records, {"config": config})
    names = [files.shard_name(rank) for rank in range(ranks)]
    digests = {name: files.checksum(folder / name) for name in names}
    index = files.checksum(folder / files.INDEX)
    facts = {"step": step, "ranks": ranks, "layout": layout, "fixed": FIXED}
    write_commit(folder, Commit(**facts, shards=digests, index=index, tensors=records))
    return folder


def recommit(folder, **pieces):
    """Make the record fit the files again, after somebody has changed them on purpose."""
    record = json.loads((folder / COMMIT).read_text())
    for name, places in pieces.items():
        record["tensors"][name]["pieces"] = places
    record["shards"] = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in record["shards"]}
    record["index"] = hashlib.sha256((folder / files.INDEX).read_bytes()).hexdigest()
    (folder / COMMIT).write_text(json.dumps(record))


def text(capsys, *paths, tensors=False):
    code = inspect.main(*paths, *[None] * (2 - len(paths)), as_json=False, all_tensors=tensors)
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def data(capsys, *paths):
    code = inspect.main(*paths, *[None] * (2 - len(paths)), as_json=True, all_tensors=False)
    return code, json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_a_run_folder(tmp_path, capsys):
    """The newest complete step is looked into; everything else in the folder is listed."""
    root = tmp_path / "checkpoints"
    write_step(root, 900)
    folder = write_step(root, 10000)
    write_step(root, 20000)
    (step_folder(root, 20000) / COMMIT).unlink()
    write_step(root / "aside-1", 30000)
    (root / "notes.txt").write_text("mine")
    (folder / ".shard-00001.h5.tmp").write_text("half")
    (step_folder(root, 950)).mkdir()
    before = snapshot(tmp_path)
    code, out, err = text(capsys, tmp_path)
    assert (code, err) == (0, "")
    assert f"checkpoint  {folder}, the newest complete step" in out
    states = {line[12:].split()[0]: " ".join(line[12:].split()[1:-2]) for line in out.splitlines() if "step-" in line}
    assert {name: state for name, state in states.items() if name != str(folder) + ","} == {
        "step-00000900": "complete",
        "step-00000950": "incomplete",
        "step-00010000": "complete",
        "step-00020000": "incomplete",
        "aside-1/step-00030000": "set aside",
    }
    assert [line[12:] for line in out.splitlines() if line.startswith("leftover")] == [
        "notes.txt",
        ".shard-00001.h5.tmp",
    ]
    assert "by 3 ranks (dp=3 pp=1 tp=1), format 3" in out
    assert "29 values" in out  # of the parameters: 24, 4 and a scalar
    assert 'fixed       [model] kind = "mlp"\nfixed       [parallel] dp = 3\n' in out
    assert out.endswith("verdict     sound\n")
    assert "params/w" not in out
    assert snapshot(tmp_path) == before
    for path in (root, folder):
        code, found = data(capsys, path)
        assert (code, found["step"], found["sound"]) == (0, 10000, True)


def test_numbers(tmp_path, capsys):
    """Sizes, counts and statistics are those of the arrays."""
    folder = write_step(tmp_path, 7)
    code, found = data(capsys, folder)
    assert (code, found["problems"], found["ranks"], found["num_parameters"]) == (0, [], 3, 29)
    assert (found["bytes_params"], found["bytes_optimizer"], found["bytes_memories"]) == (29 * 4, 28 * 4, 3 * 5 * 4)
    assert found["bytes"] == sum(path.stat().st_size for path in folder.glob("shard-*"))
    assert found["fixed"] == FIXED
    by_name = {tensor["name"]: tensor for tensor in found["tensors"]}
    assert set(by_name) == {*tensors(7), *(f"memories/{rank}/bucket0.residual" for rank in range(3))}
    for name, values in tensors(7).items():
        shown = by_name[name]
        assert (shown["shape"], shown["dtype"], shown["kind"]) == (list(values.shape), "float32", name.split("/")[0])
        assert (shown["nan"], shown["infinite"]) == (0, 0)
        if values.size:
            assert (shown["min"], shown["max"]) == (values.min(), values.max())
            assert shown["rms"] == pytest.approx(np.sqrt(np.mean(np.square(values, dtype=np.float64))), rel=1e-12)
        else:
            assert (shown["min"], shown["max"], shown["rms"]) == (None, None, None)
    code, out, _ = text(capsys, folder, tensors=True)
    assert all(name in out for name in by_name)


def test_all_that_is_wrong_is_told(tmp_path, capsys):
    """H03: a cut shard, a missing one, a damaged index, an odd leftover: one look finds them all."""
    folder = write_step(tmp_path, 7)
    values = tensors(7)
    cut, gone = folder / files.shard_name(1), folder / files.shard_name(2)
    cut.write_bytes(cut.read_bytes()[:-1])
    gone.unlink()
    files.write_index(folder / files.INDEX, record_tensors(values, 1), {})
    code, found = data(capsys, folder)
    assert code == ExitCode.CHECKPOINT
    assert found["sound"] is False
    assert [problem for problem in found["problems"] if "params/" not in problem and "optimizer/" not in problem] == [
        f"{folder / files.INDEX} is damaged (its checksum differs from the commit record)",
        f"{cut} is damaged (its checksum differs from the commit record)",
        f"{gone} is missing",
    ]
    assert [(shard["bytes"], shard["sound"]) for shard in found["shards"]][1:] == [
        (cut.stat().st_size, False),
        (None, False),
    ]
    code, out, err = text(capsys, folder)
    assert code == ExitCode.CHECKPOINT
    assert all(f"problem     {problem}\n" in out for problem in found["problems"])
    assert err.count("mpitrain: ") == 1
    assert str(folder / files.INDEX) in err


def test_a_shard_on_another_disk(tmp_path, capsys):
    folder = write_step(tmp_path, 7, config="[run]\nshared_fs = false  # --set\n")
    (folder / files.shard_name(1)).unlink()
    _, found = data(capsys, folder)
    assert found["problems"] == [
        f"{folder / files.shard_name(1)} is missing; run.shared_fs = false: it is on the disk of its rank"
    ]
    sound = [tensor["rms"] is not None for tensor in found["tensors"] if tensor["shape"] == [6, 4]]
    assert sorted(sound) == [False, True]


def test_values_that_are_not_finite(tmp_path, capsys):
    values = tensors(7)
    values["params/w"][0, :3] = np.nan
    values["optimizer/first/b"][1:3] = -np.inf, np.inf
    values["params/b"][:] = np.nan
    code, found = data(capsys, write_step(tmp_path, 7, values=values))
    assert code == ExitCode.CHECKPOINT
    told = {problem.split(": ")[1] for problem in found["problems"]}
    assert told == {
        "params/w holds 3 NaN and 0 infinite values",
        "optimizer/first/b holds 0 NaN and 2 infinite values",
        "params/b holds 4 NaN and 0 infinite values",
    }
    by_name = {tensor["name"]: tensor for tensor in found["tensors"]}
    assert (by_name["params/b"]["nan"], by_name["params/b"]["max"]) == (4, None)
    finite = values["params/w"].ravel()[3:]
    assert by_name["params/w"]["max"] == finite.max()


@pytest.mark.parametrize("record", [b"", b"[" * 100_000, b'{"format": 3, "step": "x"}', b'{"format": 99}', None])
def test_a_step_without_a_usable_record(tmp_path, capsys, record):
    """What the files say by themselves is still shown."""
    folder = write_step(tmp_path, 7)
    (folder / COMMIT).unlink()
    if record is not None:
        (folder / COMMIT).write_bytes(record)
    code, found = data(capsys, folder)
    assert (code, found["ranks"], found["step"]) == (ExitCode.CHECKPOINT, None, 7)
    assert len(found["problems"]) == 1
    assert str(folder / COMMIT) in found["problems"][0]
    assert [shard["sound"] for shard in found["shards"]] == [True] * 3
    assert found["num_parameters"] == 29


def change(folder, rank, action):
    with h5py.File(folder / files.shard_name(rank), "r+") as shard:
        action(shard)
    recommit(folder)


def shard_of(folder, name):
    ((rank, _, _),) = json.loads((folder / COMMIT).read_text())["tensors"][name]["pieces"]
    return rank


@pytest.mark.parametrize(
    ("attributes", "reason"),
    [
        ({"global_shape": (7, 4)}, "hold 24 of its 28 elements"),
        ({"global_shape": (5, 4)}, "lies at"),
        ({"start": (1, 0)}, "lies at"),
        ({"stop": (6, -4)}, "lies at"),
        ({"stop": (6,)}, "lies at"),
        ({"stop": "six"}, "cannot list its arrays"),
    ],
)
def test_places_that_make_no_sense(tmp_path, capsys, attributes, reason):
    """A shard with a right checksum that does not hold what it should."""
    folder = write_step(tmp_path, 7)
    change(folder, shard_of(folder, "params/w"), lambda shard: shard["tensors/params/w"].attrs.update(attributes))
    code, found = data(capsys, folder)
    assert code == ExitCode.CHECKPOINT
    assert any(reason in problem for problem in found["problems"]), found["problems"]


def test_lost_doubled_and_unknown_tensors(tmp_path, capsys):
    folder = write_step(tmp_path, 7)
    change(folder, shard_of(folder, "params/w"), lambda shard: shard.pop("tensors/params/w"))
    other = (shard_of(folder, "params/b") + 1) % 3

    def add(shard):
        spec = {"global_shape": (4,), "start": (0,), "stop": (4,)}
        for name in ("params/b", "params/new"):
            shard.create_dataset(f"tensors/{name}", data=np.zeros(4, np.float32)).attrs.update(spec)

    change(folder, other, add)
    _, found = data(capsys, folder)
    told = [problem.removeprefix(f"{folder}: ") for problem in found["problems"]]
    assert sorted(told) == [
        "no shard holds params/w",
        "params/b is not whole: its shards overlap",
        "params/new is not in the commit record",
    ]


def split(folder, name, *, recorded=True):
    """Cut a tensor in two along its first dimension: the second half goes to another rank. The index stays."""
    owner = shard_of(folder, name)
    with h5py.File(folder / files.shard_name(owner), "r+") as shard:
        values = shard[f"tensors/{name}"][()]
        del shard[f"tensors/{name}"]
    half, rest = len(values) // 2, values.shape[1:]
    halves = ((owner, 0, half), ((owner + 1) % 3, half, len(values)))
    for rank, start, stop in halves:
        with h5py.File(folder / files.shard_name(rank), "r+") as shard:
            piece = shard.create_dataset(f"tensors/{name}", data=values[start:stop])
            piece.attrs.update(
                {"global_shape": values.shape, "start": (start, *(0 for _ in rest)), "stop": (stop, *rest)}
            )
    places = [[rank, [start, *(0 for _ in rest)], [stop, *rest]] for rank, start, stop in halves]
    recommit(folder, **({name: places} if recorded else {}))


def test_other_ranks_and_other_cuts_of_the_same_tensors(tmp_path, capsys):
    one, three, cut = (write_step(tmp_path / name, 7, ranks) for name, ranks in (("1", 1), ("3", 3), ("cut", 3)))
    split(cut, "params/w")
    elsewhere = write_step(tmp_path / "elsewhere", 7, layout="dp=1 pp=3 tp=1")
    pairs = ((one, three, None), (three, cut, True), (cut, one, None), (three, three, True), (three, elsewhere, None))
    for first, other, memories in pairs:
        code, found = data(capsys, first, other)
        assert (code, found["identical"], found["memories_identical"]) == (0, True, memories), found["problems"]
        assert {row["state"] for row in found["comparison"]} == {"equal"}
        assert found["other"]["path"] == str(other)
        assert text(capsys, first, other)[1].endswith("comparison  identical\n")
    assert "memories    not compared" in text(capsys, one, three)[1]
    assert "memories    not compared" in text(capsys, three, elsewhere)[1]
    (wide,) = [row for row in data(capsys, cut)[1]["tensors"] if row["name"] == "params/w"]
    assert len(wide["shards"]) == 2


def test_pieces_that_the_record_does_not_know(tmp_path, capsys):
    """A whole tensor that a resumed run would not find whole."""
    folder = write_step(tmp_path, 7)
    split(folder, "params/w", recorded=False)
    _, found = data(capsys, folder)
    assert found["problems"] == [
        f"{folder}: params/w is not whole: type, shape or pieces are not those in the commit record"
    ]


def test_how_two_steps_differ(tmp_path, capsys):
    values = tensors(7)
    changed = {name: array.copy() for name, array in values.items()}
    changed["params/w"][2, 1] += 0.5
    changed["params/b"][0] = np.nan
    changed["params/s"] = changed["params/s"].astype(np.float64)
    changed["params/new"] = changed.pop("optimizer/first/w")
    first, other = write_step(tmp_path / "a", 7, values=values), write_step(tmp_path / "b", 7, values=changed)
    code, found = data(capsys, first, other)
    assert (code, found["identical"]) == (ExitCode.CHECKPOINT, False)  # of the NaN
    rows = {row["name"]: row for row in found["comparison"]}
    states = {name: row["state"] for name, row in rows.items() if row["state"] != "equal"}
    assert states == {
        "params/w": "different",
        "params/b": "different",
        "params/s": "other shape or type",
        "params/new": "only in the other",
        "optimizer/first/w": "only in the first",
    }
    delta = float(changed["params/w"][2, 1]) - float(values["params/w"][2, 1])
    assert rows["params/w"]["max_abs_difference"] == delta
    norm = np.linalg.norm(values["params/w"].astype(np.float64))
    assert rows["params/w"]["relative_difference"] == pytest.approx(delta / norm, rel=1e-12)
    assert (rows["params/b"]["max_abs_difference"], rows["params/b"]["relative_difference"]) == (None, None)
    _, out, _ = text(capsys, first, other)
    assert out.endswith("comparison  differ in 5 of 10 tensors\n")


def test_comparing_with_a_damaged_step(tmp_path, capsys):
    first, other = write_step(tmp_path / "a", 7), write_step(tmp_path / "b", 7)
    for path in other.glob("shard-*"):
        path.unlink()
    code, found = data(capsys, first, other)
    assert (code, found["identical"], found["memories_identical"]) == (ExitCode.CHECKPOINT, False, None)
    states = {row["name"]: row["state"] for row in found["comparison"]}
    assert {states[name] for name in tensors(7)} == {"unreadable"}
    (other / files.INDEX).unlink()
    assert data(capsys, other, other)[1]["identical"] is False


def test_bits_count():
    zeros = np.zeros(2, np.float32)
    assert difference("x", zeros, zeros).state == "equal"
    negative = difference("x", zeros, -zeros)
    assert (negative.state, negative.max_abs_difference, negative.relative_difference) == ("different", 0, None)


@pytest.mark.parametrize("name", ["nowhere", "file", "empty", "unfinished"])
def test_nothing_to_inspect(tmp_path, capsys, name):
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    step_folder(tmp_path / "unfinished", 3).mkdir(parents=True)
    code, found = data(capsys, tmp_path / name)
    assert (code, found["sound"]) == (ExitCode.CHECKPOINT, False)
    assert str(tmp_path / name) in found["problems"][0]
    code, out, err = text(capsys, tmp_path / name)
    assert (code, out) == (ExitCode.CHECKPOINT, "")
    assert err.startswith("mpitrain: checkpoint: ")


def test_locks_of_others_do_not_matter(tmp_path, capsys):
    """H05: a reader that holds its lock for ever."""
    folder = write_step(tmp_path, 7)
    held = [path.open("r+b") for path in folder.iterdir()]
    for file in held:
        fcntl.flock(file, fcntl.LOCK_EX)
    assert data(capsys, folder)[0] == 0
    for file in held:
        file.close()


def test_neither_mpi_nor_a_path(tmp_path, capsys, monkeypatch):
    """It needs no MPI; without a path it is a wrong command line; ``head`` may stop reading."""
    monkeypatch.setattr(sys, "argv", ["mpitrain", "inspect"])
    with pytest.raises(SystemExit) as caught:
        main.run()
    assert caught.value.code == ExitCode.CONFIG
    write_step(tmp_path, 7)
    program = "import sys; sys.modules['mpi4py'] = None; from mpitrain.cli.main import run; run()"
    command = f"'{sys.executable}' -c \"{program}\" inspect . --tensors | true; exit ${{PIPESTATUS[0]}}"
    result = execute(["bash", "-c", command], cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
