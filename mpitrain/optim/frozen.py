"""AdamW whose second moment stands still: then a step is linear in the first one (1-bit Adam, Tang 2021)."""

from dataclasses import dataclass
from math import sqrt

import numpy as np

from mpitrain.kernels import optimizer as kernels
from mpitrain.optim.optimizer import AdamW, OptimizerState, keep, ranges
from mpitrain.params import Params

LEAST_SHARE = 0.01
"""Of a tensor's mean second moment: no entry counts less. Where there was hardly a gradient before, as in the row of a
rare token, a later one moves a weight by ten times what is usual in its tensor at most."""


@dataclass(frozen=True, kw_only=True)
class FrozenAdamW(AdamW):
    """`AdamW` from where it stands, with first moments in place of gradients."""

    def freeze(self, state: OptimizerState) -> None:
        """Turn "second" into its own root, bias corrected: the denominator of all steps to come.

        Of a tensor that never had a gradient it is 1, not 0: what comes late moves it slowly instead of without bound.
        """
        correction = 1 / sqrt(1 - self.beta2**state.step) if state.step else 1.0
        for _, (second,) in ranges(state.buffers["second"]):
            least = LEAST_SHARE * float(second.mean(dtype=np.float64)) if second.size else 0.0
            kernels.roots_of(second, second, second.dtype.type(least), second.dtype.type(correction))

    def step(self, params: Params, grads: Params, state: OptimizerState, lr: float) -> None:
        """Take one step; ``grads`` are the first moments, which are kept."""
        state.step += 1
        scalar = params.flat.dtype.type
        rate = scalar(lr / (1 - self.beta1**state.step))
        moments = state.buffers["first"], state.buffers["second"]
        for spec, (param, grad, first, second) in ranges(params, grads, *moments):
            share = scalar(keep(spec, lr, self.weight_decay))
            kernels.frozen_adamw(param, grad, first, second, rate, scalar(self.eps), share)
