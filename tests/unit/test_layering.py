"""The walls of the house: who may import whom, what may be imported where, how long things may be."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAYERS = [
    {"kernels", "errors"},
    {"arrays", "intervals", "partition"},
    {"params", "config"},
    {"topology"},
    {"codecs", "comm", "nn", "optim", "data"},
    {"collectives", "checkpoint"},
    {"parallel", "server", "emulate"},
    {"train"},
    {"bench", "report", "jobs"},
    {"cli"},
]
LAYER = {part: number for number, parts in enumerate(LAYERS) for part in parts}
HOMES = {
    "mpi4py": {"comm", "collectives"},
    "numba": {"kernels"},
    "llvmlite": {"kernels"},
    "h5py": {"checkpoint", "data"},
    "torch": {"bench"},
}
"""Parts that may import these packages."""

NEVER = {"pickle"}
MAY_IMPORT_LATE = {"__init__", "cli"}
"""Parts that may call ``importlib.import_module``, which hides an import from this file."""

MAX_FILE_LINES, MAX_FUNCTION_LINES = 400, 60


def modules(folder, part=None):
    """Yield (part, path) of every module; the link mpitrain/kernels is left to kernels/ itself."""
    for path in sorted(folder.rglob("*.py")):
        inside = path.relative_to(folder)
        if "kernels" not in inside.parts:
            yield part or (inside.parts[0].removesuffix(".py")), path


MODULES = [*modules(ROOT / "mpitrain"), *modules(ROOT / "kernels", "kernels")]
NODES = {path: list(ast.walk(ast.parse(path.read_text(encoding="utf-8")))) for _, path in MODULES}
KNOWN = set(LAYER) | {part for part, _ in MODULES}
pytestmark = pytest.mark.parametrize(
    ("part", "path"), MODULES, ids=[str(path.relative_to(ROOT)) for _, path in MODULES]
)


def imports(path):
    """Yield (dotted name, node) of everything that is imported; ``from a import b`` may mean the module a.b."""
    for node in NODES[path]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                yield f"{node.module}.{alias.name}", node


def imported_parts(path):
    """Yield the parts of the package that are imported; the package itself has only its version."""
    for name, node in imports(path):
        head, _, rest = name.partition(".")
        first = rest.partition(".")[0]
        if head == "mpitrain" and first in KNOWN:
            yield first, node


def test_imports_go_down(part, path):
    """No import of a higher layer, and none of another part of the same one."""
    if part.startswith("__"):
        return
    assert part in LAYER, f"{part} has no layer; add it to the table of design.md and here"
    for other, node in imported_parts(path):
        below = LAYER[other] < LAYER[part] or other == part
        assert below, f"{path}:{node.lineno}: {part} (layer {LAYER[part]}) imports {other} (layer {LAYER[other]})"


def test_heavy_packages_stay_at_home(part, path):
    for name, node in imports(path):
        head = name.partition(".")[0]
        assert part in HOMES.get(head, {part}), f"{path}:{node.lineno}: {head} belongs to {sorted(HOMES[head])}"
        assert head not in NEVER, f"{path}:{node.lineno}: {head}"
        late = name in ("importlib", "importlib.import_module")
        assert not late or part in MAY_IMPORT_LATE, f"{path}:{node.lineno}: {name}"


def test_imports_are_absolute_and_at_the_top(part, path):
    for node in NODES[path]:
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno}: relative import"
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            inner = [n for n in ast.walk(node) if isinstance(n, ast.Import | ast.ImportFrom)]
            assert not inner, f"{path}:{inner[0].lineno}: import inside a function"


def test_sizes(part, path):
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= MAX_FILE_LINES, f"{path} has {lines} lines"
    for node in NODES[path]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = node.end_lineno - node.lineno + 1
            assert length <= MAX_FUNCTION_LINES, f"{path}:{node.lineno}: {node.name} has {length} lines"


def test_no_fastmath(part, path):
    """It hides NaN and infinity (N05), and lets the order of sums depend on the processor."""
    for node in NODES[path]:
        if isinstance(node, ast.keyword) and node.arg == "fastmath":
            raise AssertionError(f"{path}:{node.value.lineno}: fastmath")
