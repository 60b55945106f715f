"""Our training step as a product among others: the loop that ``train`` runs, without a run folder."""

import math
from collections.abc import Sequence

from msgspec import structs

from mpitrain.bench.cells import Cell
from mpitrain.bench.rounds import Family, Taken
from mpitrain.comm.agreement import agree
from mpitrain.comm.fault import FaultHook
from mpitrain.comm.grid import Axis, ProcessGrid
from mpitrain.comm.runtime import Position
from mpitrain.comm.signals import StopRequest
from mpitrain.config.schema import Config
from mpitrain.errors import ConfigError
from mpitrain.partition import GridShape
from mpitrain.train.build import build
from mpitrain.train.console import Narrator
from mpitrain.train.loop import Loop
from mpitrain.train.stopping import StopWish


class TrainingStep:
    """The loop of a configuration, one step at a time. Collective over the world of ``grid``.

    Parameters
    ----------
    name : str
        In tables.
    config : Config
        With all derived values; ``exchange.when`` must be sync.
    grid : ProcessGrid
        Owned by the caller.

    Attributes
    ----------
    name, parts
    """

    def __init__(self, name: str, config: Config, grid: ProcessGrid) -> None:
        self.name = name
        self.parts = build(config, grid)
        self.parts.params.initialize(config.train.seed)
        faults, rank = FaultHook("", grid.world.rank), grid.world.rank
        wish = StopWish(StopRequest(), faults, config.run)
        self._loop = Loop(self.parts, wish, Narrator(rank, config.train.steps), faults, Position())

    def step(self) -> Taken:
        """Take the next step."""
        rows, _ = self._loop.round()
        if self._loop.failure:
            raise self._loop.failure
        row = rows[-1]
        norm = math.nan if row["grad_norm"] is None else float(str(row["grad_norm"]))  # None: the step was rejected
        return Taken(float(str(row["loss"])), norm, int(str(row["sent_bytes"])))

    def keep_gradient(self) -> None:
        """Clip no more, so that after a step ``parts.grads`` holds its gradient as backward left it."""
        self.parts.exchange.weights.clip_norm = 0.0

    def close(self) -> None:
        """End the threads that read."""
        self.parts.loader.close()


class OurFamily:
    """Our step with every codec, and without exchange. Collective over ``world``; a context manager.

    Without exchange it is the same loop on a rank that is alone in its world, with its share of the batch: it runs the
    same forward, backward and optimizer, and there is nobody to whom it could send.

    Parameters
    ----------
    world : Axis
        All ranks.
    configs : list of (Cell, Config)
        What is measured, by the name of the cell.

    Attributes
    ----------
    family : Family
    alone, ways
        Its members, as what they are.
    """

    def __init__(self, world: Axis, configs: Sequence[tuple[Cell, Config]]) -> None:
        first = configs[0][1]
        self._single = world.comm.Split(world.rank)
        self._grids = [ProcessGrid(world.comm, GridShape(world.size)), ProcessGrid(self._single, GridShape(1))]
        train = structs.replace(first.train, batch_size=first.train.batch_size // world.size)
        single = structs.replace(first, train=train, parallel=structs.replace(first.parallel, dp=1))
        self.ways = [TrainingStep(cell.name, config, self._grids[0]) for cell, config in configs]
        self.alone = agree(world, lambda: TrainingStep("without exchange", single, self._grids[1]))
        self.family = Family(self.alone, self.ways)

    def close(self) -> None:
        """End threads and free communicators. Collective."""
        for one in (self.alone, *self.ways):
            one.close()
        for grid in self._grids:
            grid.close()
        self._single.Free()


def check_config(config: Config, ranks: int) -> None:
    """Refuse what has no step without exchange to compare with.

    Raises
    ------
    ConfigError
    """
    parallel, exchange = config.parallel, config.exchange
    if parallel.pp * parallel.tp > 1:
        raise ConfigError(
            "bench step: compares replicas of whole models, but parallel.pp * parallel.tp = "
            f"{parallel.pp} * {parallel.tp}; set both to 1"
        )
    if exchange.when != "sync" or exchange.servers:
        what = f'exchange.when = "{exchange.when}"' if exchange.when != "sync" else 'exchange.collective = "server"'
        raise ConfigError(
            f"bench step: compares steps that end with the same gradient on all ranks, but {what}; "
            'set exchange.when = "sync" and another collective'
        )
    if config.train.batch_size % ranks:
        raise ConfigError(
            f"bench step: train.batch_size = {config.train.batch_size} is not a multiple of {ranks} ranks, which would "
            f"compute different steps; set it to {max(1, config.train.batch_size // ranks) * ranks}"
        )
