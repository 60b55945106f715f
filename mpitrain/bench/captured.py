"""Gradients of a model as a source for codecs: trained on one rank without compression, caught before the update."""

from functools import partial
from pathlib import Path

import numpy as np
from msgspec import structs

from mpitrain.arrays import Floats
from mpitrain.bench.ours import TrainingStep
from mpitrain.bench.sources import Source, least_bits, mean_square
from mpitrain.comm.grid import Axis, ProcessGrid, alone
from mpitrain.comm.hints import hinted_size
from mpitrain.comm.runtime import start
from mpitrain.config.load import Resolved, load_config
from mpitrain.config.schema import Config, ExchangeConfig, ParallelConfig
from mpitrain.config.validate import with_derived
from mpitrain.errors import ConfigError, DivergedError, LaunchError, count
from mpitrain.params import Layout, Params
from mpitrain.train.buckets import plan_buckets
from mpitrain.train.start import fit_grid

LARGE, SMALL = "large", "small"
"""Tensors that a coarse codec serves, and those that travel as fp16 with every one of them."""


def capture(path: Path, overrides: list[str], step: int) -> Source:
    """Train a configuration for some steps, and take the gradient of the last one.

    It is that of the whole batch, before clipping. [parallel] and [exchange] play no part, ``exchange.bucket_mb``
    apart: values lie and are cut into messages as training with one codec for all large tensors has them.

    Parameters
    ----------
    path : Path
        TOML file.
    overrides : list of str
        ``section.key=value``.
    step : int
        The last step, from 1 on.

    Raises
    ------
    ConfigError, DataError, DivergedError, LaunchError
    """
    if (hinted_size() or ("", 1))[1] > 1:
        raise LaunchError("bench codec: start it without a launcher; it captures gradients on one rank")
    resolved = load_config(path, overrides)
    _check(resolved.config, path, step)
    start()
    grads = _gradient(_for_one_rank(resolved), alone(), step)
    return make_source(path.stem, grads, resolved.config.exchange.bucket_mb, step)


def make_source(name: str, grads: Params, bucket_mb: float | None, step: int) -> Source:
    """Lay the large tensors as training does, and cut them into its buckets; raises ConfigError, DivergedError."""
    layout = Layout(grads.layout.specs, lambda spec: SMALL if spec.small else LARGE)
    if LARGE not in layout.groups:
        raise ConfigError(
            f"bench: --source: {name} has no tensor that a codec would serve, all are small; take a larger model"
        )
    buffer = Params(layout)
    for tensor, values in grads.items():
        buffer[tensor][...] = values
    if not np.isfinite(buffer.flat).all():
        raise DivergedError(
            f"bench: --source: the gradient of step {step} of {name} is not finite; take another --step"
        )
    begin, end = layout.groups[LARGE]
    buckets = [bucket for bucket in plan_buckets(layout, bucket_mb) if bucket[0].group == LARGE]
    messages = [slice(bucket[0].start - begin, bucket[-1].stop - begin) for bucket in buckets]
    tensors: list[Floats] = [buffer[segment.spec.name] for segment in layout.members(LARGE)]
    sizes, powers = [tensor.size for tensor in tensors], [mean_square(tensor) for tensor in tensors]
    told = (
        f"{sum(sizes):,} of the gradient of step {step} of {name}: its large tensors, {len(tensors)} of "
        f"{len(layout.specs)}, in {count(len(messages), 'message')}"
    )
    return Source(name, buffer.flat[begin:end], messages, sum(sizes), partial(least_bits, sizes, powers), told)


def _check(config: Config, path: Path, step: int) -> None:
    """Refuse what would not be the training that the configuration describes; raises ConfigError."""
    if step > config.train.steps:
        raise ConfigError(
            f"bench: --step {step}, but {path} trains for {config.train.steps} steps; take an earlier one, or set "
            "train.steps"
        )
    if config.train.init:
        raise ConfigError(
            f'bench: --source {path}: train.init = "{config.train.init}", but gradients are captured from the first '
            'steps of a new model; --set train.init=""'
        )


def _for_one_rank(resolved: Resolved) -> Resolved:
    exchange = ExchangeConfig(codec="raw", memory="none")
    config = structs.replace(resolved.config, parallel=ParallelConfig(), exchange=exchange)
    return Resolved(with_derived(config), resolved.sources)


def _gradient(resolved: Resolved, world: Axis, step: int) -> Params:
    """Train up to a step. Collective over ``world``, of one rank."""
    fitted, shape = fit_grid(resolved, world)
    grid = ProcessGrid(world.comm, shape)
    training = TrainingStep("captured", fitted.config, grid)
    try:
        for _ in range(step - 1):
            training.step()
        training.keep_gradient()
        training.step()
    finally:
        training.close()
        grid.close()
    return training.parts.grads
