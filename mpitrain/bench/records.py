"""Flat records with units in their names: a table for people, JSON for programs."""

import json
import shutil
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Literal

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mpitrain.comm.hints import is_launched
from mpitrain.comm.outputs import write_output

WIDTH = 160
"""Of a table where nobody's terminal is known, in characters."""

MARGIN, GAP = 1, 3
"""Characters beside a table, and between two columns."""

Record = dict[str, str | float | int | None]


def show(title: str, records: Sequence[Record], path: Path | None = None, *, hidden: Collection[str] = ()) -> None:
    """Print records as a table, without ``hidden`` fields, and write them to ``path`` if it is given (ConfigError).

    Columns that are too many for the terminal go below the others, each part with the names of its rows.
    """
    shown = [name for name in records[0] if name not in hidden]
    widths = {name: _width(name, records) for name in shown}
    # A launcher may give its ranks a terminal that is not the user's.
    mine = not is_launched() and sys.stdout.isatty()
    room = shutil.get_terminal_size().columns if mine else WIDTH
    parts = fold(widths, [name for name in shown if _is_text(records[0][name])], room)
    widest = MARGIN + max(sum(widths[name] + GAP for name in part) for part in parts)
    console = Console(width=max(room, widest), highlight=False, color_system="auto" if mine else None)
    console.print(title, style="italic", markup=False, soft_wrap=True)
    for part in parts:
        console.print(_table(part, widths, records))
    if path:
        write_output(path, json.dumps(list(records), indent=1) + "\n", "--json")


def fold(widths: dict[str, int], labels: Sequence[str], room: int) -> list[list[str]]:
    """Divide columns among tables that fit into ``room``; none is left out, and each table repeats the labels.

    Parameters
    ----------
    widths : dict of str to int
        Characters of every column, in order.
    labels : list of str
        Columns that tell rows apart. Where there are none, or they leave no room, the first column does.
    """
    names = list(widths)

    def size(columns: Sequence[str]) -> int:
        return MARGIN + sum(widths[name] + GAP for name in columns)

    widest = max((widths[name] + GAP for name in names if name not in labels), default=0)
    repeated = list(labels) if labels and size(labels) + widest <= room else names[:1]
    parts = [list(repeated)]
    for name in names:
        if name in repeated:
            continue
        if len(parts[-1]) > len(repeated) and size([*parts[-1], name]) > room:
            parts.append(list(repeated))
        parts[-1].append(name)
    return [sorted(part, key=names.index) for part in parts]


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _width(name: str, records: Sequence[Record]) -> int:
    """Return the width in which no value and no word of the header is cut."""
    return max(map(len, [*name.split("_"), *(_format(record[name]) for record in records)]))


def _table(names: Sequence[str], widths: dict[str, int], records: Sequence[Record]) -> Table:
    table = Table(box=box.SIMPLE, padding=(0, 1))
    for name in names:
        left = _is_text(records[0][name])
        justify: Literal["left", "right"] = "left" if left else "right"
        # Nothing is cut short; the words of a header go below each other instead.
        table.add_column(
            name.replace("_", " "), justify=justify, vertical="bottom", no_wrap=left, min_width=widths[name]
        )
    for record in records:
        table.add_row(*(escape(_format(record[name])) for name in names))
    return table


def _format(value: str | float | None) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int):
        return f"{value:,}"
    return "-" if value is None else value
