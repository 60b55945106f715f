"""``mpitrain bench convergence``: the same training in several ways and with the same seeds, result against bytes.

``loss`` and ``metric`` are of the test samples, ``train_loss`` is the mean over the last tenth of the steps, ``bytes``
are what all ranks have sent of gradients, changes and weights. ``composed_s`` is no measurement: see `bench.composed`.

A run that is finished is not made again, so an interrupted table goes on where it stopped.
"""

import sys
import zlib
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import cast

import numpy as np

from mpitrain.bench.cells import Cell, parse_cells
from mpitrain.bench.composed import Link, composed_s, parse_link, ran
from mpitrain.bench.launcher import Job, processes
from mpitrain.bench.paired import column, difference, mean
from mpitrain.bench.records import Record, show
from mpitrain.comm.fault import FaultHook
from mpitrain.config.load import load_config
from mpitrain.errors import ConfigError, MpitrainError, count

TIMED_STEPS, WARM_UP_STEPS = 20, 5


@dataclass(frozen=True)
class Table:
    """What is compared.

    Attributes
    ----------
    config : Path
        Configuration file.
    workers, seeds : int
        Ranks that train, and runs of each cell.
    overrides : tuple of str
        Settings of all cells.
    folder : Path
        Where runs are kept.
    link : Link or None
        Of composed times.
    faults : str
        What goes wrong in all runs on purpose (`comm.fault`), such as slow ranks for stale gradients.
    """

    config: Path
    workers: int
    seeds: int
    overrides: tuple[str, ...]
    folder: Path
    link: Link | None = None
    faults: str = ""

    @property
    def place(self) -> Path:
        """Folder of this configuration, size, and of these faults."""
        broken = f"-fault-{zlib.crc32(self.faults.encode()):08x}" if self.faults else ""
        return self.folder / self.config.stem / f"{self.workers}-ranks{broken}"


def main(
    config: Path,
    ranks: int,
    seeds: int,
    cells: list[str],
    overrides: list[str],
    folder: Path,
    *,
    link: str | None,
    faults: str,
    path: Path | None,
) -> int:
    """Make all runs, print the table of means, and write the single results to ``path``."""
    try:
        parsed = parse_cells(cells)
        table = Table(config, ranks, seeds, tuple(overrides), folder, parse_link(link) if link else None, faults)
        FaultHook(faults, 0)  # refused before the first run, if it is no list of faults
        compute_s = _compute_s(table) if table.link else 0.0
        runs = {cell.name: _runs(table, cell, compute_s) for cell in parsed}
    except MpitrainError as error:
        print(f"mpitrain: {error}", file=sys.stderr)
        return int(error.exit_code)
    base = parsed[0].name
    records = [_means(name, results, base, runs[base]) for name, results in runs.items()]
    show(f"{config.stem}, {ranks} workers, {count(seeds, 'seed')}; {_explained(base, link, compute_s)}", records, None)
    if path:
        show("single runs", [record for results in runs.values() for record in results], path)
    return 0


def _explained(base: str, link: str | None, compute_s: float) -> str:
    text = f"vs pct: 95 % interval of the difference to {base}, paired by seed"
    if link is None:
        return text
    rate, delay = link.split(":")
    return (
        f"{text}; composed s: not measured, but composed of {1e3 * compute_s:.3g} ms of computation a step (median of "
        f"{TIMED_STEPS} steps of a rank alone) and a cost model of links of {rate} Mbit/s and {delay} ms one way"
    )


def _compute_s(table: Table) -> float:
    """Measure the computation of a step: of one rank that has the machine for itself, with one worker's share."""
    config = load_config(table.config, list(table.overrides)).config
    if config.parallel.pp * config.parallel.tp > 1:
        raise ConfigError("bench: --link: time is composed for whole models only; set parallel.pp = parallel.tp = 1")
    settings = (
        *table.overrides,
        f"train.batch_size={max(1, config.train.batch_size // table.workers)}",
        f"train.steps={WARM_UP_STEPS + TIMED_STEPS}",
        "exchange.when=sync",
        "exchange.collective=direct",
        "exchange.codec=raw",
        "exchange.memory=none",
        "data.placement=shuffled",
        "checkpoint.every=0",
        "train.eval_every=0",
    )
    job = Job(table.config, 1, table.place / "computation", settings)
    job.complete("computation of one rank")
    return median(row["compute_s"] for row in job.rows()[WARM_UP_STEPS:])


def _runs(table: Table, cell: Cell, compute_s: float) -> list[Record]:
    results: list[Record] = []
    for seed in range(table.seeds):
        settings = (*table.overrides, *cell.overrides, f"train.seed={seed}")
        ranks = processes(table.config, table.workers, settings)
        job = Job(table.config, ranks, table.place / cell.folder / f"seed-{seed}", settings, table.faults)
        label = f"{cell.name}, seed {seed}"
        result = _result(table, label, job, compute_s) if job.complete(label) else _diverged(table)
        results.append({"config": f"{table.config.stem} {cell.name}", "seed": seed, **result})
    return results


def _result(table: Table, label: str, job: Job, compute_s: float) -> Record:
    summary = cast(dict[str, object], job.summary())
    if not summary["replicas_identical"]:
        raise ConfigError(f"bench: {label}: the replicas are not identical")
    metric = cast(dict[str, float], summary["metric"])
    staleness = cast(dict[str, float], summary.get("staleness") or {"mean": 0.0, "max": 0})
    record: Record = {
        "metric": metric["value"],
        "loss": cast(float, summary["loss"]),
        "train_loss": job.train_loss(),
        "bytes": cast(int, summary["sent_bytes_total"]) - cast(int, summary["replica_bytes_total"]),
        "staleness_mean": staleness["mean"],
        "staleness_max": staleness["max"],
        "wall_s": cast(float, summary["wall_s"]),
    }
    if table.link:
        coding_s = fmean(row["encode_s"] + row["decode_s"] for row in job.rows())
        run = ran(load_config(table.config, list(job.overrides)).config, summary, compute_s + coding_s)
        record["composed_s"] = composed_s(run, table.link)
    return record


def _diverged(table: Table) -> Record:
    """Fill the line of a run that has diverged."""
    names = ("metric", "loss", "train_loss", "bytes", "staleness_mean", "staleness_max", "wall_s")
    return dict.fromkeys((*names, "composed_s") if table.link else names)


def _means(cell: str, results: list[Record], base: str, baseline: list[Record]) -> Record:
    """Sum up the runs that have a result."""
    finished = [result for result in results if result["loss"] is not None]
    record: Record = {"cell": cell}
    if diverged := len(results) - len(finished):
        record["cell"] = f"{cell} ({diverged} of {len(results)} diverged)"
    metrics = column(finished, "metric")
    record["metric"] = mean(metrics)
    record["std"] = float(np.std(metrics, ddof=1)) if len(metrics) > 1 else None
    for loss, versus in (("loss", "vs_pct"), ("train_loss", "train_vs_pct")):
        record[loss] = mean(column(finished, loss))
        record[versus] = difference(results, baseline, loss) if cell != base else "-"
    sent, of_base = (mean(column(each, "bytes")) for each in (finished, baseline))
    record["bytes"] = None if sent is None else int(sent)
    record["of_" + base] = sent / of_base if sent and of_base else None
    record["stale_mean"] = mean(column(finished, "staleness_mean"))
    record["stale_max"] = max((cast(int, result["staleness_max"]) for result in finished), default=None)
    if "composed_s" in results[0]:
        record["composed_s"] = mean(column(finished, "composed_s"))
    record["wall_s"] = float(np.median(column(finished, "wall_s"))) if finished else None
    return record
