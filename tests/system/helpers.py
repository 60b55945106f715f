"""Whole commands as a user types them, on a run that is as small as a run can be."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HANG_S = 120
"""A guard against hanging, not a measure of speed."""

LAUNCHER_VARIABLES = ("OMPI_", "PMI_", "PMIX_", "PRTE_", "SLURM_")

TINY = """
[model]
kind = "mlp"
hidden = [8]
[data]
samples = 60
test_samples = 10
window = 4
stations = 6
[train]
steps = {steps}
batch_size = 12
eval_every = 0
[checkpoint]
every = 0
[run]
folder = "{folder}"
"""


def write_config(folder, steps=4, text=TINY):
    """Write a tiny configuration; returns its path and that of the run folder that it names."""
    config, run = folder / "tiny.toml", folder / "run"
    config.write_text(text.format(steps=steps, folder=run))
    return config, run


def environment(**extra):
    """Return what the shell of a user would hold: nothing from a launcher, no faults; None removes a variable."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith((*LAUNCHER_VARIABLES, "MPITRAIN_"))}
    inherited["PYTHONPATH"] = str(ROOT)
    return {k: v for k, v in (inherited | extra).items() if v is not None}


def environment_without(folder, *packages):
    """Return an environment in which packages are not installed."""
    for package in packages:
        (folder / "stub" / package).mkdir(parents=True, exist_ok=True)
        text = f"raise ImportError('{package} is blocked by a test')\n"
        (folder / "stub" / package / "__init__.py").write_text(text)
    return environment(PYTHONPATH=f"{folder / 'stub'}{os.pathsep}{ROOT}")


def mpirun(ranks, *, survive=False):
    """Return the launcher's part of a command, for root and for others; ``survive``: deaths are told (ULFM)."""
    beside = Path(sys.executable).parent / "mpirun"
    program = str(beside) if beside.exists() else shutil.which("mpirun")
    command = [program, "--oversubscribe", "--bind-to", "none", "-n", str(ranks)]
    command += ["--with-ft", "ulfm"] * survive
    for name, value in {"pml": "ob1", "btl": "self,sm,tcp", "mpi_yield_when_idle": "1"}.items():
        command += ["--mca", name, value]
    return command + ["--allow-run-as-root"] * (os.geteuid() == 0)


def execute(command, *, cwd, env=None, **options):
    """Run a command to its end."""
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=env or environment(),
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
        stdin=subprocess.DEVNULL,
        **options,
    )


def train(ranks, config, *options, fault=None, env=None, survive=False):
    """Train on some ranks; 0: a plain process without a launcher."""
    launcher = mpirun(ranks, survive=survive) if ranks else []
    command = [*launcher, sys.executable, "-m", "mpitrain", "train", config, *options]
    variables = (env or {}) | ({"MPITRAIN_FAULT": fault} if fault else {})
    return execute(command, cwd=config.parent, env=environment(**variables))


def drive(folder, cases, ranks, watched=None):
    """Run argument lists in one start, and return for each what every rank reported; 1: without a launcher."""
    (folder / "cases.json").write_text(json.dumps(cases))
    launcher = mpirun(ranks) if ranks > 1 else []
    command = [*launcher, sys.executable, "-m", "tests.system.driver", "cases.json", "results"]
    result = execute([*command, *([watched] if watched else [])], cwd=folder)
    assert result.returncode == 0, result.stderr
    reports = [json.loads((folder / f"results.{rank}").read_text()) for rank in range(ranks)]
    for path in [folder / "cases.json", *folder.glob("results.*")]:
        path.unlink()
    return list(zip(*reports, strict=True))


DROP = """
import ctypes, os, sys
for capability in (1, 2):  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH: what makes root ignore permissions
    ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


def as_anyone(*arguments):
    """Return a command for Python to which permissions apply, even where the tests run as root."""
    return [sys.executable, "-c", DROP, *arguments]


NOBODY = 65534
TURN = f"""
import ctypes, os, struct, sys
READ = 1 << 2  # CAP_DAC_READ_SEARCH alone is kept, for an interpreter in root's home; nothing more can be written
if os.geteuid() == 0:
    libc = ctypes.CDLL(None)
    libc.prctl(8, 1, 0, 0, 0)  # PR_SET_KEEPCAPS
    os.setgroups([])
    os.setresgid({NOBODY}, {NOBODY}, {NOBODY})
    os.setresuid({NOBODY}, {NOBODY}, {NOBODY})
    header = struct.pack("Ii", 0x20080522, 0)
    if libc.capset(header, struct.pack("6I", READ, READ, READ, 0, 0, 0)) == 0:
        libc.prctl(47, 2, 2, 0, 0)  # PR_CAP_AMBIENT_RAISE: also for the programs that it starts
os.execvp(sys.argv[1], sys.argv[1:])
"""


def as_nobody(*command):
    """Return a command that runs as an ordinary user, even where the tests run as root."""
    return [sys.executable, "-c", TURN, *command]


def messages(result):
    """List what the package itself said on the error stream."""
    return [line for line in result.stderr.splitlines() if line.startswith("mpitrain:")]


def summary(run):
    return json.loads((run / "summary.json").read_text())


def rows(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def processes(argument):
    """Find the living processes whose command line holds ``argument``."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes()
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if argument.encode() in line and state != "Z" and int(folder.name) != os.getpid():
            found.append(int(folder.name))
    return found


def gone(argument, seconds=20):
    """Wait until no process of a run is left."""
    limit = time.monotonic() + seconds
    while processes(argument) and time.monotonic() < limit:
        time.sleep(0.1)
    return not processes(argument)


def snapshot(folder):
    """Return every file below a folder with its content and time."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}
