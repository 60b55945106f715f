"""Training through servers: the exchange of a worker, and that of a server."""

import time
from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from mpitrain.arrays import Floats
from mpitrain.codecs.memory import DoubleBuffer
from mpitrain.codecs.noise import noise_key
from mpitrain.collectives.base import Traffic, Transport
from mpitrain.comm.agreement import NumberGather
from mpitrain.comm.grid import ProcessGrid
from mpitrain.comm.waiting import wait
from mpitrain.config.schema import Config
from mpitrain.parallel.shared import SharedTensors
from mpitrain.params import Params
from mpitrain.server.keeper import Keeper
from mpitrain.server.record import Record
from mpitrain.server.service import Service
from mpitrain.server.setting import Setting, slots_of
from mpitrain.server.worker import Worker
from mpitrain.train.buckets import salt_of
from mpitrain.train.exchange import Outcome
from mpitrain.train.served import Served, policy_of
from mpitrain.train.weights import Weights

REMEMBERED = 10_000
"""Newest steps of which the waiting times are summed up in the end."""


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
        self._waited: deque[float] = deque(maxlen=REMEMBERED)

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
        self.dead = self.worker.dead
        traffic = self.spent()
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
        begin = time.perf_counter()
        wait(numbers.requests, timeout_s=link.transport.timeout_s)
        link.waited(begin)
        return numbers.table

    def _waits(self) -> list[float]:
        return list(self._waited)

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
        self.last, self.dead = self.service.last, self.service.ended_without

    def take_record(self) -> Record:
        """Take what was done since the last call, and count it."""
        record, self.service.record = self.service.record, Record()
        self.ledger.add(record)
        return record

    def spent(self) -> Traffic:
        """Take what the messages have cost since the last call."""
        return super().spent() + self.service.spent()

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
