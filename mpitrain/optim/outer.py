"""The outer optimizer of local steps: Nesterov's momentum on the mean change of the replicas' weights.

After H inner steps from θ replica i holds θ_i. With D = Σ n_i/N (θ − θ_i), n_i the samples that it used:
M ← μM + D, θ ← θ − η(D + μM) (DiLoCo: Douillard et al., 2023; fragments and merging: Douillard et al., 2025).
"""

from dataclasses import dataclass

import numpy as np

from mpitrain.arrays import Floats
from mpitrain.kernels import optimizer as kernels


@dataclass(frozen=True, kw_only=True)
class OuterNesterov:
    """A rule that turns the mean change of a round into new global weights.

    Attributes
    ----------
    lr : float
        η; 1 with momentum 0 makes the mean of the replicas' weights the new ones.
    momentum : float
        μ, in [0, 1).
    """

    lr: float
    momentum: float

    def step(self, params: Floats, change: Floats, momentum: Floats) -> None:
        """Take one step.

        Elementwise: the same bits wherever the inputs are the same; zeros (padding) stay zeros.

        Parameters
        ----------
        params : (n,) array, written
            On entry the mean of the replicas' weights, θ − D: of a single replica that is what it holds, to the bit,
            which the difference of a difference need not be. On exit the new θ.
        change : (n,) array
            D.
        momentum : (n,) array, written
            M.
        """
        scalar = params.dtype.type
        rest, beta, ahead = 1 - self.lr, self.momentum, self.lr * self.momentum
        kernels.outer_nesterov(params, change, momentum, scalar(rest), scalar(beta), scalar(ahead))


def merge(local: Floats, params: Floats, share: float) -> None:
    """Take over new global weights, but for a share of what a replica had done since it sent its change.

    Parameters
    ----------
    local : (n,) array, written
        Weights of the replica: become ``(1 − share)·params + share·local``; with share 0 a copy, whatever they were.
    params : (n,) array
        The global weights.
    share : float
        In [0, 1).
    """
    if share:
        scalar = local.dtype.type
        kernels.blend(local, params, scalar(share), scalar(1 - share))
    else:
        np.copyto(local, params)
