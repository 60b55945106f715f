"""A server's end: takes the pushes of all workers in an order that all servers share, and answers them.

The first server is the sequencer: it feeds the clocks, and sends every operation that they give to the other servers,
which execute the same ones in the same order. So weights of one version are the same version on all of them.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence

from mpitrain.arrays import Floats
from mpitrain.codecs.memory import DoubleBuffer, NoMemory
from mpitrain.codecs.raw import Raw
from mpitrain.collectives.base import Traffic
from mpitrain.comm.agreement import NumberGather, gather
from mpitrain.comm.frame import Frame
from mpitrain.comm.grid import Axis
from mpitrain.comm.waiting import Requests, Waitable
from mpitrain.errors import PeerLostError
from mpitrain.server.client import Client
from mpitrain.server.clocks import ASYNC, Apply, Clocks, Drop, Op, Refresh, Reply, staleness_of
from mpitrain.server.keeper import Keeper
from mpitrain.server.link import Link
from mpitrain.server.mail import Inbox, Outbox
from mpitrain.server.messages import Answer, Kind, Push, pack, unpack
from mpitrain.server.record import Record, Taken, Update
from mpitrain.server.setting import Setting, slots_of
from mpitrain.server.stream import expected

Steps = Generator[Waitable, None, None]

SIGNS_OF_LIFE = 4
"""Messages to a worker that waits, within the patience for a silent peer."""


class Until:
    """A condition, as something to wait for."""

    progress = 0

    def __init__(self, condition: Callable[[], bool], label: str) -> None:
        self._condition, self._label = condition, label

    def poll(self) -> bool:
        """Look."""
        return self._condition()

    def waiting_for(self) -> str:
        """Name what is missing."""
        return self._label


class Sent:
    """Messages to a worker, as something to wait for: until they have left, or there is nobody to take them."""

    progress = 0

    def __init__(self, client: Client, requests: Requests) -> None:
        self._client, self._requests = client, requests

    def poll(self) -> bool:
        """Look."""
        if not self._client.gone:
            with self._client.mourning():
                return self._requests.poll()
        return True

    def waiting_for(self) -> str:
        """Name the worker."""
        return self._requests.waiting_for()


class Service:
    """Serves the workers of its column, round by round; something to wait for.

    Parameters
    ----------
    link : Link
        On the axis of workers and servers.
    servers : Axis
        All servers, of all columns; rank 0 is the sequencer. Collective over it.
    setting : Setting
        The same on all servers and workers.
    keeper : Keeper
        The weights.

    Attributes
    ----------
    record : Record
        May be replaced between rounds.
    rejected : int
        Updates of this start that were rejected.
    unsound : bool
        Whether the weights are no longer finite.
    ended_without : int
        What `dead` was when the last round ended, as all workers were told.
    """

    def __init__(self, link: Link, servers: Axis, setting: Setting, keeper: Keeper) -> None:
        self.link, self.setting, self.keeper = link, setting, keeper
        self.record = Record()
        self.rejected = 0
        self.unsound = False
        self.version = self.clock = self.last = 0
        self._clocks = Clocks(setting.workers, setting.rule)
        self._servers = servers
        self._orders = Link(servers, link.transport)
        most = 4 + 2 * setting.workers * (slots_of(setting.rule) + 1)
        self._out = [Outbox(self._orders, peer, most) for peer in range(1, servers.size)] if servers.rank == 0 else []
        self._in = Inbox(self._orders, 0, most) if servers.rank else None
        self._width = max(int(str(width)) for width in gather(servers, len(setting.pieces)))
        self._clients = [Client(link, setting, keeper, worker) for worker in range(setting.workers)]
        raw = Raw(keeper.params.flat.dtype)
        self._raw = [(NoMemory(raw, piece.size), Frame(raw.max_nbytes(piece.size))) for piece in keeper.pieces]
        self._ops: deque[tuple[Op, int]] = deque()
        self._steps: Steps | None = None
        self._current: Waitable | None = None
        self._over, self._listens = True, False
        self._lr, self._norm = 0.0, 0.0
        self._turn = 0
        self._busy_s = 0.0
        self._buried: list[int] = []
        self.ended_without = 0
        self._opened = 0, 0

    # Rounds

    def start(self, clock: int, version: int) -> None:
        """Go on from a clock and a number of updates, before the first round."""
        self.clock = self.last = clock
        self.version = version
        self._clocks = Clocks(self.setting.workers, self.setting.rule, clock=clock, version=version)

    def begin_round(self, last: int) -> None:
        """Serve up to clock ``last``, from weights that all workers hold."""
        if self._in is None:
            self._clocks.begin_round(last)
        self.last, self._over, self._listens = last, False, True
        self._opened = self.clock, self.version
        for client in self._clients:
            client.begin_round(self.clock, self.version)

    def stop(self) -> None:
        """End the round as early as may be; only the sequencer's wish counts."""
        self._clocks.stop()

    @property
    def over(self) -> bool:
        """Whether the round at hand has come to its end."""
        return self._over and not self._ops and self._steps is None

    def spent(self) -> Traffic:
        """Take what the order of operations has cost since the last call; the rest is the link's."""
        traffic, self._orders.traffic = self._orders.traffic, Traffic()
        return traffic

    def take_busy(self) -> float:
        """Take the seconds that updates have taken since the last call."""
        busy_s, self._busy_s = self._busy_s, 0.0
        return busy_s

    def states(self) -> dict[str, DoubleBuffer]:
        """Name every memory of the pushes; a checkpoint keeps the current halves."""
        return {name: state for client in self._clients for name, state in client.states().items()}

    def references(self) -> list[DoubleBuffer]:
        """List what changes of the weights follow on, for every worker."""
        changes = [change for client in self._clients for change in client.changes]
        return [state for change in changes for state in change.memory.states().values()]

    # Waiting

    @property
    def progress(self) -> int:
        """Grow whenever a peer was heard."""
        return self.link.heard + self._orders.heard + sum(client.progress for client in self._clients)

    def poll(self) -> bool:
        """Take what has arrived, do what is due; return whether the round is over."""
        self._receive()
        self._execute()
        for out in self._out:
            out.poll()
        self._watch()
        return self.over

    def waiting_for(self) -> str:
        """Name who is missing."""
        behind = [client for client in self._clients if not client.waits and not client.gone]
        names = [self.link.axis.label(client.worker) for client in behind]
        if self._current is not None and not (self._in is None and names):
            return self._current.waiting_for()
        return f"pushes of {', '.join(names)}" if names else self._servers.label(0)

    def _receive(self) -> None:
        # In turns, so that nobody is served first for being the lowest (P12).
        workers = len(self._clients)
        self._turn = (self._turn + 1) % workers
        for offset in range(workers):
            client = self._clients[(self._turn + offset) % workers]
            for push in client.poll(self.last):
                if self._in is None:
                    self._order(client.worker, push)
            if client.gone and client.worker not in self._buried:
                self._bury(client)
        # The sequencer may begin the next round before this server has ended the one at hand.
        while self._in is not None and self._listens and (values := self._in.take()) is not None:
            self._ops.append(unpack(values.tolist()))
            self._listens = not isinstance(self._ops[-1][0], Refresh)

    def _order(self, worker: int, push: Push) -> None:
        """Let the clocks decide what a push means."""
        if push.stop:
            self._clocks.stop()
        self._tell(self._clocks.push(worker))

    def _bury(self, client: Client) -> None:
        """Go on to the end of the round without a worker that has died.

        Raises
        ------
        PeerLostError
            Other servers may have heard of it what this one has not; or nobody is left.
        """
        self._buried.append(client.worker)
        error = PeerLostError(f"{self.link.axis.label(client.worker)} has died")
        if len(self._buried) == len(self._clients):  # nobody is there to be told
            error.agreed = error.bereaved = True
            error.teller = self.link.axis.members[self.link.axis.rank]
            raise error
        if self._servers.size > 1:
            raise error
        self._tell(self._clocks.leave(client.worker))

    @property
    def dead(self) -> int:
        """1 + the number of the worker that died first; 0 while all live."""
        return self._buried[0] + 1 if self._buried else 0

    def _tell(self, ops: Sequence[Op]) -> None:
        """Queue operations, and tell the other servers."""
        for op in ops:
            order = pack(op, self._clocks.last)
            self._ops.append((op, self._clocks.last))
            for out in self._out:
                out.send(order)

    def _watch(self) -> None:
        """Tell workers that wait that this server is there, and find those that are not."""
        now, timeout_s = time.perf_counter(), self.link.transport.timeout_s
        for client in self._clients:
            if self._over or client.gone:
                continue
            if client.waits and now - client.told > timeout_s / SIGNS_OF_LIFE:
                client.tell(self._answer(Kind.ALIVE, 0, 0))
            if not client.waits and now - client.heard > timeout_s:
                raise PeerLostError(
                    f"no message for {timeout_s:g} s from {self.link.axis.label(client.worker)}; it died, or "
                    "its link is down for longer than network.peer_timeout_s"
                )

    # Operations

    def _execute(self) -> None:
        """Go on with the operations in their order, until one has to wait."""
        while self._steps is not None or self._ops:
            if self._steps is None:
                self._steps = self._do(*self._ops.popleft())
            while self._current is None or self._current.poll():
                self._current = next(self._steps, None)
                if self._current is None:
                    self._steps = None
                    break
            else:
                return

    def _do(self, op: Op, last: int) -> Steps:
        self.last = last
        if isinstance(op, Apply):
            yield from self._apply(op)
        elif isinstance(op, Drop):
            yield from self._drop(op)
        elif isinstance(op, Reply):
            yield from self._reply(self._clients[op.worker], op.clock)
        else:
            yield from self._refresh()

    def _arrival(self, worker: int, clock: int) -> Steps:
        client = self._clients[worker]
        if client.arrived < clock:
            yield Until(lambda: client.arrived >= clock, f"clock {clock} of {self.link.axis.label(worker)}")

    def _apply(self, op: Apply) -> Steps:
        for worker, clock in op.pushes:
            yield from self._arrival(worker, clock)
        taken = [self._judge(worker, clock, op) for worker, clock in op.pushes]
        self.version, self.clock = op.version, op.clock
        samples = sum(each.push.samples for each in taken if each.counted)
        self.keeper.clear()
        for each in taken:
            self._clients[each.worker].consume(each.clock, samples if each.counted else None)
        lr, norm = 0.0, None
        if any(each.counted for each in taken):
            numbers = NumberGather(
                self._servers, self.keeper.squares(self._width), timeout_s=self.link.transport.timeout_s
            )
            yield numbers.requests
            begin = time.perf_counter()
            staleness = max(each.staleness for each in taken if each.counted)
            lr = self.keeper.policy.rate(self._place(op), staleness)
            norm = self.keeper.update(numbers.sum_in_order(), lr)
            self._busy_s += time.perf_counter() - begin
        self._lr, self._norm = lr, math.nan if norm is None else norm
        self.rejected += norm is None
        self.record.updates.append(Update(op.version, op.clock, lr, norm, taken))

    def _place(self, op: Apply) -> float:
        """Return how many clocks lie before an update, for the schedule.

        Late gradients with an update of their own do not count; where every gradient is one, it is a part of a clock,
        of whatever number of workers the run has had before.
        """
        if self.setting.rule.mode != ASYNC:
            return op.clock - 1
        clock, version = self._opened
        return clock + (op.version - 1 - version) / self.setting.workers

    def _judge(self, worker: int, clock: int, op: Apply) -> Taken:
        """Decide whether a push counts, from what all servers know of it."""
        push, rule = self._clients[worker].controls[clock], self.setting.rule
        staleness = staleness_of(version=op.version, held_version=int(push.version))
        # Only a worker that has lost its base is staler than it may be. With a reserve, late pushes are, too.
        fresh = rule.mode == ASYNC or rule.aggregate is not None or staleness <= rule.staleness
        return Taken(worker, clock, staleness, bool(push.finite and push.samples and fresh), push)

    def _drop(self, op: Drop) -> Steps:
        yield from self._arrival(op.worker, op.clock)
        client = self._clients[op.worker]
        push = client.controls[op.clock]
        client.consume(op.clock, None)
        staleness = staleness_of(version=self.version + 1, held_version=int(push.version))
        self.record.dropped.append(Taken(op.worker, op.clock, staleness, False, push))

    def _reply(self, client: Client, clock: int) -> Steps:
        yield from self._arrival(client.worker, clock)
        if client.gone:
            return
        if client.controls[clock].lost:
            yield from self._send_weights([client], clock)
        else:
            for stream in client.changes:
                with client.mourning():
                    if (requests := stream.busy) is not None:
                        yield Sent(client, requests)
            self.unsound |= not client.send_change(self.version)
            client.tell(self._answer(Kind.CHANGE, clock, 0))
        client.answer(clock)

    def _refresh(self) -> Steps:
        self.clock = self.last
        self.ended_without = self.dead  # what all are told; who dies later is missed at the meeting
        yield from self._send_weights(self._clients, 0)
        self._over = True

    def _send_weights(self, clients: Sequence[Client], clock: int) -> Steps:
        sends: list[Sent] = []
        for number, (memory, frame) in enumerate(self._raw):
            weights: Floats = self.keeper.weights(number)
            _, nonfinite = memory.encode(weights, frame.payload, None, key=0, first=0)
            self.unsound |= bool(nonfinite)
            frame.seal(expected(memory, self.version), memory.max_nbytes(memory.size))
            tag = self.setting.weights_tag(self.keeper.pieces[number])
            for client in clients:
                if not client.gone:
                    with client.mourning():
                        sends.append(Sent(client, self.link.send(frame, client.worker, tag)))
        for client in clients:
            if client.gone:
                continue
            client.hold_weights(self.version)
            client.tell(self._answer(Kind.WEIGHTS, clock, client.sequence))
        yield from sends  # the buffers are shared

    def _answer(self, kind: Kind, clock: int, sequence: int) -> Answer:
        return Answer(
            kind, self.version, self.clock, self.last, self._lr, self._norm, self.rejected, clock, sequence, self.dead
        )

    def close(self) -> None:
        """Withdraw the receives; nothing may be under way."""
        for client in self._clients:
            client.close()
        if self._in is not None:
            self._in.cancel()
