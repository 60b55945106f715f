"""The page of all keys, generated from the schema, so that it cannot tell anything else."""

import ast
import inspect
import itertools
import json
import re
import sys
import typing
from collections.abc import Callable

from msgspec import NODEFAULT, Meta, Struct, structs

from mpitrain.config.load import toml_value
from mpitrain.config.schema import Config, RuleConfig, Section
from mpitrain.config.validate import READ_BY, READ_BY_SPLIT

TYPES = {int: "whole number", float: "number", str: "text", bool: "true, false"}

NOUN = re.compile(r"\b(list|number)\b")

HEAD = """\
# Every key of a configuration

Printed by `mpitrain reference` from `mpitrain/config/schema.py`, and checked in as `jobs/configs/reference.md`.

A configuration is a TOML file with the sections below. Every key may be left out, except those of a rule.

**Precedence.** `--set section.key=value` wins over the file, and the file over the default; of several `--set` for one
key the last one wins. The value is read as TOML, and taken as text where it is none: `--set run.folder=out`,
`--set 'exchange.rule=[{match = "*.norm*", codec = "raw"}]'`. `mpitrain validate CONFIG` shows every value with its
source, and so does `config.toml` in the run folder; checkpoints keep it too. Unknown keys are errors that name the
nearest key; keys that the choices made do not read are warned about.

**Environment.** No variable sets a key. Variables that begin with `MPITRAIN_` are warned about, except
`MPITRAIN_EMULATION`, the mark of processes on emulated hosts, and
`MPITRAIN_FAULT`, which breaks runs on purpose, for tests. These are read: `OMP_NUM_THREADS`, `OPENBLAS_NUM_THREADS`,
`MKL_NUM_THREADS` and `BLIS_NUM_THREADS` (1 where none is set, at most the processors of the rank), `NUMBA_CACHE_DIR`
(where kernels are kept), `SLURM_ARRAY_TASK_ID` (each task of an array trains in `task-ID` below the `run.folder` of the
file), and Open MPI's own `OMPI_MCA_*`, which win over the transport settings of `mpitrain launch`.
"""


def main() -> int:
    """Print the page."""
    print(reference(), end="")
    return 0


def reference() -> str:
    """Render the page in Markdown."""
    parts = [HEAD]
    for name, kind in typing.get_type_hints(Config).items():
        parts.append(_section(f"[{name}]", name, kind))
        if name == "exchange":
            parts.append(_section("[[exchange.rule]]", "exchange.rule", RuleConfig))
    return "\n".join(parts)


def _section(title: str, name: str, kind: type[Section]) -> str:
    """Render one table: what it is about, and a row for each key."""

    def read_with(key: str) -> str:
        choices = readers(f"{name}.{key}")
        return f" Read with {choices}." if choices else ""

    return "\n".join([f"## {title}", "", purpose(kind), "", *key_table(kind, read_with)]) + "\n"


def purpose(kind: type[Section]) -> str:
    """Read what a table is about: its docstring after the colon."""
    words = " ".join(inspect.cleandoc(kind.__doc__ or "").partition(": ")[2].split()).replace("``", "`")
    return words[:1].upper() + words[1:]


def key_table(kind: type[Section], besides: Callable[[str], str] = lambda key: "") -> list[str]:
    """Render the lines of a table with a row for each key; ``besides`` adds to its meaning."""
    hints = typing.get_type_hints(kind, include_extras=True)
    meaning = meanings(kind)
    rows = ["| key | value | default | meaning |", "| --- | --- | --- | --- |"]
    for field in structs.fields(kind):
        default = "required" if field.default is NODEFAULT else _default(field.default)
        cells = (f"`{field.name}`", describe(hints[field.name]), default, meaning[field.name] + besides(field.name))
        rows.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return rows


def meanings(kind: type[Section]) -> dict[str, str]:
    """Read the strings that follow the fields of a section and of those that it extends, each on one line."""
    above = kind.__base__
    found = meanings(above) if above and issubclass(above, Section) and above is not Section else {}
    (tree,) = ast.parse(inspect.getsource(kind)).body
    for field, text in itertools.pairwise(typing.cast(ast.ClassDef, tree).body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            found[field.target.id] = " ".join(str(ast.literal_eval(text.value)).split()).replace("``", "`")
    return found


def describe(hint: object) -> str:
    """Say in words which values a type admits."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return ", ".join(f"`{json.dumps(word)}`" for word in inner)
    if origin is typing.Annotated:
        if told := next((meta.description for meta in inner[1:] if meta.description), ""):
            return str(told)
        return " ".join([describe(inner[0]), *(_bounds(meta) for meta in inner[1:])]).strip()
    if origin is tuple:
        return "list of " + NOUN.sub(r"\1s", describe(inner[0]))
    if inner:  # a union; None stands for "left out"
        return " or ".join(describe(each) for each in inner if each is not type(None))
    return TYPES[hint] if isinstance(hint, type) and hint in TYPES else "tables, see below"


def _bounds(meta: Meta) -> str:
    words = [
        f"{sign} {bound:g}" for sign, bound in (("≥", meta.ge), (">", meta.gt), ("<", meta.lt)) if bound is not None
    ]
    if meta.le is not None and meta.le != sys.float_info.max:
        words.append(f"≤ {meta.le:g}")
    if meta.min_length:
        words.append("that is not empty")
    if meta.max_length:
        words.append(f"of at most {meta.max_length} characters")
    return ", ".join(words)


def _default(value: object) -> str:
    return "left out" if value is None or isinstance(value, Struct) else f"`{toml_value(value)}`"


def readers(dotted: str) -> str:
    """Name the choices that read a key, each of which must be one of these; empty where all do."""
    found = []
    for choice, table in READ_BY.items():
        section = choice.partition(".")[0]
        words = [
            f'`{choice} = "{word}"`'
            for word, keys in table.items()
            if dotted in (key if "." in key else f"{section}.{key}" for key in keys.split())
        ]
        found += [" or ".join(words)] * bool(words)
    section, _, name = dotted.partition(".")
    found += [
        f"`parallel.{axis}` > 1"
        for axis, keys in READ_BY_SPLIT.items()
        if section == "parallel" and name in keys.split()
    ]
    return " and ".join(found)
