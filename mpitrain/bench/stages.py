"""The real executor of the pipeline on stages whose passes take a fixed time: how much of it is lost to waiting."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from mpitrain.arrays import Floats
from mpitrain.bench.records import Record
from mpitrain.collectives.base import Transport, compile_kernels
from mpitrain.comm.agreement import NumberGather, first_on_node
from mpitrain.comm.grid import Axis
from mpitrain.nn.layer import Chain, Context, Layer, Tensors
from mpitrain.nn.loss import LossResult
from mpitrain.parallel.pipeline import Pipeline, PipelineSettings
from mpitrain.parallel.schedule import plan, simulate

CHUNKS = {"afab": 1, "1f1b": 1, "interleaved": 2}
"""Pieces of the model a stage, by schedule."""

BACKWARD = 2.0
"""What a backward pass takes in forward passes."""


@dataclass(frozen=True)
class Nothing:
    """The cache of a layer that needs none."""


class FixedTime(Layer[Floats, Nothing]):
    """Hands on what it gets, after a time in which it leaves the processor to others.

    Parameters
    ----------
    forward_s, backward_s : float
        What a pass sleeps.

    Attributes
    ----------
    busy_s : float
        What all passes since the caller last set it have really slept: a sleep is never shorter, but often longer.
    """

    def __init__(self, forward_s: float, backward_s: float) -> None:
        self._forward_s, self._backward_s = forward_s, backward_s
        self.busy_s = 0.0

    def forward(self, params: Tensors, x: Floats, context: Context) -> tuple[Floats, Nothing]:
        """Sleep, and return ``x`` itself."""
        self._sleep(self._forward_s)
        return x, Nothing()

    def backward(self, params: Tensors, cache: Nothing, dy: Floats, grads: Tensors) -> Floats:
        """Sleep, and return ``dy`` itself."""
        self._sleep(self._backward_s)
        return dy

    def _sleep(self, seconds: float) -> None:
        begin = time.perf_counter()
        time.sleep(seconds)
        self.busy_s += time.perf_counter() - begin


@dataclass(frozen=True)
class Case:
    """What is measured.

    Attributes
    ----------
    schedule : str
        Of `CHUNKS`.
    micro_batches : int
        Of one sample each.
    forward_s : float
        What the forward pass of a micro-batch through all chunks of a stage takes; backward takes `BACKWARD` times
        that.
    elements : int
        float32 values of a message.
    """

    schedule: str
    micro_batches: int
    forward_s: float
    elements: int

    @property
    def chunks(self) -> int:
        """Pieces of the model a stage."""
        return CHUNKS[self.schedule]

    def theory(self, stages: int) -> float:
        """Give the bubble of full groups and messages that take no time (Narayanan et al., 2021b)."""
        return (stages - 1) / (self.chunks * self.micro_batches + stages - 1)

    def planned(self, stages: int) -> float:
        """Give the bubble of the plan itself: more than theory where ``stages`` does not divide the micro-batches."""
        return simulate(plan(self.schedule, stages, self.micro_batches, self.chunks), 1.0, BACKWARD).bubble


@dataclass(frozen=True)
class Round:
    """One batch through the pipeline: seconds from the common start to the last end, and work of all ranks in them."""

    makespan_s: float
    busy_s: float


class Rig:
    """The stage of one rank, for one case. Collective over ``axis``, as ``run`` is.

    Parameters
    ----------
    axis : Axis
        The stages.
    case : Case
    transport : Transport, optional
        Limits of the messages, and of the patience at the common start.

    Attributes
    ----------
    case, pipeline
    """

    def __init__(self, axis: Axis, case: Case, transport: Transport | None = None) -> None:
        pass_s, pieces = case.forward_s / case.chunks, case.chunks * axis.size
        self.case = case
        self._axis = axis
        self._transport = transport or Transport()
        self._layers = [FixedTime(pass_s, BACKWARD * pass_s) for _ in range(case.chunks)]
        self._x: Floats = np.zeros((case.micro_batches, case.elements), np.float32)
        self.pipeline = Pipeline(
            axis,
            [Chain([layer]) for layer in self._layers],
            PipelineSettings(schedule=case.schedule, micro_batches=case.micro_batches),
            cut_shapes=[(case.elements,)] * (pieces - 1),
            transport=self._transport,
        )

    def compile(self) -> None:
        """Run every kernel once."""
        for codec, memory in self.pipeline.streams:
            compile_kernels(codec, memory)

    def run(self) -> Round:
        """Take one batch forward and back."""
        context = Context(train=True, samples=np.arange(self.case.micro_batches))
        for layer in self._layers:
            layer.busy_s = 0.0
        self._gather(0.0)  # the common start
        begin = time.perf_counter()
        self.pipeline.run({}, {}, self._x, context, loss=_no_loss)
        took_s = time.perf_counter() - begin
        table = self._gather(took_s, sum(layer.busy_s for layer in self._layers))
        return Round(makespan_s=float(table[:, 0].max()), busy_s=float(table[:, 1].sum()))

    def _gather(self, *values: float) -> Floats:
        return NumberGather(self._axis, np.array(values), timeout_s=self._transport.timeout_s).wait().table


def _no_loss(output: Floats, part: slice) -> LossResult:
    return LossResult(0.0, 0.0, 0.0, output)


def measure(axis: Axis, cases: Sequence[Case], rounds: int) -> list[Record]:
    """Measure all cases after a warm-up of each. Collective over ``axis``; all ranks return the same records.

    Every round runs every case once, so that a drift of the machine meets all alike.
    """
    rigs = [Rig(axis, case) for case in cases]
    first_on_node(axis, rigs[0].compile)
    for rig in rigs:
        rig.run()
    table = [[rig.run() for rig in rigs] for _ in range(rounds)]
    return [record(case, axis.size, list(column)) for case, column in zip(cases, zip(*table, strict=True), strict=True)]


def record(case: Case, stages: int, rounds: Sequence[Round]) -> Record:
    """Sum up the rounds of a case in one flat record; medians, and the range of the bubble."""
    bubbles = [1 - each.busy_s / (stages * each.makespan_s) for each in rounds]
    theory, bubble = case.theory(stages), median(bubbles)
    return {
        "schedule": case.schedule,
        "ranks": stages,
        "chunks": case.chunks,
        "micro_batches": case.micro_batches,
        "forward_ms": 1e3 * case.forward_s,
        "message_bytes": 4 * case.elements,
        "makespan_ms": 1e3 * median(each.makespan_s for each in rounds),
        "theory_bubble": theory,
        "plan_bubble": case.planned(stages),
        "bubble": bubble,
        "lowest_bubble": min(bubbles),
        "highest_bubble": max(bubbles),
        "excess_pct": 100 * (bubble / theory - 1) if theory else None,
    }
