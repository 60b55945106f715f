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
    missing = sorted(name for name in wanted - passed if not passed_elsewhere(name, passed))
    print(f"gate: {len(wanted) - len(missing)} of {len(wanted)} multi-rank tests passed on some number of ranks")
    for name in missing:
        print(f"gate: never passed: {name}")
    return 1 if missing or not wanted else 0


def passed_elsewhere(name: str, passed: set[str]) -> bool:
    """Without parameters on the one rank that collects here, the test has some on other numbers of ranks."""
    return name.endswith("NOTSET]") and any(other.startswith(name.removesuffix("NOTSET]")) for other in passed)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
