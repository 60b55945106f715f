"""The weights that a rank holds, and how gradients move them."""

from dataclasses import dataclass
from math import sqrt

import numpy as np

from mpitrain.comm.agreement import NumberGather
from mpitrain.comm.grid import Axis
from mpitrain.config.schema import Config, OptimConfig
from mpitrain.optim.clip import clip_factor, scale, sum_of_squares
from mpitrain.optim.optimizer import AdamW, Optimizer, OptimizerState, Sgd
from mpitrain.optim.schedule import Schedule
from mpitrain.parallel.shared import SharedTensors
from mpitrain.params import Layout, Params


@dataclass
class Weights:
    """Parameters, gradients, and the optimizer that brings them together.

    Attributes
    ----------
    params, grads : Params
        Of one layout.
    optimizer, state, schedule
        The rule, its memory, and the learning rate over the steps.
    counted : list of (start, stop)
        Ranges of the flat buffers that this rank counts, so that all ranks of ``axis`` together count each tensor once.
    axis : Axis
        The ranks that hold the model together: those of a replica.
    clip_norm : float
        Bound of the gradient's norm over the whole model; 0: none.
    timeout_s : float
        Patience for the other ranks of ``axis``.
    """

    params: Params
    grads: Params
    optimizer: Optimizer
    state: OptimizerState
    schedule: Schedule
    counted: list[tuple[int, int]]
    axis: Axis
    clip_norm: float = 0.0
    timeout_s: float = 60.0

    def start_norm(self, *, finite: bool) -> NumberGather:
        """Start to agree on the gradient's norm and on whether it is finite everywhere. Collective over ``axis``."""
        squares = sum(sum_of_squares(self.grads.flat[a:b]) for a, b in self.counted) if finite else 0.0
        return NumberGather(self.axis, np.array([squares, float(not finite)]), timeout_s=self.timeout_s)

    @staticmethod
    def norm_of(numbers: NumberGather) -> float | None:
        """Wait for the norm of the whole model's gradient; None where some rank must reject the step."""
        total, rejected = numbers.wait().sum_in_order()
        return None if rejected else sqrt(total)

    def move(self, lr: float, norm: float) -> None:
        """Take one step; ``norm`` is that of the gradient before clipping, which is scaled in place."""
        if self.clip_norm and (factor := clip_factor(norm, self.clip_norm)) < 1:
            scale(self.grads, factor)
        self.optimizer.step(self.params, self.grads, self.state, lr)


def make_weights(config: Config, params: Params, grads: Params, shared: SharedTensors, axis: Axis) -> Weights:
    """Put together what a rank trains, with a new optimizer; ``axis`` as in `Weights`."""
    optimizer = make_optimizer(config)
    return Weights(
        params,
        grads,
        optimizer,
        optimizer.init(params),
        make_schedule(config.optim, config.train.steps),
        counted_ranges(params.layout, shared),
        axis,
        clip_norm=config.train.clip_norm,
        timeout_s=config.network.peer_timeout_s,
    )


def counted_ranges(layout: Layout, shared: SharedTensors) -> list[tuple[int, int]]:
    """List the ranges of the flat buffers that this rank counts, so that a replica counts every tensor once."""
    counted = [s for s in layout.segments.values() if shared.counts(s.spec.name)]
    if len(counted) == len(layout.segments):
        return [(0, layout.size)]
    return [(segment.start, segment.stop) for segment in counted]


def make_optimizer(config: Config) -> Optimizer:
    """Build the optimizer; where every rank has its own momentum, SGD has none beside it."""
    optim = config.optim
    if optim.kind == "sgd":
        momentum = 0.0 if config.exchange.signal == "momentum" else optim.momentum
        return Sgd(momentum=momentum, nesterov=optim.nesterov, weight_decay=optim.weight_decay)
    return AdamW(beta1=optim.beta1, beta2=optim.beta2, eps=optim.eps, weight_decay=optim.weight_decay)


def make_schedule(optim: OptimConfig, steps: int) -> Schedule:
    """Build the learning rate over the steps of a run."""
    return Schedule(
        kind=optim.schedule,
        lr=optim.lr,
        total_steps=steps,
        warmup_steps=optim.warmup_steps,
        min_ratio=optim.min_lr_ratio,
    )
