"""Global weights, and how the weights of replicas that have trained alone come together in them.

The mean change D = Σ n_i/N (θ − θ_i) counts every replica by the samples n_i that it really used since it last took
part, N = Σ n_i. What travels is a sum like that of gradients: of changes times n_i/N', with N' the samples that all
replicas should have used, which each of them knows. N travels beside it and is another number only where some replica
had to reject a step.
"""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mpitrain.codecs.memory import DoubleBuffer
from mpitrain.collectives.base import Traffic
from mpitrain.collectives.reducer import Reducer
from mpitrain.comm.agreement import NumberGather
from mpitrain.comm.grid import Axis
from mpitrain.config.schema import ExchangeConfig
from mpitrain.kernels.optimizer import scale
from mpitrain.optim.outer import OuterNesterov, merge
from mpitrain.params import Layout, Params
from mpitrain.train.buckets import BucketSums, plan_buckets, stream_of
from mpitrain.train.fragments import Rounds, deal

OUTER_BUFFERS = 3
"""Copies of the weights that global weights consist of: themselves, their momentum, and their changes on the way."""

SLOWER = 10
"""Times as long as its own steps that a replica allows another one for as many, before silence counts."""


@dataclass
class Samples:
    """Samples behind a change.

    Attributes
    ----------
    used, due : float
        Those that this replica used, and those that all together should have. A share that is kept of a change keeps
        that share of them.
    """

    used: float = 0.0
    due: float = 0.0

    def add(self, used: float, due: float) -> None:
        """Count a step."""
        self.used += used
        self.due += due

    def keep(self, share: float) -> None:
        """Forget all but a share."""
        self.used *= share
        self.due *= share


@dataclass(frozen=True)
class UnderWay:
    """Changes that are being summed, and the samples behind them."""

    sums: BucketSums
    due: float
    used: NumberGather

    def finish(self) -> tuple[float | None, Traffic]:
        """Wait; return what turns the sums into means, None where they must be rejected, and what they cost."""
        summed = self.sums.finish()
        begin = time.perf_counter()
        (used,) = self.used.wait().sum_in_order()
        traffic = summed.traffic + Traffic(wait_s=time.perf_counter() - begin)
        return self.due / used if summed.finite and used else None, traffic


class GlobalWeights:
    """What all replicas have in common, in fragments that come together at steps of their own.

    Parameters
    ----------
    reducer : Reducer
        How changes are summed; it knows the replicas.
    local : Params
        What this replica trains. Owned by the caller; a fragment is written to when it is applied.
    config : ExchangeConfig
    seed : int
        Of stochastic rounding.
    shared : collection of str
        As in `plan_buckets`; their buckets are in the first fragment.
    replica : Axis
        The ranks that hold a model together; all of them apply a fragment or none does.

    Attributes
    ----------
    params, momentum : Params
        θ and M.
    changes : Params
        Changes on their way, and room for anything while none is.
    samples : list of Samples
        Behind the next change of each fragment.
    rounds : Rounds
        When fragments are to be sent and applied.
    differ : bool
        Whether replicas may have other weights of their own at the end of a round.
    """

    def __init__(
        self,
        reducer: Reducer,
        local: Params,
        config: ExchangeConfig,
        *,
        seed: int,
        shared: Collection[str],
        replica: Axis,
    ) -> None:
        self.params, self.momentum, self.changes = (local.zeros_like() for _ in range(OUTER_BUFFERS))
        self.samples = [Samples() for _ in range(config.fragments)]
        self._local = local
        self._reducer, self._replica = reducer, replica
        self._transport = reducer.transport
        self._rule = OuterNesterov(lr=config.outer_lr, momentum=config.outer_momentum)
        self.rounds = Rounds(config.h, config.fragments, config.delay)
        self._merge = config.merge
        self.differ = config.fragments > 1 or config.merge > 0
        # The mean over one replica is what it holds, as long as it has not gone on meanwhile.
        self._alone = reducer.axis.size == 1 and not config.delay
        self.sums = [
            BucketSums(reducer, self.changes, config, seed=seed, shared=shared, chosen=buckets)
            for buckets in deal_buckets(local.layout, config, shared)
        ]
        self._under_way: dict[int, UnderWay] = {}

    def begin(self) -> None:
        """Make the local weights, the same on all replicas, the global ones."""
        self.params.flat[:] = self._local.flat

    def count(self, used: float, due: float) -> None:
        """Count the samples of a step: those of this replica, 0 if it did not take it, and of all replicas."""
        for samples in self.samples:
            samples.add(used, due)

    def allow(self, seconds: float) -> None:
        """Be patient with slower replicas: this one took so long for the steps before what it sends next."""
        timeout_s = self._transport.timeout_s + SLOWER * seconds
        self._reducer.transport = replace(self._transport, timeout_s=timeout_s)

    def poll(self) -> None:
        """Advance what is under way without blocking."""
        for under_way in self._under_way.values():
            under_way.sums.poll()

    def send(self, fragment: int, step: int) -> None:
        """Start to sum how the local weights have changed. Collective over the axis of the reducer."""
        sums, samples = self.sums[fragment], self.samples[fragment]
        share = self._local.flat.dtype.type(samples.used / samples.due)
        for start, stop in sums.ranges:
            change = self.changes.flat[start:stop]
            with np.errstate(all="ignore"):  # what is not finite is found by the sums
                np.subtract(self.params.flat[start:stop], self._local.flat[start:stop], out=change)
            scale(change, share)
        reducer = self._reducer
        used = NumberGather(reducer.axis, np.array([samples.used]), timeout_s=reducer.transport.timeout_s)
        sums.start(step)
        self._under_way[fragment] = UnderWay(sums, samples.due, used)
        self.samples[fragment] = Samples()

    def apply(self, fragment: int) -> tuple[bool, Traffic]:
        """Move the global weights by what has been sent, and the local ones with them.

        Collective over the axis of the reducer and over the replica. Where something is not finite on any rank, the
        global weights stay, and the local ones are reset to them.

        Returns
        -------
        accepted : bool
            The same on all ranks.
        traffic : Traffic
        """
        factor, traffic = self._under_way.pop(fragment).finish()
        begin = time.perf_counter()
        timeout_s = self._reducer.transport.timeout_s
        rejected = NumberGather(self._replica, np.array([float(factor is None)]), timeout_s=timeout_s)
        accepted = factor is not None and not any(rejected.wait().sum_in_order())
        traffic += Traffic(wait_s=time.perf_counter() - begin)
        sums = self.sums[fragment]
        if accepted and factor is not None:
            sums.commit()
            self._move(sums.ranges, factor)
        else:
            sums.rollback()
        kept = self._merge if accepted else 0.0
        self.samples[fragment].keep(kept)
        for start, stop in sums.ranges:
            merge(self._local.flat[start:stop], self.params.flat[start:stop], kept)
        return accepted, traffic

    def meet(self, step: int, turn: int, length: int) -> tuple[list[bool], Traffic]:
        """Send and apply what is due after a step, the ``turn``-th of a round of ``length``.

        Collective as `send` and `apply`; returns of every fragment that was due whether it was accepted.
        """
        for fragment in self.rounds.sends(turn, length):
            self.send(fragment, step)
        outcomes = [self.apply(fragment) for fragment in self.rounds.applies(turn, length)]
        return [accepted for accepted, _ in outcomes], sum((traffic for _, traffic in outcomes), Traffic())

    def _move(self, ranges: Sequence[tuple[int, int]], factor: float) -> None:
        for start, stop in ranges:
            params, change = self.params.flat[start:stop], self.changes.flat[start:stop]
            if factor != 1:
                scale(change, change.dtype.type(factor))
            if self._alone:
                np.copyto(params, self._local.flat[start:stop])
            else:
                np.subtract(params, change, out=params)
            self._rule.step(params, change, self.momentum.flat[start:stop])

    def state(self) -> dict[str, DoubleBuffer]:
        """Name the memories of the sums."""
        return {name: buffer for sums in self.sums for name, buffer in sums.state().items()}

    def not_finite(self) -> list[str]:
        """Name the tensors whose changes on this rank were not finite, after a rejection."""
        return [name for sums in self.sums for name in sums.not_finite()]


def deal_buckets(layout: Layout, config: ExchangeConfig, shared: Collection[str]) -> list[list[int]]:
    """Deal the buckets of a layout to fragments by the bytes that they travel as; raises ConfigError."""
    plan = plan_buckets(layout, config.bucket_mb, shared)
    streams = [stream_of(segments[0].spec, config, np.float32)[0] for segments in plan]
    sizes = [segments[-1].stop - segments[0].start for segments in plan]
    together = [index for index, segments in enumerate(plan) if segments[0].spec.name in shared]
    nbytes = [codec.nbytes(size) for codec, size in zip(streams, sizes, strict=True)]
    return deal(nbytes, config.fragments, together)
