"""Training through servers: the exchange of a worker, and that of a server."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from math import sqrt
from typing import cast

import numpy as np
import numpy.typing as npt

from mpitrain.arrays import Floats
from mpitrain.codecs.memory import DoubleBuffer
from mpitrain.codecs.noise import noise_key
from mpitrain.codecs.registry import make_codec
from mpitrain.collectives.base import Traffic, Transport
from mpitrain.comm.agreement import NumberGather, gather
from mpitrain.comm.grid import ProcessGrid
from mpitrain.comm.waiting import wait
from mpitrain.config.schema import Config
from mpitrain.errors import DivergedError
from mpitrain.optim.compensation import Compensation
from mpitrain.optim.schedule import Schedule
from mpitrain.parallel.shared import SharedTensors
from mpitrain.params import Layout, Params
from mpitrain.server.clocks import rule_of
from mpitrain.server.keeper import Keeper, Policy, layout_of
from mpitrain.server.link import Link
from mpitrain.server.service import Record, Service
from mpitrain.server.setting import Setting, slots_of
from mpitrain.server.worker import Worker
from mpitrain.train.buckets import codec_of, salt_of
from mpitrain.train.exchange import Exchange, Outcome
from mpitrain.train.ledger import Account, Ledger, summary_of
from mpitrain.train.runfolder import Row
from mpitrain.train.served import pieces_of
from mpitrain.train.weights import Weights


def setting_of(config: Config, layout: Layout, shared: SharedTensors, *, workers: int, dtype: npt.DTypeLike) -> Setting:
    """Cut what a column holds into pieces, the same on all its ranks."""
    exchange = config.exchange
    pieces = pieces_of(layout, exchange, shared.holders, dtype)
    return Setting(workers, pieces, rule_of(exchange), make_codec(exchange.server_codec, dtype))


def owned_layout(setting: Setting, grid: ProcessGrid) -> Layout:
    """Lay out what this server holds of the model."""
    return layout_of(setting.owned_by(grid.row - grid.shape.dp, grid.shape.servers))


def policy_of(config: Config, schedule: Schedule, shared: SharedTensors, workers: int) -> Policy:
    """Read how gradients become updates. The count of updates on the server drives the schedule, nobody else's."""
    exchange = config.exchange
    is_async = exchange.mode == "async"
    steps = workers if is_async else 1
    divisor = {"none": 1.0, "sqrt": sqrt(steps), "linear": float(steps)}[config.optim.lr_scale]

    def rate(version: int, staleness: float) -> float:
        lr = schedule(version / steps) / divisor
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

    def __init__(
        self, weights: Weights, config: Config, grid: ProcessGrid, setting: Setting, transport: Transport
    ) -> None:
        super().__init__(weights)
        self._config, self._grid, self.setting = config, grid, setting
        self.link = Link(grid.column, transport)
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

    def _spent(self) -> Traffic:
        """Take what the messages have cost since the last call."""
        traffic, self.link.traffic = self.link.traffic, Traffic()
        return traffic


class WorkerExchange(Served):
    """Push every gradient to the servers, and take the weights that they answer with; parameters as above."""

    def __init__(
        self, weights: Weights, config: Config, grid: ProcessGrid, setting: Setting, transport: Transport
    ) -> None:
        super().__init__(weights, config, grid, setting, transport)
        self.overlap = config.exchange.overlap
        self.worker = Worker(self.link, setting, self._views(weights.grads), self._views(weights.params))
        self._bucket_of = {s.spec.name: piece.index for piece in setting.pieces for s in piece.segments}
        self._salts = [salt_of(piece.segments[0].spec) for piece in setting.pieces]
        self._missing: list[int] = []
        self._step = 0
        self._samples = self._divisor = 1
        self._waited: list[float] = []

    def _views(self, buffer: Params) -> list[Floats]:
        return [buffer.flat[piece.segments[0].start : piece.segments[-1].stop] for piece in self.setting.pieces]

    def _begin(self, clock: int) -> None:
        self.worker.drops = self.loses
        self.worker.begin_round(clock, self.version, self.last)

    def total(self, everywhere: int, here: int) -> int:
        """Divide by the samples of all workers where their gradients are summed, else by those of this one."""
        self._samples = here
        self._divisor = max(here, 1) if self.setting.rule.mode == "async" else everywhere
        return self._divisor

    def begin(self, step: int) -> None:
        """Expect the gradients of a step."""
        self._step = step
        self.link.events = self.events
        self._missing = [len(piece.segments) for piece in self.setting.pieces]

    def finished(self, names: Sequence[str]) -> None:
        """Start the buckets that are full now."""
        for name in names:
            index = self._bucket_of[name]
            self._missing[index] -= 1
            if not self._missing[index]:
                seed, row = self._config.train.seed, self._grid.row
                self.worker.start(index, key=noise_key(seed, self._step, row, self._salts[index]))
        self.worker.poll()

    def complete(self) -> Outcome:
        """Push what is there, and wait until the next step may begin, or the round is over."""
        if any(self._missing):
            raise RuntimeError(f"{sum(self._missing)} gradients of the step were never reported as finished")
        finite, lost, wish = self._agreed(self.worker.finite, self.worker.lost, self.wants_meeting)
        self.worker.push(finite=finite, lost=lost, samples=self._samples, divisor=self._divisor, stop=float(wish))
        self._take()
        while not self._may_leave():
            self.worker.wait_for_answer()
            self._take()
        self.last = self.worker.last
        traffic = self._spent()
        self._waited.append(traffic.wait_s)
        answer = self.worker.answer
        return Outcome(0.0 if finite else None, answer.lr if answer else 0.0, traffic)

    def _may_leave(self) -> bool:
        worker = self.worker
        return worker.ended if worker.pushed == worker.last else worker.may_go()

    def _agreed(self, finite: bool, lost: bool, wish: bool) -> tuple[bool, bool, bool]:
        """Agree with the other ranks of the replica. Collective over it."""
        replica = self._grid.replica
        if replica.size > 1:
            numbers = np.array([not finite, lost, wish], np.float64)
            sums = self._numbers(numbers).sum(axis=0)
            finite, lost, wish = not sums[0], bool(sums[1]), bool(sums[2])
        return finite, lost, wish

    def _take(self) -> None:
        """Take the answers that all ranks of the replica have, as far as all can use them. Collective over it."""
        verdicts = self.worker.verdicts()
        if self._grid.replica.size > 1:
            most = slots_of(self.setting.rule) + 1
            padded = (verdicts + [True] * most)[:most]
            table = self._numbers(np.array([len(verdicts), *padded], np.float64))
            verdicts = [bool(good) for good in table[:, 1:].min(axis=0)[: int(table[:, 0].min())]]
        self.worker.take(verdicts)

    def _numbers(self, mine: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        link = self.link
        numbers = NumberGather(self._grid.replica, mine, timeout_s=link.transport.timeout_s)
        link.traffic.wait_s += wait(numbers.requests, timeout_s=link.transport.timeout_s)
        return numbers.table

    def _waits(self) -> list[float]:
        return self._waited

    def tensors(self) -> dict[str, Params]:
        """Name nothing: the servers have the optimizer."""
        return {}

    def state(self) -> dict[str, DoubleBuffer]:
        """Name the memories of the pushes."""
        return self.worker.states()

    def references(self) -> list[DoubleBuffer]:
        """List the weights that were decoded last."""
        return self.worker.references()

    def not_finite(self) -> list[str]:
        """Name the tensors whose gradients are not finite here."""
        grads = self.weights.grads
        return [name for name in grads if not np.isfinite(grads[name]).all()]


class ServerExchange(Served):
    """Serve the workers of this column; parameters as above."""

    def __init__(
        self,
        weights: Weights,
        config: Config,
        grid: ProcessGrid,
        setting: Setting,
        transport: Transport,
        shared: SharedTensors,
    ) -> None:
        super().__init__(weights, config, grid, setting, transport)
        if grid.servers is None:
            raise RuntimeError("this rank does not serve")
        policy = policy_of(config, weights.schedule, shared, setting.workers)
        pieces = setting.owned_by(grid.row - grid.shape.dp, grid.shape.servers)
        keeper = Keeper(pieces, weights.params, weights.grads, weights.optimizer, weights.state, policy)
        self.service = Service(self.link, grid.servers, setting, keeper)
        self.leads = grid.servers.rank == 0
        self._started = False

    def _begin(self, clock: int) -> None:
        if not self._started:
            self.service.start(clock, self.version)
            self._started = True
        self.service.begin_round(self.last)

    def serve(self) -> Iterator[int]:
        """Serve until the round is over; yield every clock that is complete meanwhile."""
        clock = self._first - 1
        self.link.events = self.events
        while clock < self.service.last or not self.service.over:
            wait(_Clock(self.service, clock), timeout_s=self.link.transport.timeout_s)
            yield from range(clock + 1, self.service.clock + 1)
            clock = self.service.clock
        self.last = self.service.last

    def take_record(self) -> Record:
        """Take what was done since the last call, and count it."""
        record, self.service.record = self.service.record, Record()
        self.ledger.add(record)
        return record

    def spent(self) -> Traffic:
        """Take what the messages have cost since the last call."""
        return self._spent() + self.service.spent()

    def _report(self) -> dict[str, object] | None:
        report: dict[str, object] = {"unsound": self.service.unsound}
        if self.leads:
            report["rows"] = self.ledger.take(self._first, self.last)
            report["facts"] = {
                "optimizer_step": self.weights.state.step,
                "version": self.service.version,
                "accounts": [account.document() for account in self.ledger.accounts],
            }
        return report

    def begin(self, step: int) -> None:
        """Do nothing: a server computes no gradients."""

    def finished(self, names: Sequence[str]) -> None:
        """Do nothing."""

    def complete(self) -> Outcome:
        """Refuse: a server takes rounds, not steps."""
        raise RuntimeError("a server takes no steps")

    def state(self) -> dict[str, DoubleBuffer]:
        """Name the memories of the pushes of all workers."""
        return self.service.states()

    def references(self) -> list[DoubleBuffer]:
        """List the weights that workers have decoded last."""
        return self.service.references()

    def not_finite(self) -> list[str]:
        """Name nothing: a server has no gradients of its own."""
        return []


class _Clock:
    """The next complete clock, or the end of the round, as something to wait for."""

    def __init__(self, service: Service, clock: int) -> None:
        self._service, self._clock = service, clock

    @property
    def progress(self) -> int:
        return self._service.progress

    def poll(self) -> bool:
        return self._service.poll() or self._service.clock > self._clock

    def waiting_for(self) -> str:
        return self._service.waiting_for()
