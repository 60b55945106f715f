"""What travels in place of a gradient, and how the gradient of the step is made of the sum.

A momentum, every rank's own running mean of its gradients, changes slowly, so that differences to the last one that was
sent are small (EF21-SGDM: Fatkhullin 2023), and AdamW with a frozen second moment is linear in it (1-bit Adam: Tang
2021). All ranks' momenta add up to that of the sum.

A preconditioned gradient is in units of what is usual for each weight. AdamW divides by the root of its second moment
in any case, so that weights of small gradients move as far as others: the noise of a codec, alike in all values of a
message, would drown them. All ranks know the second moment, and nothing else need travel.
"""

from collections.abc import Sequence
from math import sqrt
from typing import Protocol

import numpy as np

from mpitrain.codecs.memory import DoubleBuffer
from mpitrain.config.schema import Config
from mpitrain.kernels.optimizer import momentum_of, roots_of
from mpitrain.kernels.reduce import divide, multiply
from mpitrain.optim.frozen import FrozenAdamW
from mpitrain.optim.optimizer import ranges
from mpitrain.params import Layout, Params, ParamSpec
from mpitrain.train.weights import Weights


class Signal(Protocol):
    """What becomes of a gradient before it leaves."""

    def begin(self, step: int) -> None:
        """Expect the gradients of a step (from 1)."""

    def replace(self, names: Sequence[str]) -> None:
        """Put what travels in the place of the gradients of these tensors."""

    def restore(self) -> None:
        """Make what the optimizer takes of the sums of what travelled."""

    def commit(self) -> None:
        """Accept the step."""

    def rollback(self) -> None:
        """Forget the step."""

    def state(self) -> dict[str, DoubleBuffer]:
        """Name what is remembered."""

    def renew(self) -> None:
        """Start from what all ranks know, where this rank's own past was not saved."""


class Gradient:
    """The gradient itself."""

    def begin(self, step: int) -> None:
        """Nothing to prepare."""

    def replace(self, names: Sequence[str]) -> None:
        """Leave them."""

    def restore(self) -> None:
        """Leave them."""

    def commit(self) -> None:
        """Nothing to accept."""

    def rollback(self) -> None:
        """Nothing to forget."""

    def state(self) -> dict[str, DoubleBuffer]:
        """Remember nothing."""
        return {}

    def renew(self) -> None:
        """Nothing to start."""


class Momentum:
    """The momentum of this rank: ``m`` becomes ``beta m + share g``, and travels.

    Parameters
    ----------
    grads : Params
        Replaced by the momentum, then by the reducer.
    beta, share : float
        Decay, and weight of the gradient.
    """

    def __init__(self, grads: Params, beta: float, share: float = 1.0) -> None:
        self._grads = grads
        self._beta, self._share = (grads.flat.dtype.type(value) for value in (beta, share))
        self._momentum = DoubleBuffer(grads.flat.size, grads.flat.dtype)

    def begin(self, step: int) -> None:
        """Nothing to prepare."""

    def replace(self, names: Sequence[str]) -> None:
        """Put the momentum in the place of the gradients of these tensors."""
        past, following = self._momentum.current, self._momentum.next
        for name in names:
            segment = self._grads.layout.segments[name]
            part = slice(segment.start, segment.stop)
            momentum_of(self._grads.flat[part], past[part], following[part], self._beta, self._share)
        self._momentum.written = True

    def restore(self) -> None:
        """Leave the sum of all momenta."""

    def commit(self) -> None:
        """Make the momentum that of this step."""
        self._momentum.commit()

    def rollback(self) -> None:
        """Keep that of the last accepted step."""
        self._momentum.rollback()

    def state(self) -> dict[str, DoubleBuffer]:
        """Remember the momentum."""
        return {"momentum": self._momentum}

    def renew(self) -> None:
        """Start from zero, like a training."""


class LateMomentum(Momentum):
    """The gradient as long as AdamW learns its second moment, then this rank's share of the first one.

    Parameters
    ----------
    weights : Weights
        Whose optimizer becomes a `FrozenAdamW` after the warm-up.
    ranks : int
        Of the data axis that train; they begin with equal shares.
    warmup_steps : int
        At the start, in which gradients travel.
    """

    def __init__(self, weights: Weights, optimizer: FrozenAdamW, *, ranks: int, warmup_steps: int) -> None:
        super().__init__(weights.grads, optimizer.beta1, 1 - optimizer.beta1)
        self._weights, self._optimizer = weights, optimizer
        self._ranks = ranks
        self._warmup_steps = warmup_steps
        self._freezes = False

    def begin(self, step: int) -> None:
        """Freeze the second moment with the first step after the warm-up."""
        self._freezes = step > self._warmup_steps
        if self._freezes:
            self._weights.optimizer = self._optimizer
        if step == self._warmup_steps + 1:
            self._optimizer.freeze(self._weights.state)
            self.renew()

    def replace(self, names: Sequence[str]) -> None:
        """Put the momentum in the place of the gradients, after the warm-up."""
        if self._freezes:
            super().replace(names)

    def renew(self) -> None:
        """Take an equal share of the first moment, which all ranks know."""
        first = self._weights.state.buffers["first"].flat
        self._momentum.current[:] = first / first.dtype.type(self._ranks)


LEAST_SHARE = 1e-4
"""Of a tensor's mean second moment: no entry counts less, so that no value is more than a hundred times as large as it
is beside the rest of its tensor."""


class Preconditioned(Gradient):
    """The gradient over the root of AdamW's second moment, from the second step on.

    Parameters
    ----------
    weights : Weights
        Whose gradients, and whose second moment before the step.
    beta2 : float
        Decay of that moment.
    """

    def __init__(self, weights: Weights, beta2: float) -> None:
        self._weights = weights
        self._beta2 = beta2
        self._roots = weights.grads.zeros_like()
        self._known = False

    def begin(self, step: int) -> None:
        """Take the roots of the second moment, bias corrected; 1 where there is none."""
        state = self._weights.state
        self._known = state.step > 0
        if not self._known:
            return
        correction = 1 / sqrt(1 - self._beta2**state.step)
        for _, (second, roots) in ranges(state.buffers["second"], self._roots):
            least = LEAST_SHARE * float(second.mean(dtype=np.float64)) if second.size else 0.0
            roots_of(second, roots, second.dtype.type(least), second.dtype.type(correction))

    def replace(self, names: Sequence[str]) -> None:
        """Divide the gradients of these tensors."""
        if self._known:
            for name in names:
                divide(self._weights.grads[name].reshape(-1), self._roots[name].reshape(-1))

    def restore(self) -> None:
        """Multiply the sums of all tensors."""
        if self._known:
            for _, (grad, roots) in ranges(self._weights.grads, self._roots):
                multiply(grad, roots)


def make_signal(config: Config, weights: Weights, ranks: int) -> Signal:
    """Build what ``exchange.signal`` names, for a data axis of so many ranks that train."""
    exchange, optim = config.exchange, config.optim
    if exchange.signal == "gradient":
        return Gradient()
    if exchange.signal == "preconditioned":
        return Preconditioned(weights, optim.beta2)
    if optim.kind == "sgd":
        return Momentum(weights.grads, optim.momentum)
    frozen = FrozenAdamW(beta1=optim.beta1, beta2=optim.beta2, eps=optim.eps, weight_decay=optim.weight_decay)
    return LateMomentum(weights, frozen, ranks=ranks, warmup_steps=exchange.warmup_steps)


def compile_signal() -> None:
    """Run every kernel of this module once, on a few elements."""
    params = Params(Layout([ParamSpec("x", (3,), decay=True)]))
    optimizer = FrozenAdamW()
    state = optimizer.init(params)
    optimizer.freeze(state)
    optimizer.step(params, params.zeros_like(), state, 0.0)
    x = params.zeros_like().flat
    roots_of(x, x, x[0], x[0])
    multiply(x, x)
    divide(x, x)
    Momentum(params.zeros_like(), 0.5).replace(["x"])
