"""SGD and AdamW with decoupled weight decay.

An optimizer is a frozen set of constants; what changes is in its state, whose buffers have the layout of the parameters
and are saved by name like them.
"""

from dataclasses import dataclass
from math import sqrt
from typing import Protocol

from mpitrain.arrays import Floats
from mpitrain.kernels import optimizer as kernels
from mpitrain.params import Params, ParamSpec


@dataclass
class OptimizerState:
    """What an optimizer remembers.

    Attributes
    ----------
    buffers : dict of str to Params
        "momentum", or "first" and "second"; same layout and type as the parameters.
    step : int
        Steps taken.
    """

    buffers: dict[str, Params]
    step: int = 0


class Optimizer(Protocol):
    """A rule that turns gradients into new parameters."""

    def init(self, params: Params) -> OptimizerState:
        """Allocate the state of step 0."""

    def step(self, params: Params, grads: Params, state: OptimizerState, lr: float) -> None:
        """Write new values into ``params`` and ``state``; ``grads`` stay as they are.

        Elementwise: the same bits wherever the inputs are the same. Padding between tensors is left alone.
        """


@dataclass(frozen=True, kw_only=True)
class Sgd:
    """Gradient descent with optional momentum.

    Attributes
    ----------
    momentum : float
        Share of the old direction that is kept; 0 needs no buffer.
    nesterov : bool
        Whether to look ahead by one momentum step.
    weight_decay : float
        Decay per unit of learning rate, on tensors whose spec says so, decoupled from the momentum.
    """

    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    def init(self, params: Params) -> OptimizerState:
        """Allocate "momentum" where it is used."""
        return OptimizerState({"momentum": params.zeros_like()} if self.momentum else {})

    def step(self, params: Params, grads: Params, state: OptimizerState, lr: float) -> None:
        """Take one step."""
        state.step += 1
        scalar = params.flat.dtype.type
        rate, beta = scalar(lr), scalar(self.momentum)
        update = kernels.sgd_nesterov if self.nesterov else kernels.sgd_momentum
        for spec, (param, grad, *buffers) in ranges(params, grads, *state.buffers.values()):
            share = scalar(keep(spec, lr, self.weight_decay))
            if buffers:
                update(param, grad, buffers[0], rate, beta, share)
            else:
                kernels.sgd(param, grad, rate, share)


@dataclass(frozen=True, kw_only=True)
class AdamW:
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019).

    Attributes
    ----------
    beta1, beta2 : float
        Decay of the first and second moments.
    eps : float
        Added to the root of the corrected second moment.
    weight_decay : float
        Decay per unit of learning rate, on tensors whose spec says so.
    """

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0

    def init(self, params: Params) -> OptimizerState:
        """Allocate "first" and "second"."""
        return OptimizerState({"first": params.zeros_like(), "second": params.zeros_like()})

    def step(self, params: Params, grads: Params, state: OptimizerState, lr: float) -> None:
        """Take one step."""
        state.step += 1
        scalar = params.flat.dtype.type
        rate = scalar(lr / (1 - self.beta1**state.step))
        root_scale = scalar(1 / sqrt(1 - self.beta2**state.step))
        decays = scalar(self.beta1), scalar(1 - self.beta1), scalar(self.beta2), scalar(1 - self.beta2)
        eps = scalar(self.eps)
        moments = state.buffers["first"], state.buffers["second"]
        for spec, (param, grad, first, second) in ranges(params, grads, *moments):
            share = scalar(keep(spec, lr, self.weight_decay))
            kernels.adamw(param, grad, first, second, rate, *decays, root_scale, eps, share)


def keep(spec: ParamSpec, lr: float, weight_decay: float) -> float:
    """Return the factor by which weight decay shrinks a tensor in one step."""
    return 1 - lr * weight_decay if spec.decay else 1.0


def ranges(*buffers: Params) -> list[tuple[ParamSpec, list[Floats]]]:
    """List the tensors, in the order of the buffer, each with its flat range of every buffer."""
    segments = buffers[0].layout.segments.values()
    return [(s.spec, [buffer.flat[s.start : s.stop] for buffer in buffers]) for s in segments]
