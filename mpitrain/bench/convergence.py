"""``mpitrain bench convergence``: the same training with each codec and the same seeds, result against bytes.

``loss`` and ``metric`` are of the test samples, ``train_loss`` is the mean over the last tenth of the steps.

A run that is finished is not made again, so an interrupted table goes on where it stopped.
"""

import sys
from pathlib import Path
from typing import cast

import numpy as np

from mpitrain.bench.launcher import Job
from mpitrain.bench.records import Record, show
from mpitrain.errors import ConfigError, MpitrainError

T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""Two-sided 95 % quantiles of Student's t for 1, 2, … degrees of freedom; 1.96 beyond."""


def main(
    config: Path, ranks: int, seeds: int, cells: list[str], overrides: list[str], folder: Path, path: Path | None
) -> int:
    """Make all runs, print the table of means, and write the single results to ``path``."""
    try:
        runs = {cell: _runs(config, ranks, seeds, cell, overrides, folder) for cell in cells}
    except MpitrainError as error:
        print(f"mpitrain: {error}", file=sys.stderr)
        return int(error.exit_code)
    baseline = runs[cells[0]]
    records = [_means(cell, results, cells[0], baseline) for cell, results in runs.items()]
    show(f"{config.stem}, {ranks} ranks, {seeds} seeds; loss difference paired by seed", records, None)
    if path:
        show("single runs", [record for results in runs.values() for record in results], path)
    return 0


def _runs(config: Path, ranks: int, seeds: int, cell: str, overrides: list[str], folder: Path) -> list[Record]:
    codec, _, memory = cell.partition(":")
    memory = memory or ("none" if codec == "raw" else "residual")
    results: list[Record] = []
    for seed in range(seeds):
        settings = (
            *overrides,
            f"exchange.codec={codec}",
            f"exchange.memory={memory}",
            f"train.seed={seed}",
        )
        place = folder / config.stem / f"{ranks}-ranks" / cell.replace(":", "-") / f"seed-{seed}"
        job = Job(config, ranks, place, settings)
        if job.summary() is None:
            print(f"{cell}, seed {seed} …", flush=True)
            job.run()
        results.append(_result(cell, seed, job))
    return results


def _result(cell: str, seed: int, job: Job) -> Record:
    summary = job.summary()
    if summary is None or not summary["replicas_identical"]:
        raise ConfigError(f"bench: {cell}, seed {seed}: the replicas are not identical")
    metric = cast(dict[str, float], summary["metric"])
    return {
        "config": f"{job.config.stem} {cell}",
        "seed": seed,
        "metric": metric["value"],
        "loss": cast(float, summary["loss"]),
        "train_loss": job.train_loss(),
        "bytes": cast(int, summary["sent_bytes_total"]),
        "wall_s": cast(float, summary["wall_s"]),
    }


def _means(cell: str, results: list[Record], base: str, baseline: list[Record]) -> Record:
    metrics, sent = _column(results, "metric"), float(np.mean(_column(results, "bytes")))
    record: Record = {
        "codec": cell,
        "metric": float(np.mean(metrics)),
        "metric_std": float(np.std(metrics, ddof=1)) if len(metrics) > 1 else None,
    }
    for loss in ("loss", "train_loss"):
        record[loss] = float(np.mean(_column(results, loss)))
        comparable = cell != base and len(results) > 1
        record[f"{loss}_vs_{base}_pct_95"] = _difference(results, baseline, loss) if comparable else "-"
    record["bytes"] = int(sent)
    record["share_of_" + base] = sent / float(np.mean(_column(baseline, "bytes")))
    record["wall_s"] = float(np.median(_column(results, "wall_s")))
    return record


def _difference(results: list[Record], baseline: list[Record], name: str) -> str:
    """Give the 95 % interval of the mean difference of runs with the same seed, in percent of the baseline."""
    percent = 100 * (_column(results, name) - _column(baseline, name)) / np.mean(_column(baseline, name))
    middle, half = float(np.mean(percent)), _interval(percent)
    return f"{middle - half:+.2f} … {middle + half:+.2f}"


def _column(results: list[Record], name: str) -> np.ndarray:
    return np.array([cast(float, result[name]) for result in results])


def _interval(values: np.ndarray) -> float:
    """Return half the width of the 95 % confidence interval of the mean."""
    degrees = len(values) - 1
    quantile = T_95[degrees - 1] if degrees <= len(T_95) else 1.96
    return quantile * float(np.std(values, ddof=1)) / float(np.sqrt(len(values)))
