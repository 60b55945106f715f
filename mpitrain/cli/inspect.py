"""``mpitrain inspect``: what a checkpoint holds, whether it is sound, and how it differs from another.

JSON is one object: ``path step sound problems format ranks layout num_parameters bytes bytes_params bytes_optimizer
bytes_memories`` and the lists ``fixed`` (settings that a resumed run must share), ``shards`` (``name bytes sound``),
``tensors`` (``name kind shape dtype shards bytes min max rms nan infinite``), ``steps`` (``name step state bytes``; of
a folder of checkpoints) and ``leftovers``. With OTHER also ``identical`` (the same tensors with the same bits),
``memories_identical`` (null where ranks of another grid wrote them, or a shard is damaged), ``other`` (an object like
this one) and ``comparison`` (``name state max_abs_difference relative_difference``). What is unknown or no number is
null.
"""

import os
import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path

import msgspec

from mpitrain.checkpoint.compare import EQUAL, Difference, compare, have_same_grid
from mpitrain.checkpoint.inspection import MEMORIES, Inspection, Tensor, inspect_step
from mpitrain.checkpoint.record import Commit
from mpitrain.checkpoint.survey import Survey, survey
from mpitrain.errors import CheckpointError, ExitCode
from mpitrain.train.runfolder import CHECKPOINTS

KINDS = ("params", "optimizer", MEMORIES)
SHOWN = 10
"""Lines of a list that may be longer."""

Row = dict[str, object]


@dataclass(frozen=True)
class View:
    """What a path of the command line led to."""

    survey: Survey
    found: Inspection


def main(path: Path, other: Path | None, *, as_json: bool, all_tensors: bool) -> int:
    """Inspect one step or compare two; what is wrong with them is said once more, shortly, on the error stream."""
    try:
        views = [_look(item) for item in (path, other) if item is not None]
    except CheckpointError as error:
        if as_json:
            _print([_json({"path": str(path), "sound": False, "problems": [str(error)]})])
        return _fail(str(error))
    differences = compare(views[0].found, views[1].found) if other else []
    if as_json:
        _print([_json(_record(views, differences))])
    else:
        _print(line for view in views for line in _text(view, all_tensors=all_tensors))
        _print(_comparison(views, differences, all_tensors=all_tensors) if other else [])
    for view in (view for view in views if not view.found.sound):
        count = len(view.found.problems)
        more = f" (and {count - 1} more, listed above)" if count > 1 else ""
        _fail(f"checkpoint: {view.found.folder} is not sound: {view.found.problems[0]}{more}")
    return ExitCode.DONE if all(view.found.sound for view in views) else ExitCode.CHECKPOINT


def _look(path: Path) -> View:
    try:
        chosen = survey(path, CHECKPOINTS)
        return View(chosen, inspect_step(chosen.folder))
    except OSError as error:
        raise CheckpointError(f"checkpoint: cannot read {error.filename or path}: {error.strerror}") from None


def _fail(message: str) -> int:
    print(f"mpitrain: {message}", file=sys.stderr, flush=True)
    return ExitCode.CHECKPOINT


def _print(lines: Iterable[str]) -> None:
    """Print; a reader that has seen enough, as ``head`` has, is no error."""
    try:
        for line in lines:
            print(line)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _json(record: Row) -> str:
    """Write JSON; what is not finite becomes null."""
    return msgspec.json.format(msgspec.json.encode(record), indent=1).decode()


def _record(views: Sequence[View], differences: list[Difference]) -> Row:
    record = _view_record(views[0])
    if len(views) > 1:
        record |= {
            "identical": _all_equal(differences),
            "memories_identical": _memories_equal(views, differences),
            "other": _view_record(views[1]),
            "comparison": [asdict(difference) for difference in differences],
        }
    return record


def _all_equal(differences: list[Difference]) -> bool:
    states = [difference.state for difference in differences if not difference.is_memory]
    return bool(states) and all(state == EQUAL for state in states)


def _memories_equal(views: Sequence[View], differences: list[Difference]) -> bool | None:
    whole = all(shard.sound for view in views for shard in view.found.shards)
    if not (whole and have_same_grid(views[0].found, views[1].found)):
        return None
    return all(difference.state == EQUAL for difference in differences if difference.is_memory)


def _view_record(view: View) -> Row:
    found = view.found
    return {
        "path": str(found.folder),
        "step": found.step,
        "sound": found.sound,
        "problems": found.problems,
        "format": found.record.format if found.record else None,
        "ranks": found.record.ranks if found.record else None,
        "layout": found.record.layout if found.record else None,
        "num_parameters": _num_elements(found.of_kind("params")),
        "bytes": sum(shard.nbytes or 0 for shard in found.shards),
        **{f"bytes_{kind}": sum(tensor.nbytes for tensor in found.of_kind(kind)) for kind in KINDS},
        "fixed": found.record.fixed if found.record else [],
        "shards": [{"name": shard.name, "bytes": shard.nbytes, "sound": shard.sound} for shard in found.shards],
        "tensors": [_tensor_record(tensor) for tensor in found.tensors.values()],
        "steps": [
            {"name": step.name, "step": step.step, "state": step.state, "bytes": step.nbytes}
            for step in view.survey.steps
        ],
        "leftovers": [*view.survey.leftovers, *found.leftovers],
    }


def _tensor_record(tensor: Tensor) -> Row:
    values = tensor.statistics
    return {
        "name": tensor.name,
        "kind": tensor.kind,
        "shape": tensor.shape,
        "dtype": tensor.dtype,
        "shards": [piece.path.name for piece in tensor.pieces],
        "bytes": tensor.nbytes,
        "min": values.minimum,
        "max": values.maximum,
        "rms": values.rms,
        "nan": values.num_nan if tensor.readable else None,
        "infinite": values.num_infinite if tensor.readable else None,
    }


def _num_elements(tensors: Iterable[Tensor]) -> int:
    return sum(prod(tensor.shape) for tensor in tensors)


def _text(view: View, *, all_tensors: bool) -> list[str]:
    """Describe a step for people: ten lines or so, and a table of all tensors if it is wanted."""
    found, record = view.found, view.found.record
    newest = ", the newest complete step" if view.survey.steps else ""
    lines = [f"checkpoint  {found.folder}{newest}"]
    lines += _table("step", [[s.name, s.state, _mb(s.nbytes)] for s in view.survey.steps])
    lines += [f"leftover    {name}" for name in [*view.survey.leftovers, *found.leftovers]]
    lines += [f"written     {_origin(record)}"] if record else []
    rows = [[s.name, _mb(s.nbytes or 0), "sound" if s.sound else "NOT SOUND"] for s in found.shards]
    lines += _table("shard", [*rows, ["together", _mb(sum(shard.nbytes or 0 for shard in found.shards)), ""]])
    lines += _table("holds", [_kind_row(kind, found.of_kind(kind)) for kind in KINDS if found.of_kind(kind)])
    lines += _fixed(record.fixed if record else [])
    if all_tensors:
        header = ["name", "shape", "type", "in shards", "min", "max", "rms"]
        lines += _table("tensor", [header, *(_tensor_row(tensor) for tensor in found.tensors.values())])
    lines += [f"problem     {problem}" for problem in found.problems]
    return [*lines, "verdict     sound" if found.sound else f"verdict     NOT SOUND: {len(found.problems)} problems"]


def _origin(record: Commit) -> str:
    layout = f" ({record.layout})" if record.layout else ""
    return f"at step {record.step} by {record.ranks} ranks{layout}, format {record.format}"


def _kind_row(kind: str, tensors: list[Tensor]) -> list[str]:
    elements, nbytes = _num_elements(tensors), sum(tensor.nbytes for tensor in tensors)
    what = "codec memories" if kind == MEMORIES else kind
    return [what, f"{len(tensors):,} tensors", f"{elements:,} values", _mb(nbytes)]


def _fixed(fixed: list[str]) -> list[str]:
    """Show the settings that a resumed run must share, a paragraph for each section."""
    sections: dict[str, list[str]] = {}
    for setting in fixed:
        section, _, rest = setting.partition(".")
        sections.setdefault(section, []).append(rest)
    indent = " " * 12
    return [
        textwrap.fill(f"fixed       [{section}] {', '.join(settings)}", width=120, subsequent_indent=indent)
        for section, settings in sections.items()
    ]


def _tensor_row(tensor: Tensor) -> list[str]:
    values = tensor.statistics
    numbers = [_number(value) for value in (values.minimum, values.maximum, values.rms)]
    shape = "x".join(map(str, tensor.shape)) or "scalar"
    shards = ",".join(piece.path.stem.removeprefix("shard-") for piece in tensor.pieces) or "none"
    return [tensor.name, shape, tensor.dtype, shards, *numbers]


def _comparison(views: Sequence[View], differences: list[Difference], *, all_tensors: bool) -> list[str]:
    """Tell whether two steps are the same, and the tensors that differ most."""
    others = [difference for difference in differences if difference.state != EQUAL]
    others.sort(key=lambda difference: -(difference.relative_difference or 0.0))
    shown = differences if all_tensors else others[:SHOWN]
    header = ["name", "", "max |difference|", "relative"]
    rows = [[d.name, d.state, _number(d.max_abs_difference), _number(d.relative_difference)] for d in shown]
    lines = _table("compared", [header, *rows] if rows else [])
    if len(others) > len(shown):
        lines.append(f"            and {len(others) - SHOWN} more; --tensors lists all")
    if not have_same_grid(views[0].found, views[1].found):
        lines.append("memories    not compared: ranks of another grid wrote them")
    verdict = "identical" if differences else "nothing to compare"
    verdict = f"differ in {len(others)} of {len(differences)} tensors" if others else verdict
    return [*lines, f"comparison  {verdict}"]


def _table(label: str, rows: list[list[str]]) -> list[str]:
    """Align columns, with a label before the first row."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [f"{label if index == 0 else '':<12}{line}" for index, line in enumerate(lines)]


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.3f} MB"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
