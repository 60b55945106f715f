"""Training through servers: what the configuration asks of them, and what the exchanges of both sides share."""

from abc import abstractmethod
from collections.abc import Mapping
from math import sqrt
from typing import cast

import numpy as np
import numpy.typing as npt

from mpitrain.codecs.registry import make_codec
from mpitrain.collectives.base import Traffic, Transport
from mpitrain.comm.agreement import gather
from mpitrain.comm.grid import ProcessGrid
from mpitrain.config.schema import Config
from mpitrain.errors import ConfigError, DivergedError, count
from mpitrain.optim.compensation import Compensation
from mpitrain.optim.schedule import Schedule
from mpitrain.parallel.shared import SharedTensors
from mpitrain.params import Layout
from mpitrain.server.clocks import rule_of
from mpitrain.server.keeper import Policy, layout_of
from mpitrain.server.link import Column, Link
from mpitrain.server.setting import Setting
from mpitrain.train.buckets import codec_of, pieces_of
from mpitrain.train.exchange import Exchange
from mpitrain.train.ledger import Account, Ledger, summary_of
from mpitrain.train.runfolder import Row
from mpitrain.train.weights import Weights


def setting_of(
    config: Config, layout: Layout, shared: SharedTensors, grid: ProcessGrid, dtype: npt.DTypeLike
) -> Setting:
    """Cut what a column holds into pieces, the same on all its ranks; raises ConfigError: a server would have none."""
    exchange = config.exchange
    pieces = pieces_of(layout, exchange, shared.holders, dtype)
    if (exchange.aggregate or 0) > grid.shape.dp:
        raise ConfigError(
            f"exchange.aggregate = {exchange.aggregate}, but {count(grid.shape.dp, 'worker')} train; set it to "
            f"{grid.shape.dp} or less, or leave it out for all"
        )
    if (exchange.servers or 0) > len(pieces):
        raise ConfigError(
            f"exchange.servers = {exchange.servers} share the model bucket by bucket, but it has "
            f"{count(len(pieces), 'bucket')}; set exchange.servers = {len(pieces)} or less, or a smaller "
            "exchange.bucket_mb"
        )
    return Setting(grid.shape.dp, pieces, rule_of(exchange), make_codec(exchange.server_codec, dtype))


def owned_layout(setting: Setting, grid: ProcessGrid) -> Layout:
    """Lay out what this server holds of the model."""
    return layout_of(setting.owned_by(grid.row - grid.shape.dp, grid.shape.servers))


def policy_of(config: Config, schedule: Schedule, shared: SharedTensors, workers: int) -> Policy:
    """Read how gradients become updates. What the server has counted drives the schedule, and nobody else's count."""
    exchange = config.exchange
    is_async = exchange.mode == "async"
    updates = workers if is_async else 1
    divisor = {"none": 1.0, "sqrt": sqrt(updates), "linear": float(updates)}[config.optim.lr_scale]

    def rate(clocks: float, staleness: float) -> float:
        lr = schedule(clocks) / divisor
        return lr / (1 + staleness) if is_async and exchange.staleness_lr == "inverse" else lr

    compensation = None
    if is_async and exchange.delay_compensation != "none":
        decay = exchange.dc_decay if exchange.delay_compensation == "adaptive" else None
        compensation = Compensation(strength=exchange.dc_strength, decay=decay)
    return Policy(rate, config.train.clip_norm, compensation, shared.counts)


class Served(Exchange):
    """What workers and servers have in common: rounds, and an account that all know where they end.

    Parameters
    ----------
    weights : Weights
        What this rank holds.
    config : Config
        When all ranks meet.
    grid : ProcessGrid
        The ranks.
    setting : Setting
        The same on all ranks of the column.
    transport : Transport
        Limits of the messages.
    """

    ends_early = True

    def __init__(
        self, weights: Weights, config: Config, grid: ProcessGrid, setting: Setting, transport: Transport
    ) -> None:
        super().__init__(weights)
        self._config, self._grid, self.setting = config, grid, setting
        column = Column(grid.column.comm, "column", grid.column.members, setting.workers)
        self.link = Link(column, transport)
        self.ledger = Ledger(setting.workers)
        self._facts: dict[str, object] = {"optimizer_step": 0, "version": 0}
        self._first = 1

    @property
    def version(self) -> int:
        """Updates of the whole run, where the last round ended."""
        return int(str(self._facts["version"]))

    def open_round(self, step: int) -> None:
        """Begin the steps up to the next one at which all ranks must meet."""
        train, every = self._config.train, self._config.checkpoint.every
        self.last = min([train.steps, *(-(-step // gap) * gap for gap in (train.eval_every, every) if gap)])
        self._first = step
        self._begin(step - 1)

    @abstractmethod
    def _begin(self, clock: int) -> None:
        """Begin a round behind a clock, up to ``last``."""

    def report(self, rows: list[Row]) -> None:
        """Complete the rows of a round by what the servers know. Collective over the world.

        Raises
        ------
        DivergedError
            On all ranks, where weights are no longer finite.
        """
        reports = [cast(dict[str, object], found) for found in gather(self._grid.world, self._report()) if found]
        told = next(report for report in reports if "rows" in report)
        for row, numbers in zip(rows, cast(list[Row], told["rows"]), strict=True):
            row |= {name: value for name, value in numbers.items() if name != "lr" or value is not None}
        self._facts = cast(dict[str, object], told["facts"])
        self.ledger.accounts = [
            Account.read(each) for each in cast(list[Mapping[str, object]], self._facts["accounts"])
        ]
        if any(report["unsound"] for report in reports):
            error = DivergedError(
                f"step {self.last}: the weights on the servers are no longer finite; lower optim.lr, lengthen "
                "optim.warmup_steps, or set train.clip_norm"
            )
            error.agreed = True
            raise error

    def _report(self) -> dict[str, object] | None:
        """Tell what this rank alone knows of the round."""
        return None

    def facts(self) -> dict[str, object]:
        """Collect what the first server told at the end of the last round."""
        return self._facts

    def loaded(self, facts: Mapping[str, object], *, local: bool) -> None:
        """Go on from a checkpoint."""
        super().loaded(facts, local=local)
        accounts = cast(list[Mapping[str, object]], facts.get("accounts", []))
        self._facts = {"optimizer_step": facts["optimizer_step"], "version": facts["version"], "accounts": accounts}
        if len(accounts) == len(self.ledger.accounts):
            self.ledger.accounts = [Account.read(each) for each in accounts]

    def summary(self) -> dict[str, object]:
        """Sum up staleness, pushes and waits of every worker. Collective over the world."""
        waits = cast(list[list[float]], gather(self._grid.world, self._waits()))
        inside = self._grid.shape.pp * self._grid.shape.tp
        workers = [
            {
                "worker": number,
                **account.document(),
                "staleness_mean": summary_of([account])["mean"],
                "staleness_max": summary_of([account])["max"],
                "wait_p95_s": float(np.percentile(waits[number * inside] or [0.0], 95)),
            }
            for number, account in enumerate(self.ledger.accounts)
        ]
        return {"staleness": summary_of(self.ledger.accounts), "workers": workers}

    def _waits(self) -> list[float]:
        """List the seconds that this worker has waited for answers, step by step."""
        return []

    def sizes(self) -> list[int]:
        """List the elements of each bucket of the column."""
        return [piece.size for piece in self.setting.pieces]

    def tensors_by_codec(self) -> dict[str, list[str]]:
        """Name the tensors that each codec serves."""
        groups: dict[str, list[str]] = {}
        for piece in self.setting.pieces:
            for segment in piece.segments:
                groups.setdefault(codec_of(segment.spec, self._config.exchange), []).append(segment.spec.name)
        return groups

    def spent(self) -> Traffic:
        """Take what the messages have cost since the last call."""
        traffic, self.link.traffic = self.link.traffic, Traffic()
        return traffic
