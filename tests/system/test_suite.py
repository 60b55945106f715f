"""The tests' own safety: a failure on one rank ends them all, and tests that never ran do not count as passed."""

import sys

from tests import gate
from tests.system.helpers import ROOT, execute, mpirun

PYTEST = [sys.executable, "-m", "pytest", "-q", "--color=no", "-p", "no:cacheprovider"]

UNEVEN = """
from mpi4py import MPI

def test_uneven():
    assert MPI.COMM_WORLD.rank != 1, "only here"
    MPI.COMM_WORLD.Barrier()
"""


def test_failure_on_one_rank(tmp_path):
    """U06: rank 1 fails before a barrier; the others do not wait in it, and its traceback is seen."""
    folder = tmp_path / "tests" / "mpi"
    folder.mkdir(parents=True)
    (folder.parent / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (folder / "test_uneven.py").write_text(UNEVEN)
    result = execute([*mpirun(2), *PYTEST, "--with-mpi", "tests"], cwd=tmp_path)
    assert result.returncode != 0
    assert "rank 1 failed" in result.stderr
    assert "test_uneven" in result.stderr
    assert "AssertionError: only here" in result.stderr


def test_skipped_tests_say_why():
    """U07: without its flag the plugin skips; the reason is shown."""
    result = execute([*PYTEST, "tests/mpi/test_readme.py"], cwd=ROOT)
    assert "need --with-mpi option to run" in result.stdout
    assert " passed" not in result.stdout


def test_missing_plugin():
    """U07: without the plugin its flag is an error, and no silent skip."""
    result = execute([*PYTEST, "-p", "no:pytest_mpi", "--with-mpi", "tests/mpi/test_readme.py"], cwd=ROOT)
    assert result.returncode == 4, result.stdout
    assert "unrecognized arguments: --with-mpi" in result.stderr


def test_nothing_ran(tmp_path):
    """U07: the gate fails when the tests passed at no number of ranks, and names them."""
    ledger = tmp_path / "ledger"
    ledger.write_text("")
    result = execute([sys.executable, "tests/gate.py", ledger, 0], cwd=ROOT)
    assert result.returncode == 1, result.stderr
    assert "gate: 0 of" in result.stdout
    assert "gate: never passed: tests/mpi/test_collectives.py::test_bits_and_bytes[" in result.stdout


def test_gate(tmp_path, monkeypatch, capsys):
    """U07: every test must have passed somewhere; of a selection, any."""
    monkeypatch.setattr(gate.pytest, "main", lambda options: print("a.py::one\na.py::two\n\n2 tests collected"))
    ledger = tmp_path / "ledger"
    for passed, filters, code in [("one two", 0, 0), ("one", 0, 1), ("", 0, 1), ("one", 1, 0), ("", 1, 1)]:
        ledger.write_text("".join(f"a.py::{name}\n" for name in passed.split()))
        assert gate.main(str(ledger), str(filters)) == code, passed
        output = capsys.readouterr().out
        assert ("never passed: a.py::two" in output) == (not filters and "two" not in passed)
    monkeypatch.setattr(gate.pytest, "main", lambda options: print("no tests collected"))
    assert gate.main(str(ledger), "0") == 1
