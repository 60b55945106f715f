"""``mpitrain bench stragglers``: throughput where ranks are slow, beside a simulation that is given the same seconds.

Every step of a worker sleeps; *rotating*: each is now and then slower, as drawn from rank and step; *permanent*: the
last worker always is. The simulation knows these seconds, and for all else of a step takes what worker 0 needed in the
median; messages cost it nothing. ``sim_gain`` takes the median of all runs, so that only the rules differ. A run that
is finished is not made again.
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import cast

from mpitrain.bench.cells import Cell, parse_cells
from mpitrain.bench.composed import meetings
from mpitrain.bench.launcher import Job, processes
from mpitrain.bench.paired import column, difference, mean
from mpitrain.bench.records import Record, show
from mpitrain.comm.fault import Fault, slow_seconds
from mpitrain.config.load import load_config
from mpitrain.config.schema import Config
from mpitrain.errors import ConfigError, MpitrainError
from mpitrain.server.clocks import ASYNC, Rule, rule_of
from mpitrain.server.simulate import Simulated, simulate

PATTERNS = ("rotating", "permanent")

WITHOUT_BREAKS = ("train.eval_every=0", "checkpoint.every=0")
"""Nothing interrupts the steps, unless the caller wants it."""


@dataclass(frozen=True)
class Slowness:
    """How slow, and when.

    Attributes
    ----------
    seconds : float
        That every step of every worker sleeps.
    factor : float
        By how much a slow step sleeps longer.
    probability : float
        Of a slow step (rotating).
    """

    seconds: float
    factor: float
    probability: float

    def faults(self, pattern: str, workers: int) -> list[Fault]:
        """List what every worker suffers."""
        if pattern == "rotating":
            slow = Fault("slow", seconds=self.seconds, factor=self.factor, probability=self.probability)
            return [replace(slow, rank=rank) for rank in range(workers)]
        factors = [1.0] * (workers - 1) + [self.factor]
        return [Fault("slow", rank=rank, seconds=self.seconds * factor) for rank, factor in enumerate(factors)]

    def folder(self, pattern: str) -> str:
        """Name for a folder."""
        often = f"-p{self.probability:g}" if pattern == "rotating" else ""
        return f"{pattern}-{self.seconds:g}s-x{self.factor:g}{often}"


def variable(faults: list[Fault]) -> str:
    """Write faults as the environment variable has them."""
    return ";".join(
        f"{each.kind}:rank={each.rank},seconds={each.seconds},factor={each.factor},probability={each.probability}"
        for each in faults
    )


@dataclass(frozen=True)
class Table:
    """What is compared: the settings of all lines."""

    config: Path
    workers: int
    seeds: int
    overrides: tuple[str, ...]
    folder: Path
    slowness: Slowness


def main(
    config: Path,
    ranks: int,
    seeds: int,
    cells: list[str],
    overrides: list[str],
    folder: Path,
    *,
    slowness: tuple[float, float, float],
    path: Path | None,
) -> int:
    """Make all runs, and print what was measured beside what was simulated."""
    table = Table(config, ranks, seeds, (*WITHOUT_BREAKS, *overrides), folder, Slowness(*slowness))
    try:
        parsed = parse_cells(cells)
        records = [record for pattern in PATTERNS for record in _lines(table, pattern, parsed)]
    except MpitrainError as error:
        print(f"mpitrain: {error}", file=sys.stderr)
        return int(error.exit_code)
    slow = table.slowness
    title = (
        f"{config.stem}, {ranks} workers, {seeds} seeds; every step sleeps {1e3 * slow.seconds:g} ms, {slow.factor:g} "
        f"times that with probability {slow.probability:g} (rotating) or always on the last worker (permanent); "
        f"gain, loss vs pct: beside {parsed[0].name}; sim: simulated"
    )
    show(title, records, path)
    return 0


def _lines(table: Table, pattern: str, cells: list[Cell]) -> list[Record]:
    faults = table.slowness.faults(pattern, table.workers)
    results = {cell.name: _runs(table, pattern, cell, faults) for cell in cells}
    # What is gained must not depend on the machine's mood during one run or the other.
    step_s = median(cast(float, run["own_s"]) for runs in results.values() for run in runs)
    ideal = [simulated_run(_config(table, cell), faults, step_s).clocks_per_s for cell in cells]
    baseline = results[cells[0].name]
    return [
        {"pattern": pattern, "cell": name, **_line(runs, baseline, sim_gain=per_s / ideal[0])}
        for (name, runs), per_s in zip(results.items(), ideal, strict=True)
    ]


def _config(table: Table, cell: Cell) -> Config:
    return load_config(table.config, [*table.overrides, *cell.overrides]).config


def _runs(table: Table, pattern: str, cell: Cell, faults: list[Fault]) -> list[Record]:
    results: list[Record] = []
    for seed in range(table.seeds):
        settings = (*table.overrides, *cell.overrides, f"train.seed={seed}")
        parts = (table.config.stem, f"{table.workers}-ranks", table.slowness.folder(pattern), cell.folder)
        place = table.folder.joinpath(*parts, f"seed-{seed}")
        ranks = processes(table.config, table.workers, settings)
        job = Job(table.config, ranks, place, settings, faults=variable(faults))
        if not job.complete(f"{pattern}, {cell.name}, seed {seed}"):
            raise ConfigError(f"bench: {cell.name}, seed {seed} has diverged: {place}")
        results.append(_result(job, _config(table, cell), faults))
    return results


def _result(job: Job, config: Config, faults: list[Fault]) -> Record:
    rows, summary = job.rows(), cast(dict[str, object], job.summary())
    seconds = rows[-1]["time_s"] - rows[0]["time_s"] + rows[0]["step_s"]
    waited = [float(each["wait_s"]) for each in cast(list[dict[str, float]], summary["per_rank"])[: len(faults)]]
    staleness = cast(dict[str, float], summary.get("staleness") or {"mean": 0.0, "max": 0})
    step_s = own_s(rows, faults[0])
    simulated = simulated_run(config, faults, step_s)
    return {
        "own_s": step_s,
        "steps_per_s": len(rows) / seconds,
        "simulated_per_s": simulated.clocks_per_s,
        "waiting": fmean(waited) / seconds,
        "simulated_waiting": fmean(simulated.waiting_s) / simulated.makespan_s,
        "loss": cast(float, summary["loss"]),
        "stale_mean": staleness["mean"],
        "stale_max": staleness["max"],
        "simulated_mean": simulated.mean_staleness,
        "simulated_max": max(simulated.staleness),
    }


def own_s(rows: list[dict[str, float]], fault: Fault) -> float:
    """Return what a step of worker 0 takes beside sleeping and waiting: the median, in seconds."""
    busy = (row["compute_s"] + row["encode_s"] + row["decode_s"] for row in rows)
    return max(0.0, median(s - slow_seconds(fault, 0, int(row["step"])) for s, row in zip(busy, rows, strict=True)))


def simulated_run(config: Config, faults: list[Fault], step_s: float) -> Simulated:
    """Simulate the run whose steps take ``step_s`` and what the faults add."""
    steps = range(1, config.train.steps + 1)
    seconds = [[step_s + slow_seconds(fault, rank, step) for step in steps] for rank, fault in enumerate(faults)]
    # Between two meetings, local steps wait for nobody.
    rules = {"sync": Rule(), "local": Rule(ASYNC), "server": rule_of(config.exchange)}
    return simulate(seconds, rules[config.exchange.when], rounds=meetings(config))


def _line(runs: list[Record], baseline: list[Record], *, sim_gain: float) -> Record:
    means = {key: mean(column(runs, key)) or 0.0 for key in runs[0]}
    return {
        "steps_per_s": means["steps_per_s"],
        "sim_per_s": means["simulated_per_s"],
        "of_sim": means["steps_per_s"] / means["simulated_per_s"],
        "gain": means["steps_per_s"] / (mean(column(baseline, "steps_per_s")) or 0.0),
        "sim_gain": sim_gain,
        "waiting": means["waiting"],
        "sim_waiting": means["simulated_waiting"],
        "stale_mean": means["stale_mean"],
        "sim_mean": means["simulated_mean"],
        "stale_max": int(max(column(runs, "stale_max"))),
        "sim_max": int(max(column(runs, "simulated_max"))),
        "loss": means["loss"],
        "loss_vs_pct": difference(runs, baseline, "loss") if runs is not baseline else "-",
    }
