"""``mpitrain bench convergence``: the same training with each codec and the same seeds, result against bytes.

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
        results.append(_result(config, cell, seed, job.summary()))
    return results


def _result(config: Path, cell: str, seed: int, summary: dict[str, object] | None) -> Record:
    if summary is None or not summary["replicas_identical"]:
        raise ConfigError(f"bench: {cell}, seed {seed}: the replicas are not identical")
    metric = cast(dict[str, float], summary["metric"])
    return {
        "config": f"{config.stem} {cell}",
        "seed": seed,
        "metric": metric["value"],
        "loss": cast(float, summary["loss"]),
        "bytes": cast(int, summary["sent_bytes_total"]),
        "wall_s": cast(float, summary["wall_s"]),
    }


def _means(cell: str, results: list[Record], base: str, baseline: list[Record]) -> Record:
    metrics, losses = _column(results, "metric"), _column(results, "loss")
    difference = 100 * (losses - _column(baseline, "loss")) / np.mean(_column(baseline, "loss"))
    half = _interval(difference)
    low, high = float(np.mean(difference)) - half, float(np.mean(difference)) + half
    return {
        "codec": cell,
        "metric": float(np.mean(metrics)),
        "metric_std": float(np.std(metrics, ddof=1)) if len(metrics) > 1 else None,
        "loss": float(np.mean(losses)),
        f"loss_vs_{base}_pct_95": "-" if cell == base else f"{low:+.2f} … {high:+.2f}",
        "bytes": int(np.mean(_column(results, "bytes"))),
        "share_of_" + base: float(np.mean(_column(results, "bytes")) / np.mean(_column(baseline, "bytes"))),
        "wall_s": float(np.median(_column(results, "wall_s"))),
    }


def _column(results: list[Record], name: str) -> np.ndarray:
    return np.array([cast(float, result[name]) for result in results])


def _interval(values: np.ndarray) -> float:
    """Return half the width of the 95 % confidence interval of the mean."""
    degrees = len(values) - 1
    if degrees < 1:
        return float("nan")
    quantile = T_95[degrees - 1] if degrees <= len(T_95) else 1.96
    return quantile * float(np.std(values, ddof=1)) / float(np.sqrt(len(values)))
