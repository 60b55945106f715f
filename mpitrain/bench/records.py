"""Flat records with units in their names: a table for people, JSON for programs."""

import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Literal

from rich import box
from rich.console import Console
from rich.table import Table

from mpitrain.comm.hints import is_launched
from mpitrain.comm.outputs import write_output

WIDTH = 160
"""Of a table at most, in characters."""

Record = dict[str, str | float | int | None]


def show(title: str, records: Sequence[Record], path: Path | None = None, *, hidden: Collection[str] = ()) -> None:
    """Print records as a table, without ``hidden`` fields, and write them to ``path`` if it is given (ConfigError)."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE, padding=(0, 1))
    shown = [name for name in records[0] if name not in hidden]
    for name in shown:
        left = isinstance(records[0][name], str)
        longest = max(map(len, [*name.split("_"), *(_format(record[name]) for record in records)]))
        justify: Literal["left", "right"] = "left" if left else "right"
        # Nothing is cut short; the words of a header go below each other instead.
        table.add_column(name.replace("_", " "), justify=justify, vertical="bottom", no_wrap=left, min_width=longest)
    for record in records:
        table.add_row(*(_format(record[name]) for name in shown))
    # A launcher may give its ranks a terminal that is not the user's.
    colours: Literal["auto"] | None = None if is_launched() else "auto"
    Console(width=WIDTH, highlight=False, color_system=colours).print(table)
    if path:
        write_output(path, json.dumps(list(records), indent=1) + "\n", "--json")


def _format(value: str | float | None) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int):
        return f"{value:,}"
    return "-" if value is None else value
