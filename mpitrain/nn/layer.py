"""What a layer is, and how layers are chained.

A layer holds sizes and names, never arrays: parameters and gradients are handed in, and what backward needs of
forward is returned as a cache. So several micro-batches can be in flight through one layer.

Shape suffixes in this folder: B batch, T time, C channels (model width), F features, K classes, V vocabulary,
H heads, D channels per head, N = B·T flattened leading dims, I inputs and O outputs of a linear map.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from mpitrain.arrays import Floats, Ints
from mpitrain.errors import DataError
from mpitrain.params import ParamSpec

Tensors = Mapping[str, Floats]
"""Parameters or gradients by name: a `mpitrain.params.Params`, or any other mapping of arrays."""

Finished = Callable[[list[str]], None]
"""Told the names of parameters whose gradients backward will not touch again."""

X = TypeVar("X", Floats, Ints)
C = TypeVar("C")


@dataclass(frozen=True, kw_only=True)
class Context:
    """What a forward pass depends on besides its input.

    Attributes
    ----------
    train : bool
        Whether dropout acts.
    key : int
        Seeds the noise of this step, 0 <= key < 2**64; the same on every rank.
    samples : (B,) int array
        Index of each sample of the batch among all samples of the step, over all ranks and micro-batches; noise
        follows it, so it does not depend on how the batch is split. May stay empty where dropout does not act.
    """

    train: bool
    key: int = 0
    samples: Ints = field(default_factory=lambda: np.zeros(0, np.int64))


EVALUATE = Context(train=False)
"""The context of an evaluation: no noise."""


class Layer(ABC, Generic[X, C]):
    """A differentiable map with input type ``X`` (floats or tokens) and cache type ``C`` (a frozen dataclass).

    Neither pass writes into its arguments, ``grads`` apart. Caches keep references to inputs: who writes into an
    input between forward and backward breaks the gradients.
    """

    def specs(self) -> list[ParamSpec]:
        """Declare the parameters, in forward order."""
        return []

    @abstractmethod
    def forward(self, params: Tensors, x: X, context: Context) -> tuple[Floats, C]:
        """Map ``x``, in the type of the parameters (float32 or float64), and return (y, cache)."""

    @abstractmethod
    def backward(self, params: Tensors, cache: C, dy: Floats, grads: Tensors) -> Floats:
        """Add the gradients of the parameters into ``grads`` and return the gradient by the input.

        A first layer, whose input needs no gradient, returns `no_gradient`.
        """


AnyLayer = Layer[Any, Any]
"""A layer in a chain of mixed ones: only the layer itself knows its cache."""


class ChainCache(NamedTuple):
    """Caches of the chained layers, in forward order."""

    caches: tuple[object, ...]


class Chain(Layer[Any, ChainCache]):
    """Layers one after the other.

    Attributes
    ----------
    layers : tuple of Layer
        In forward order. A slice of them is again a chain: a pipeline stage.
    """

    def __init__(self, layers: Sequence[AnyLayer]) -> None:
        self.layers = tuple(layers)
        self._names: list[list[str]] = []
        earlier: set[str] = set()
        for layer in self.layers:
            names = [spec.name for spec in layer.specs()]
            self._names.append([name for name in names if name not in earlier])
            earlier.update(names)

    def specs(self) -> list[ParamSpec]:
        """List the parameters of all layers, in forward order; what several layers declare alike is one (tied)."""
        listed: dict[ParamSpec, None] = {}
        for layer in self.layers:
            listed.update(dict.fromkeys(layer.specs()))
        return list(listed)

    def forward(self, params: Tensors, x: Floats | Ints, context: Context) -> tuple[Floats, ChainCache]:
        """Apply the layers in order."""
        caches = []
        y: Any = x
        for layer in self.layers:
            y, cache = layer.forward(params, y, context)
            caches.append(cache)
        return y, ChainCache(tuple(caches))

    def backward(
        self, params: Tensors, cache: ChainCache, dy: Floats, grads: Tensors, *, finished: Finished | None = None
    ) -> Floats:
        """Go back through the layers.

        Parameters
        ----------
        finished : callable, optional
            Called during the pass, in reverse forward order, with the parameters of each innermost layer as soon as
            their gradients are final; every parameter is reported exactly once, a tied one with its earliest layer.
        """
        for layer, names, inner in zip(self.layers[::-1], self._names[::-1], cache.caches[::-1], strict=True):
            if isinstance(layer, Chain):
                own = finished and _only(names, finished)
                dy = layer.backward(params, inner, dy, grads, finished=own)  # type: ignore[arg-type]
                continue
            dy = layer.backward(params, inner, dy, grads)
            if finished and names:
                finished(names)
        return dy


class Residual(Chain):
    """``x + chain(x)``."""

    def forward(self, params: Tensors, x: Floats | Ints, context: Context) -> tuple[Floats, ChainCache]:
        """Add the chain's output to its input."""
        y, cache = super().forward(params, x, context)
        return x + y, cache

    def backward(
        self, params: Tensors, cache: ChainCache, dy: Floats, grads: Tensors, *, finished: Finished | None = None
    ) -> Floats:
        """Add the gradient through the chain to the one past it."""
        return dy + super().backward(params, cache, dy, grads, finished=finished)


class Recomputed(Chain):
    """A chain that keeps only its input, and goes forward once more when its gradient is due (Chen et al., 2016)."""

    def forward(self, params: Tensors, x: Floats | Ints, context: Context) -> tuple[Floats, ChainCache]:
        """Apply the layers and forget their caches; the cache returned holds the input and the context."""
        return super().forward(params, x, context)[0], ChainCache((x, context))

    def backward(
        self, params: Tensors, cache: ChainCache, dy: Floats, grads: Tensors, *, finished: Finished | None = None
    ) -> Floats:
        """Go forward again, with the same noise, then back."""
        x, context = cache.caches
        _, inner = super().forward(params, x, context)  # type: ignore[arg-type]
        return super().backward(params, inner, dy, grads, finished=finished)


def _only(names: list[str], finished: Finished) -> Finished:
    """Hand on the names that are final once a chain is done: its others belong to an earlier layer too."""

    def report(done: list[str]) -> None:
        if final := [name for name in done if name in names]:
            finished(final)

    return report


def keep_freed_memory() -> None:
    """Make glibc keep what a step frees for the next step: page faults took up to half of a small Transformer's time.

    Freeing a block just under 32 MiB raises malloc's dynamic thresholds to their maximum (mallopt(3)); other
    allocators do not care. The block is never touched, so it costs no memory.
    """
    np.empty((32 << 20) - 8192, np.uint8)


def add_to(grads: Tensors, name: str, value: Floats) -> None:
    """Add ``value`` into the gradient ``name``, in place."""
    grad = grads[name]
    np.add(grad, value, out=grad)


def no_gradient(dy: Floats) -> Floats:
    """Stand for the gradient that nobody needs: no elements, the type of ``dy``."""
    return np.empty(0, dy.dtype)


def column_sums(x_NC: Floats) -> Floats:
    """Sum over the rows, as a matrix product: three times faster than ``sum(axis=0)`` on narrow arrays."""
    total_C: Floats = np.ones(len(x_NC), x_NC.dtype) @ x_NC
    return total_C


def row_sums(x_NC: Floats) -> Floats:
    """Sum each row to (N, 1), as a matrix product: numpy's reductions over a short last dim are slow."""
    sums_N1: Floats = x_NC @ np.ones((x_NC.shape[1], 1), x_NC.dtype)
    return sums_N1


def check_range(what: str, values: Ints, count: int) -> None:
    """Refuse indices outside 0 <= value < count: numpy would take negative ones from the end.

    Raises
    ------
    DataError
        Some value is outside.
    """
    if values.size and (values.min() < 0 or values.max() >= count):
        raise DataError(
            f"data: {what}s run from {values.min()} to {values.max()}, but the model knows 0 to {count - 1}; "
            f"correct the data or enlarge the model"
        )
