"""Shared by all tests: the ledger of what ran, and the watchdog of tests on several ranks."""

import faulthandler
import os
import sys
import traceback
from pathlib import Path

import pytest

WATCHDOG_S = 90


def pytest_addoption(parser):
    parser.addoption("--ledger", default=None, help="append the ids of passed tests to this file")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    """Let rank 0 alone report; failures of the others are printed by the watchdog below."""
    if any(int(os.environ.get(name, "0")) for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK")):
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  (for the life of the process)


def pytest_collection_modifyitems(config, items):
    """Multi-rank tests live in tests/mpi and carry the marker of pytest-mpi without being told."""
    for item in items:
        if Path(__file__).parent / "mpi" in Path(item.fspath).parents:
            item.add_marker(pytest.mark.mpi)


def _world():
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi.COMM_WORLD if mpi and mpi.Is_initialized() and not mpi.Is_finalized() else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """End all ranks when a test fails on one or stands still: the others would wait for ever."""
    if not item.get_closest_marker("mpi"):
        return (yield)
    faulthandler.dump_traceback_later(WATCHDOG_S, exit=True)
    try:
        return (yield)
    except pytest.skip.Exception:
        raise
    except BaseException:
        world = _world()
        if world is None or world.Get_size() == 1:
            raise
        sys.__stderr__.write(f"\nrank {world.Get_rank()} failed {item.nodeid}\n{traceback.format_exc()}\n")
        sys.__stderr__.flush()
        world.Abort(1)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    ledger, world = item.config.getoption("--ledger"), _world()
    if ledger and call.when == "call" and report.passed and (world is None or world.Get_rank() == 0):
        with open(ledger, "a", encoding="utf-8") as file:
            file.write(item.nodeid + "\n")
    return report


@pytest.fixture(scope="session")
def shared_data():
    """Folder of the real data beside the project; a missing one fails in CI and is a visible skip elsewhere."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "data"
    if not folder.is_dir():
        if os.environ.get("CI"):
            pytest.fail(f"the data folder {folder} is missing")
        pytest.skip(f"the data folder {folder} is missing")
    return folder
