"""``mpitrain plan``: where the model can be cut, and what every way to lay it over the ranks sends and keeps.

JSON is a list of flat records. Units: ``unit name parameters work_multiply_adds`` (or ``work_s``) ``output_values
kept_bytes``. Layouts: ``dp pp tp servers cuts``, then ``refused``, or for every axis ``data_bytes data_messages
data_raw_bytes data_int8_bytes …`` and ``total_bytes total_about messages_in_a_row memory_bytes
memory_parameters_bytes …``. ``data_uncompressed_bytes`` are those of the steps that travel raw, if there are any;
``total_about`` tells whether bytes depend on the values, and are those of typical ones. Work, values and bytes of a
unit are those of one sample; of a layout, all ranks' in a step, and the memory of the largest.
"""

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from mpitrain.collectives.predicted import Sent
from mpitrain.comm.hints import hinted_rank, hinted_size
from mpitrain.comm.outputs import write_output
from mpitrain.config.load import load_config
from mpitrain.config.schema import ExchangeConfig
from mpitrain.data.open import open_dataset
from mpitrain.errors import ExitCode, MpitrainError, count
from mpitrain.parallel.units import kept_bytes
from mpitrain.partition import GridShape
from mpitrain.train.layouts import COMPARED, Costs, LayoutCost, compare

Record = dict[str, str | int | float | None]

WIDTH = 120
"""Columns where the output is not a terminal."""

UNITS = "Units, between which a pipeline can be cut; work, values that leave and bytes that backward needs of a sample:"
LAYOUTS = "Layouts of {}, the fewest bytes first:"
LEGEND = """\
MB: payload and headers that all ranks together send in {}, with each codec; set: as the configuration says
about: those of typical values, where they depend on the values
in a row: messages that can only follow each other; on a slow link every one costs its delay
MB a rank: parameters, gradients, optimizer, memories and activations of the largest rank, in the first step"""

Refused = dict[str, list[GridShape]]


def main(config: Path, ranks: int, overrides: list[str], *, measure: bool, output: Path | None) -> int:
    """Print units and layouts, the fewest bytes first; warnings and refusals go to the error stream."""
    if (hinted_size() or ("", 1))[1] > 1:
        if hinted_rank() == 0:
            print("mpitrain: plan: start it without a launcher; it needs no ranks", file=sys.stderr)
        return ExitCode.MPI
    try:
        resolved = load_config(config, overrides)
        chosen = resolved.config
        for warning in resolved.warnings():
            print(f"mpitrain: warning: {warning}", file=sys.stderr)
        costs = Costs(chosen, open_dataset(chosen.data, chosen.model.task, chosen.train.seed), measure)
        if chosen.parallel.cuts and chosen.parallel.pp > 1:
            costs.divider.replica(GridShape(1, chosen.parallel.pp, 1))  # refuses cuts that cannot be
        possible, refused = compare(costs, ranks)
        if output:
            write_output(output, json.dumps(_records(costs, possible, refused), indent=1) + "\n", "--json")
    except MpitrainError as error:
        print(f"mpitrain: {error}", file=sys.stderr)
        return int(error.exit_code)
    _show(costs, ranks, possible, refused)
    return 0 if possible else ExitCode.CONFIG


def _show(costs: Costs, ranks: int, possible: Sequence[LayoutCost], refused: Refused) -> None:
    console = Console(highlight=False, soft_wrap=True)
    tables = Console(highlight=False, width=None if console.is_terminal else WIDTH)
    kind, batch = costs.config.model.kind, costs.config.train.batch_size
    console.print(f"{kind} of {costs.num_parameters:,} parameters, {batch} samples a step")
    console.print(f"\n{UNITS}", markup=False)
    tables.print(_unit_table(costs))
    if possible:
        console.print(LAYOUTS.format(count(ranks, "rank")), markup=False)
        tables.print(_layout_table(possible))
        console.print("\n".join([_legend(costs.config.exchange), *_verdict(possible)]), markup=False)
    for reason, shapes in refused.items():
        console.print(f"left out: {', '.join(map(_shape, shapes))}: {reason}", markup=False)


def _legend(exchange: ExchangeConfig) -> str:
    if exchange.when == "local" and exchange.h > 1:
        return LEGEND.format(f"a step (of what replicas exchange after {exchange.h} steps, the mean)")
    if exchange.when == "server":
        return LEGEND.format("a step (and what servers answer; after the last step of a round, the weights raw)")
    if exchange.warmup_steps or exchange.raw_last_steps:
        first, last = exchange.warmup_steps, exchange.raw_last_steps
        return LEGEND.format(f"a step (gradients travel raw in the first {first} and the last {last})")
    return LEGEND.format("the first step")


def _records(costs: Costs, possible: Sequence[LayoutCost], refused: Refused) -> list[Record]:
    work = "work_s" if costs.measure else "work_multiply_adds"
    records: list[Record] = [
        {
            "unit": number,
            "name": unit.name,
            "parameters": unit.num_parameters,
            work: unit.work,
            "output_values": unit.output_size,
            "kept_bytes": kept_bytes([unit]),
        }
        for number, unit in enumerate(costs.units)
    ]
    records += [_layout_record(cost) for cost in possible]
    records += [{**_place(shape), "refused": reason} for reason, shapes in refused.items() for shape in shapes]
    return records


def _layout_record(cost: LayoutCost) -> Record:
    record: Record = {**_place(cost.shape), "cuts": _cuts(cost)}
    for name, axis in cost.axes.items():
        record |= {f"{name}_bytes": axis.configured.nbytes, f"{name}_messages": axis.configured.messages}
        if axis.uncompressed:
            record |= {f"{name}_uncompressed_bytes": axis.uncompressed.nbytes}
        record |= {f"{name}_{codec}_bytes": sent.nbytes if sent else None for codec, sent in axis.sent.items()}
    record |= {"total_bytes": cost.configured.nbytes, "total_about": cost.configured.about}
    record |= {"messages_in_a_row": cost.in_a_row}
    record |= {"memory_bytes": cost.memory_bytes}
    return record | {f"memory_{part}_bytes": nbytes for part, nbytes in cost.memory.items()}


def _place(shape: GridShape) -> Record:
    return {"dp": shape.dp, "pp": shape.pp, "tp": shape.tp, "servers": shape.servers}


def _cuts(cost: LayoutCost) -> str:
    return ",".join(map(str, cost.cuts))


def _shape(shape: GridShape) -> str:
    served = f" servers {shape.servers}" if shape.servers else ""
    return f"dp {shape.dp} pp {shape.pp} tp {shape.tp}{served}"


def _table(text: Iterable[str], numbers: Iterable[str]) -> Table:
    table = Table(box=box.SIMPLE, padding=(0, 1))
    for name in text:
        table.add_column(name)
    for name in numbers:
        table.add_column(name, justify="right")
    return table


def _unit_table(costs: Costs) -> Table:
    table = _table(["", "unit"], ["parameters", "ms" if costs.measure else "multiply-adds", "values out", "bytes kept"])
    for number, unit in enumerate(costs.units):
        work = f"{unit.work * 1e3:,.4f}" if costs.measure else f"{unit.work:,.0f}"
        sizes = [f"{value:,}" for value in (unit.output_size, kept_bytes([unit]))]
        table.add_row(str(number), unit.name, f"{unit.num_parameters:,}", work, *sizes)
    return table


def _layout_table(possible: Sequence[LayoutCost]) -> Table:
    typical = {"set"} if any(cost.configured.about for cost in possible) else set()
    for cost in possible:
        typical |= {name for axis in cost.axes.values() for name, sent in axis.sent.items() if sent and sent.about}
    megabytes = [f"{'about ' if name in typical else ''}{name} MB" for name in (*COMPARED, "set")]
    numbers = [*megabytes, "in a row", "MB a rank"]
    served = any(cost.shape.servers for cost in possible)
    table = _table(["dp", *(["servers"] if served else []), "pp", "tp", "cuts", "axis"], numbers)
    for cost in possible:
        shape = cost.shape
        rows = [shape.dp, *([shape.servers] if served else [])]
        head = [*map(str, (*rows, shape.pp, shape.tp)), _cuts(cost).replace(",", " ")]
        tail = [
            f"{cost.in_a_row:,.0f}" if cost.in_a_row == int(cost.in_a_row) else f"{cost.in_a_row:.3g}",
            f"{cost.memory_bytes / 1e6:,.2f}",
        ]
        lines = _axis_lines(cost)
        for index, line in enumerate(lines):
            first = index == 0
            table.add_row(*(head if first else [""] * len(head)), *line, *(tail if first else []))
    return table


def _axis_lines(cost: LayoutCost) -> list[list[str]]:
    """Show every axis of more than one rank, and their sums before where there are several."""
    sizes = {"data": cost.shape.dp + cost.shape.servers, "pipeline": cost.shape.pp, "tensor": cost.shape.tp}
    axes = {name: axis for name, axis in cost.axes.items() if sizes[name] > 1}
    lines = [[name, *(_mb(sent) for sent in axis.sent.values()), _mb(axis.configured)] for name, axis in axes.items()]
    if len(lines) == 1:
        return lines
    together = []
    for codec in COMPARED:
        sent = [axis.sent[codec] for axis in cost.axes.values()]
        together.append(_mb(None if None in sent else sum((one for one in sent if one), Sent())))
    return [["together" if lines else "none", *together, _mb(cost.configured)], *lines]


def _mb(sent: Sent | None) -> str:
    return "-" if sent is None else f"{sent.nbytes / 1e6:,.3f}"


def _verdict(possible: Sequence[LayoutCost]) -> list[str]:
    """Compare a cut between layers with one inside them: the widest that both can be, beside the same data axis."""
    between = {cost.shape.pp: cost for cost in possible if cost.shape.tp == 1 < cost.shape.pp}
    inside = {cost.shape.tp: cost for cost in possible if cost.shape.pp == 1 < cost.shape.tp}
    if not between.keys() & inside.keys():
        return []
    ways = max(between.keys() & inside.keys())
    cut, split = between[ways], inside[ways]
    less, more = cut.axes["pipeline"].sent["raw"], split.axes["tensor"].sent["raw"]
    if not less or not more or not less.nbytes:
        return []
    return [
        f"A model over {ways} ranks sends {_mb(less)} MB raw where it is cut between layers (pp), {_mb(more)} MB where "
        f"it is cut inside them (tp): {more.nbytes / less.nbytes:.1f} times as much."
    ]
