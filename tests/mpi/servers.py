"""Workers and servers with small made-up gradients, for the tests of the parameter server."""

from dataclasses import dataclass, field

import numpy as np

from mpitrain.codecs.noise import noise_key
from mpitrain.codecs.registry import make_codec
from mpitrain.collectives.base import Transport
from mpitrain.comm.grid import Axis
from mpitrain.comm.waiting import wait
from mpitrain.optim.optimizer import OptimizerState, Sgd
from mpitrain.params import Layout, Params, ParamSpec
from mpitrain.server.clocks import Rule
from mpitrain.server.keeper import Keeper, Policy, layout_of
from mpitrain.server.link import Column, Link
from mpitrain.server.service import Service
from mpitrain.server.setting import Piece, Setting
from mpitrain.server.worker import Worker

SHAPES = {"a.weight": (40, 33), "a.bias": (33,), "b.weight": (50, 30), "b.bias": (7,), "c.weight": (30, 129)}
LAYOUT = Layout([ParamSpec(name, shape, std=0.1) for name, shape in SHAPES.items()], lambda spec: spec.name[0])


def pieces_of(codec="raw", memory="none", small="raw"):
    """Three buckets: one for every letter; ``small`` is the codec of the second one."""
    found = []
    for index, group in enumerate(LAYOUT.groups):
        name = small if index == 1 else codec
        found.append(Piece(index, LAYOUT.members(group), make_codec(name), "none" if name == "raw" else memory))
    return found


def parts_of(params, pieces):
    return [params.flat[piece.segments[0].start : piece.segments[-1].stop] for piece in pieces]


def gradient(worker, clock, index, size):
    rng = np.random.default_rng([worker, clock, index])
    return (rng.standard_normal(size) * 10.0 ** rng.integers(-2, 2)).astype(np.float32)


class PlusOne:
    """The optimizer of P07: every update adds 1 to every element."""

    def init(self, params):
        return OptimizerState({})

    def step(self, params, grads, state, lr):
        state.step += 1
        params.flat[:] += 1


@dataclass
class Seen:
    """What a worker saw: weights of every bucket before each of its gradients, and the clocks."""

    weights: list = field(default_factory=list)
    held: list = field(default_factory=list)
    final: list = field(default_factory=list)
    worker: object = None
    service: object = None
    params: object = None


class Cluster:
    """The last ``servers`` ranks of ``comm`` serve, the others push.

    ``run`` takes rounds; after it, ``seen`` holds what this rank saw.
    """

    def __init__(
        self, comm, rule, *, servers=1, pieces=None, down="raw", optimizer=None, policy=None, timeout_s=30.0, seed=0
    ):
        self.comm = comm
        self.workers = comm.size - servers
        self.axis = Column(comm, "column", tuple(range(comm.size)), self.workers)
        self.serves = comm.rank >= self.workers
        self.pieces = pieces or pieces_of()
        self.setting = Setting(self.workers, self.pieces, rule, make_codec(down))
        self.link = Link(self.axis, Transport(timeout_s))
        self.params = Params(LAYOUT)
        self.params.initialize(3)
        self.grads = self.params.zeros_like()
        self.seed = seed
        self.seen = Seen()
        inner = comm.Split(int(self.serves), comm.rank)
        self.inner = Axis(inner, "servers")
        self.version = self.clock = 0
        if self.serves:
            own = self.setting.owned_by(comm.rank - self.workers, servers)
            kept = Params(layout_of(own))
            kept.initialize(3)
            optimizer = optimizer or Sgd(momentum=0.9)
            policy = policy or Policy(rate=lambda version, staleness: 0.1)
            keeper = Keeper(own, kept, kept.zeros_like(), optimizer, optimizer.init(kept), policy)
            self.seen.service = Service(self.link, self.inner, self.setting, keeper)
            self.seen.params = kept
        else:
            self.seen.worker = Worker(
                self.link, self.setting, parts_of(self.grads, self.pieces), parts_of(self.params, self.pieces)
            )

    def run(self, last, make=gradient, **numbers):
        """Take one round up to clock ``last``; ``make`` gives the gradients, ``numbers`` what goes with each push."""
        if self.serves:
            self.seen.service.begin_round(last)
            wait(self.seen.service, timeout_s=30)
        else:
            self._train(last, make, numbers)
        return self.seen

    def _train(self, last, make, numbers):
        worker, seen = self.seen.worker, self.seen
        worker.begin_round(self.clock, worker.version, last)
        while worker.pushed < worker.last:
            while not worker.may_go() and worker.pushed < worker.last:
                worker.wait_for_answer()
                worker.take(worker.verdicts())
            if worker.pushed == worker.last:
                break
            self.step(make, numbers)
        while not worker.ended:
            worker.wait_for_answer()
            worker.take(worker.verdicts())
        self.clock = worker.pushed
        seen.final = [part.copy() for part in parts_of(self.params, self.pieces)]

    def step(self, make, numbers):
        worker, clock = self.seen.worker, self.seen.worker.pushed + 1
        self.seen.weights.append([part.copy() for part in parts_of(self.params, self.pieces)])
        self.seen.held.append((clock, worker.held, worker.version))
        for index, part in enumerate(parts_of(self.grads, self.pieces)):
            part[:] = make(self.axis.rank, clock, index, part.size)
        for index in reversed(range(len(self.pieces))):
            worker.start(index, key=noise_key(self.seed, clock, self.axis.rank, index))
        told = {name: value(self.axis.rank, clock) for name, value in numbers.items()}
        worker.push(finite=worker.finite, lost=worker.lost, **({"samples": 1, "divisor": self.workers} | told))

    def server_weights(self):
        """Give every rank the weights of the servers, bucket by bucket."""
        flats = [np.zeros(piece.size, np.float32) for piece in self.pieces]
        if self.serves:
            for number, piece in enumerate(self.seen.service.keeper.pieces):
                flats[piece.index][:] = self.seen.service.keeper.weights(number)
        sums = [np.zeros_like(flat) for flat in flats]
        for flat, total in zip(flats, sums, strict=True):
            self.comm.Allreduce(flat, total)
        return sums

    def close(self):
        self.comm.Barrier()
        (self.seen.service or self.seen.worker).close()
        self.inner.comm.Free()


RULES = {
    "sync": Rule("ssp"),
    "ssp": Rule("ssp", staleness=2),
    "async": Rule("async"),
    "window": Rule("async", window=3),
}
