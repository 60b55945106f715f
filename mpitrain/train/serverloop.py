"""The loop of a rank that serves: no steps of its own, but the same rounds."""

import time
from dataclasses import asdict, replace

from mpitrain.collectives.base import Traffic
from mpitrain.parallel.trip import Sums
from mpitrain.train.loop import Loop
from mpitrain.train.runfolder import Row
from mpitrain.train.serving import ServerExchange


class ServerLoop(Loop):
    """Serves rounds; parameters and attributes as those of `Loop`."""

    def round(self) -> tuple[list[Row], bool]:
        """Serve up to the next point at which all ranks meet. Collective over the world; see `Loop.round`."""
        exchange = self.parts.exchange
        if not isinstance(exchange, ServerExchange):
            raise TypeError("a loop that serves needs the exchange of a server")
        first, begin = self.counters.step + 1, time.perf_counter()
        self.begin_round()
        self.events = []
        for clock in exchange.serve():
            self._position.step = clock
            self._faults.at_step(clock, trains=False)
            self._stop |= bool(self._wish.reason(clock))
            if self._stop or exchange.service.unsound:
                exchange.service.stop()
        self._count_rejected(exchange)
        self._sums = [Sums()] * (exchange.last - first + 1)
        arrival = self._arrive()
        rows = self._rows(first, exchange.last, exchange.spent() + arrival, time.perf_counter() - begin)
        return self._meet(rows)

    def _count_rejected(self, exchange: ServerExchange) -> None:
        """Count the updates that were rejected though some gradient was finite; workers count those that were not."""
        for update in exchange.take_record().updates:
            if update.norm is not None:
                self.counters.skipped_in_a_row = 0
            elif any(taken.push.finite and taken.push.samples for taken in update.taken):
                self.counters.skipped_in_a_row += 1
                self._skipped += exchange.leads
                self.counters.skipped += exchange.leads

    def _rows(self, first: int, last: int, traffic: Traffic, seconds: float) -> list[Row]:
        """Spread what the round has cost over its steps."""
        steps = last - first + 1
        exchange = self.parts.exchange
        compute_s = exchange.service.take_busy() if isinstance(exchange, ServerExchange) else 0.0
        wait_s = max(0.0, seconds - compute_s - traffic.encode_s - traffic.decode_s)
        self.counters.count(last, replace(traffic, wait_s=wait_s), 0, 0.0, compute_s)
        spent = asdict(replace(traffic, wait_s=wait_s))
        share = {name: value // steps if isinstance(value, int) else value / steps for name, value in spent.items()}
        return [
            {
                "step": step,
                "samples": self.parts.sampler.global_count(step - 1),
                "step_s": seconds / steps,
                "compute_s": compute_s / steps,
                **share,
                "replica_bytes": 0,
                "skipped": self.counters.skipped,
            }
            for step in range(first, last + 1)
        ]
