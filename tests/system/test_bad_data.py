"""Tables that cannot be trained on: exit 3 on every rank, told once, nothing written."""

import shutil
import sys

import h5py
import numpy as np

from mpitrain.errors import ExitCode
from tests.system.helpers import drive, execute, messages, mpirun, write_config

WINDOWS = ["data.kind=windows", "data.window=4", "data.y=label", "data.group=trace", "data.test_groups=[3]"]
GOOD = "x,label,trace\n" + "".join(f"{row / 4},{'ab'[row % 2]},{row // 15}\n" for row in range(60))


def sets(*overrides):
    return [part for item in overrides for part in ("--set", item)]


def test_wrong_tables(tmp_path):
    """Each of these stops two ranks with one line; the same file without the mistake trains."""
    config, run = write_config(tmp_path)
    (tmp_path / "good table.csv").write_text(GOOD)
    (tmp_path / "bad row.csv").write_text(GOOD.replace("\n1.0,a,0\n", "\n1.0,a\n"))
    (tmp_path / "text.csv").write_text(GOOD.replace("\n1.0,", "\none,"))
    with h5py.File(tmp_path / "whole.h5", "w") as file:
        file["x"], file["label"], file["trace"] = np.ones((60, 2)), np.arange(60) % 2, np.arange(60) // 15
    (tmp_path / "cut.h5").write_bytes((tmp_path / "whole.h5").read_bytes()[:-100])
    cases = {
        "bad row.csv": ([], ExitCode.DATA, ["row 4 (line 6)", "expected 3 fields", "got 2"]),
        "text.csv": ([], ExitCode.DATA, ['column "x"', "row 4 (line 6)", 'expected a number, got "one"']),
        "cut.h5": ([], ExitCode.DATA, ["not a whole HDF5 file", "copy it again"]),
        "good table.csv": (["data.flags=['y > 3']"], ExitCode.DATA, ['data.flags: there is no "y"', "['x']"]),
        "whole.h5": (["data.flags=['x = 3']"], ExitCode.CONFIG, ["data.flags: expected a column", "'x = 3'"]),
    }
    lines = [
        ["train", str(config), *sets(*WINDOWS, f"data.path={name}", *more)] for name, (more, _, _) in cases.items()
    ]
    *refused, trained = drive(
        tmp_path, [*lines, ["train", str(config), *sets(*WINDOWS, "data.path=good table.csv")]], 2
    )
    for (name, (_, code, words)), reports in zip(cases.items(), refused, strict=True):
        assert [report["code"] for report in reports] == [code] * 2, reports
        first, other = (report["stderr"] for report in reports)
        assert len(first.splitlines()) == 1, first
        assert not other
        assert all(word in first for word in [*words, name if code == ExitCode.DATA else ""]), first
    # Only the last one has made its folder: none of the others was in its way.
    assert [report["code"] for report in trained] == [0, 0], trained
    assert (run / "summary.json").exists()


def test_a_table_that_one_rank_does_not_have(tmp_path):
    """Every rank in a folder of its own, as on stations without a shared disk."""
    config, run = write_config(tmp_path)
    folders = [tmp_path / "here", tmp_path / "there"]
    for folder in folders:
        folder.mkdir()
    (folders[0] / "table.csv").write_text(GOOD)
    program = [sys.executable, "-m", "mpitrain", "train", config, *sets(*WINDOWS, "data.path=table.csv")]
    first, second = (["--wdir", folder, *program] for folder in folders)
    result = execute([*mpirun(1), *first, ":", "-n", "1", *second], cwd=tmp_path)
    assert result.returncode == ExitCode.DATA, result.stderr
    (message,) = messages(result)
    assert message.startswith('mpitrain: rank 1: data.path: there is no file "table.csv"')
    assert not run.exists()
    shutil.copy(folders[0] / "table.csv", folders[1])
    result = execute([*mpirun(1), *first, ":", "-n", "1", *second], cwd=tmp_path)
    assert result.returncode == ExitCode.DONE, result.stderr
