"""Scoring a finished or stopped run again, on any number of ranks."""

from pathlib import Path
from typing import cast

from mpitrain.checkpoint.store import CheckpointStore
from mpitrain.comm.agreement import agree, same_everywhere
from mpitrain.comm.fault import FaultHook
from mpitrain.comm.grid import Axis, Comm, ProcessGrid
from mpitrain.config.load import Resolved, read_config, resolve
from mpitrain.errors import ConfigError
from mpitrain.train.build import Learned, build
from mpitrain.train.evaluate import evaluate
from mpitrain.train.runfolder import CONFIG, Row, RunFolder
from mpitrain.train.session import named
from mpitrain.train.start import fit_grid


def score_run(folder: RunFolder, comm: Comm, overrides: list[str], *, step: int | None = None) -> Row:
    """Score a checkpoint of a run on its test samples. Collective over ``comm``, of any size.

    Parameters
    ----------
    folder : RunFolder
        Its config.toml says what model and data.
    overrides : list of str
        ``section.key=value``, as for training: another ``data.path``, for example.
    step : int, optional
        The newest one where left out.

    Returns
    -------
    dict
        Run, step, metric, loss, number of test samples, ranks.

    Raises
    ------
    ConfigError, DataError, CheckpointError
        On all ranks.
    """
    world = Axis(comm, "world")
    resolved = agree(world, lambda: _read(folder.path, overrides))
    same_everywhere(world, resolved.lines(), "the configurations")
    resolved, shape = fit_grid(resolved, world)
    with ProcessGrid(comm, shape) as grid:
        store = CheckpointStore(folder.checkpoints, grid.world, resolved.config.checkpoint.keep, FaultHook("", 0))
        meta = store.load_tensors({}, step=step)
        parts = build(resolved.config, grid, Learned(**cast(dict[str, list[str]], meta["learned"])))  # type: ignore[arg-type]
        tensors, shards = named("params", parts.params)
        store.load_tensors(tensors, shards=shards, step=cast(int, meta["step"]), all_of="params/")
        result = evaluate(parts)
    return {
        "run": str(folder.path),
        "step": meta["step"],
        "metric": {"name": f"test_{result.name}", "value": result.metric},
        "loss": result.loss,
        "num_test": parts.dataset.num_test,
        "ranks": world.size,
    }


def _read(folder: Path, overrides: list[str]) -> Resolved:
    """Read the configuration of a run, without the grid that trained it and what that exchanged."""
    path = folder / CONFIG
    if not path.is_file():
        raise ConfigError(f"eval: {folder} is not a run folder: it has no {CONFIG}; give the run.folder of a training")
    tree = read_config(path)
    for section in ("parallel", "exchange"):
        tree.pop(section, None)
    return resolve(tree, str(path), overrides)
