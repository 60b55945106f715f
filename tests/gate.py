"""Fail if a multi-rank test passed at no number of ranks: tests that are never run look like tests that pass."""

import contextlib
import io
import sys
from pathlib import Path

import pytest


def main(ledger: str, filters: str) -> int:
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", "--with-mpi", "tests/mpi"])
    wanted = {line for line in output.getvalue().splitlines() if "::" in line}
    passed = set(Path(ledger).read_text(encoding="utf-8").splitlines())
    if int(filters):
        print(f"gate: {len(passed)} multi-rank tests passed (a selection)")
        return 0 if passed else 1
    missing = sorted(wanted - passed)
    print(f"gate: {len(wanted) - len(missing)} of {len(wanted)} multi-rank tests passed on some number of ranks")
    for name in missing:
        print(f"gate: never passed: {name}")
    return 1 if missing or not wanted else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
