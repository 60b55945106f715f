"""Splitting layers over the ranks of a tensor axis: who holds what, and the operators between the parts.

The operators come in conjugate pairs, named as in Megatron (Shoeybi et al., 2019; with sequence parallelism Korthikanti
et al., 2022): what one does forward, the other does backward.

=================  ===========  ==================================  ==================================
class              Megatron     forward                             backward
=================  ===========  ==================================  ==================================
Enter              f            identity                            sum over the ranks
Leave              g            sum over the ranks                  identity
EnterFromSlices    g            all-gather of the time slices       reduce-scatter into time slices
LeaveToSlices      g-bar        reduce-scatter into time slices     all-gather of the time slices
SplitTime          (f)          the own time slice                  all-gather of the time slices
GatherTime         (g)          all-gather of the time slices       the own time slice
=================  ===========  ==================================  ==================================

The last two bound the region in which ranks hold slices. Outside of it all of them compute the same.

Shape suffixes: B batch, T all time steps, t those of this rank's slice.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mpitrain.arrays import Floats
from mpitrain.errors import ConfigError
from mpitrain.nn.layer import AnyLayer, Chain, Context, Layer, Tensors
from mpitrain.params import ParamSpec
from mpitrain.partition import ShardSpec, bounds, split_sizes


class TensorSplit:
    """The part of every layer that one rank of the tensor axis holds, and how the ranks add up what they computed.

    This base class exchanges nothing: with one rank there is nothing to exchange. With more it keeps only the shapes
    right, for counting and for listing parameters without MPI.

    Parameters
    ----------
    rank, size : int
        Position on the tensor axis, and its ranks.
    sequence : bool
        Whether norms, dropout and biases inside blocks are split too, over time steps. Never on one rank.
    """

    def __init__(self, rank: int = 0, size: int = 1, *, sequence: bool = False) -> None:
        self.rank = rank
        self.size = size
        self.sequence = sequence and size > 1

    def __repr__(self) -> str:
        return f"TensorSplit(rank={self.rank}, size={self.size}, sequence={self.sequence})"

    def bounds(self, total: int) -> tuple[int, int]:
        """Return which of ``total`` channels, tokens or time steps are this rank's; sizes differ by one at most."""
        return bounds(split_sizes(total, self.size))[self.rank]

    def shard(self, whole: ParamSpec, dim: int) -> ParamSpec:
        """Declare this rank's part of a parameter, cut along ``dim``."""
        if self.size == 1:
            return whole
        start, stop = [0] * len(whole.shape), list(whole.shape)
        start[dim], stop[dim] = self.bounds(whole.shape[dim])
        shard = ShardSpec(whole.shape, tuple(start), tuple(stop))
        return replace(whole, shape=shard.shape, shard=shard)

    def enter(self, time: int | None = None) -> tuple[AnyLayer, ...]:
        """Return what stands before layers whose outputs are split: Megatron's f, or g on time slices.

        Parameters
        ----------
        time : int, optional
            T, where the layers before hold slices of it; None where they hold all.
        """
        if self.size == 1:
            return ()
        return (Enter(self),) if time is None else (EnterFromSlices(self, time),)

    def leave(self, time: int | None = None) -> tuple[AnyLayer, ...]:
        """Return what stands behind layers whose inputs are split: Megatron's g, or g-bar on time slices."""
        if self.size == 1:
            return ()
        return (Leave(self),) if time is None else (LeaveToSlices(self, time),)

    def split_time(self, time: int) -> tuple[AnyLayer, ...]:
        """Return what stands where the layers behind hold slices of T time steps."""
        return (SplitTime(self, time),) if self.sequence else ()

    def gather_time(self, time: int) -> tuple[AnyLayer, ...]:
        """Return what stands where the layers before held slices of T time steps."""
        return (GatherTime(self, time),) if self.sequence else ()

    def total(self, x: Floats, *, exact: bool) -> Floats:
        """Sum over the ranks, the same bits on all. Collective over the tensor axis.

        Parameters
        ----------
        x : float array
            This rank's addend, of one shape on all ranks; untouched.
        exact : bool
            Whether it must travel as it is; otherwise it may be compressed.

        Returns
        -------
        array like ``x``
            Filled with NaN on all ranks where some rank's addend is not finite.
        """
        return x

    def gather_slices(self, x: Floats, time: int, *, exact: bool) -> Floats:
        """Join the time slices (B, t, …) of all ranks to (B, T, …), the same bits on all. Like ``total`` otherwise."""
        whole: Floats = np.zeros((x.shape[0], time, *x.shape[2:]), x.dtype)
        whole[:, slice(*self.bounds(time))] = x
        return whole

    def scatter_slices(self, x: Floats, *, exact: bool) -> Floats:
        """Sum (B, T, …) over the ranks and return this rank's time slice (B, t, …). Like ``total`` otherwise.

        Here NaN reaches the ranks that sent or should have got what was not finite.
        """
        return x[:, slice(*self.bounds(x.shape[1]))]


WHOLE = TensorSplit()
"""Layers that are not split."""


@dataclass(frozen=True)
class SplitCache:
    """Nothing to remember."""


NOTHING = SplitCache()


@dataclass(frozen=True)
class Enter(Layer[Floats, SplitCache]):
    """Megatron's f: identity forward, sum over the ranks backward."""

    split: TensorSplit

    def forward(self, params: Tensors, x: Floats, context: Context) -> tuple[Floats, SplitCache]:
        """Pass on what all ranks hold."""
        return x, NOTHING

    def backward(self, params: Tensors, cache: SplitCache, dy: Floats, grads: Tensors) -> Floats:
        """Add up the gradients through the parts of all ranks."""
        return self.split.total(dy, exact=False)


@dataclass(frozen=True)
class Leave(Layer[Floats, SplitCache]):
    """Megatron's g: sum over the ranks forward, identity backward."""

    split: TensorSplit

    def forward(self, params: Tensors, x: Floats, context: Context) -> tuple[Floats, SplitCache]:
        """Add up what the ranks computed from their parts."""
        return self.split.total(x, exact=not context.train), NOTHING

    def backward(self, params: Tensors, cache: SplitCache, dy: Floats, grads: Tensors) -> Floats:
        """Give every part the whole gradient."""
        return dy


@dataclass(frozen=True)
class OnSlices(Layer[Floats, SplitCache]):
    """What the operators at time slices share.

    Attributes
    ----------
    split : TensorSplit
    time : int
        T; every batch must have as many steps, since a rank cannot tell it from its slice.
    """

    split: TensorSplit
    time: int

    def check(self, x: Floats) -> None:
        """Refuse whole sequences of another length."""
        if x.shape[1] != self.time:
            raise ConfigError(
                f"model: a sequence has {x.shape[1]} time steps, but with parallel.sequence = true every one must "
                f"have the {self.time} that the model was built for"
            )


class EnterFromSlices(OnSlices):
    """Megatron's g of sequence parallelism: all-gather forward, reduce-scatter backward."""

    def forward(self, params: Tensors, x: Floats, context: Context) -> tuple[Floats, SplitCache]:
        """Map time slices (B, t, C) to (B, T, C)."""
        return self.split.gather_slices(x, self.time, exact=not context.train), NOTHING

    def backward(self, params: Tensors, cache: SplitCache, dy: Floats, grads: Tensors) -> Floats:
        """Add up the gradients through the parts of all ranks; return this rank's slice."""
        return self.split.scatter_slices(dy, exact=False)


class LeaveToSlices(OnSlices):
    """Megatron's g-bar of sequence parallelism: reduce-scatter forward, all-gather backward."""

    def forward(self, params: Tensors, x: Floats, context: Context) -> tuple[Floats, SplitCache]:
        """Add up what the ranks computed, (B, T, C); return this rank's slice (B, t, C)."""
        self.check(x)
        return self.split.scatter_slices(x, exact=not context.train), NOTHING

    def backward(self, params: Tensors, cache: SplitCache, dy: Floats, grads: Tensors) -> Floats:
        """Give every part the whole gradient."""
        return self.split.gather_slices(dy, self.time, exact=False)


class SplitTime(OnSlices):
    """Where the region of time slices begins: slice forward, all-gather backward."""

    def forward(self, params: Tensors, x: Floats, context: Context) -> tuple[Floats, SplitCache]:
        """Map (B, T, C), the same on all ranks, to this rank's slice (B, t, C)."""
        self.check(x)
        return x[:, slice(*self.split.bounds(self.time))].copy(), NOTHING  # a view would keep all of x

    def backward(self, params: Tensors, cache: SplitCache, dy: Floats, grads: Tensors) -> Floats:
        """Join the gradients of the slices."""
        return self.split.gather_slices(dy, self.time, exact=False)


class GatherTime(OnSlices):
    """Where the region of time slices ends: all-gather forward, slice backward."""

    def forward(self, params: Tensors, x: Floats, context: Context) -> tuple[Floats, SplitCache]:
        """Map time slices (B, t, C) to (B, T, C)."""
        return self.split.gather_slices(x, self.time, exact=not context.train), NOTHING

    def backward(self, params: Tensors, cache: SplitCache, dy: Floats, grads: Tensors) -> Floats:
        """Take this rank's slice of the gradient, which all ranks hold."""
        return np.ascontiguousarray(dy[:, slice(*self.split.bounds(self.time))])


def as_one(layers: Sequence[AnyLayer]) -> AnyLayer:
    """Make one layer of several, so that models have the same layers however they are split."""
    return layers[0] if len(layers) == 1 else Chain(layers)
