"""What a chain can be cut into, and what each piece costs: counted, by a dry run of one sample; no MPI.

A unit is a layer of the chain with all that follows it up to the next layer with parameters: an activation or a pooling
stays with the layer whose output it maps. What comes before the first parameters belongs to the first unit.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from math import prod
from statistics import median
from time import perf_counter
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from mpitrain.arrays import Floats, Ints
from mpitrain.nn.attention import Attention
from mpitrain.nn.layer import AnyLayer, Chain, Context
from mpitrain.nn.linear import Linear
from mpitrain.nn.split import TensorSplit
from mpitrain.parallel.accounting import base_of, bases_of, buffers_of
from mpitrain.params import ParamSpec

ROUNDS = 5
"""Times that a unit is measured; the median counts."""


class Swap(NamedTuple):
    """What the ranks of a tensor axis exchange for one sample.

    Attributes
    ----------
    kind : str
        A sum of the whole on all ranks; or one half of it, by time slices: all-gather or reduce-scatter.
    size : int
        Elements of the whole.
    time : int
        Steps into which the whole is cut for the slices; 0: it is cut by elements.
    """

    kind: Literal["sum", "gather", "scatter"]
    size: int
    time: int = 0


class CountingSplit(TensorSplit):
    """Keeps the shapes right, exchanges nothing, and notes what would have been exchanged.

    Parameters
    ----------
    rank, size, sequence
        As of `TensorSplit`.

    Attributes
    ----------
    swaps : list of Swap
        Of one sample; the caller may empty it.
    """

    def __init__(self, rank: int, size: int, *, sequence: bool = False) -> None:
        super().__init__(rank, size, sequence=sequence)
        self.swaps: list[Swap] = []

    def total(self, x: Floats, *, exact: bool) -> Floats:
        """Note a sum."""
        self.swaps.append(Swap("sum", x.size // len(x)))
        return super().total(x, exact=exact)

    def gather_slices(self, x: Floats, time: int, *, exact: bool) -> Floats:
        """Note an all-gather."""
        whole = super().gather_slices(x, time, exact=exact)
        self.swaps.append(Swap("gather", whole.size // len(x), time))
        return whole

    def scatter_slices(self, x: Floats, *, exact: bool) -> Floats:
        """Note a reduce-scatter."""
        self.swaps.append(Swap("scatter", x.size // len(x), x.shape[1]))
        return super().scatter_slices(x, exact=exact)


@dataclass(frozen=True)
class Unit:
    """Layers that stay on one rank.

    Attributes
    ----------
    name : str
        What the names of its parameters begin with: ``blocks.0``.
    start, stop : int
        Its layers are ``chain.layers[start:stop]``.
    specs : tuple of ParamSpec
        Its parameters.
    work : float
        Cost of a sample: multiply-adds of forward, or seconds of forward and backward.
    output_shape : tuple of int
        Shape of what leaves it, of one sample: what crosses a cut behind it.
    source : int
        Identifies the array that it reads.
    kept : dict of int to int
        Bytes a sample of the arrays that backward needs, by what identifies the array: two units may keep the same one.
    forward_swaps, backward_swaps : tuple of Swap
        What the tensor axis exchanges, in order; empty where the chain is not split.
    """

    name: str
    start: int
    stop: int
    specs: tuple[ParamSpec, ...]
    work: float
    output_shape: tuple[int, ...]
    source: int = 0
    kept: Mapping[int, int] = field(default_factory=dict)
    forward_swaps: tuple[Swap, ...] = ()
    backward_swaps: tuple[Swap, ...] = ()

    @property
    def num_parameters(self) -> int:
        """Elements of the parameters."""
        return sum(spec.size for spec in self.specs)

    @property
    def output_size(self) -> int:
        """Elements a sample that leave it."""
        return prod(self.output_shape)


def units(
    chain: Chain, input_shape: tuple[int, ...], dtype: npt.DTypeLike = np.float32, split: CountingSplit | None = None
) -> list[Unit]:
    """List the units of a chain, in forward order.

    Parameters
    ----------
    chain : Chain
        Not split, or by a split that exchanges nothing.
    input_shape : tuple of int
        Of one sample.
    dtype : dtype
        Of the input: an integer type for tokens, which run through float32 parameters.
    split : CountingSplit, optional
        With which the chain was built.

    Notes
    -----
    Runs one sample of zeros through parameters that are zero and exist for one unit at a time, in training, so that the
    masks of dropout count. The caches of the one sample are held until the end.
    """
    found: list[Unit] = []
    y = np.zeros((1, *input_shape), dtype)
    held: list[object] = [y]  # alive, so that no other array is taken for one of these
    for start, stop in _ranges(chain.layers):
        piece, context = Chain(chain.layers[start:stop]), _context(1)
        specs = piece.specs()
        params = _zeros(specs, y.dtype)
        work, source = _multiply_adds(piece, params, y), id(base_of(y))
        forward = _noted(split)
        y, cache = piece.forward(params, y, context)
        forward_swaps = tuple(forward)
        held += [y, cache]
        kept = buffers_of(cache, exclude=bases_of([*params.values(), context.samples]))
        backward = _noted(split)
        if split is not None:
            piece.backward(params, cache, np.zeros_like(y), _zeros(specs, y.dtype))
        name = _name(specs, found)
        found.append(
            Unit(name, start, stop, tuple(specs), work, y.shape[1:], source, kept, forward_swaps, tuple(backward))
        )
    return found


def _noted(split: CountingSplit | None) -> list[Swap]:
    """Return a new list that the split writes into from now on."""
    swaps: list[Swap] = []
    if split is not None:
        split.swaps = swaps
    return swaps


def measured(
    chain: Chain, found: Sequence[Unit], input_shape: tuple[int, ...], dtype: npt.DTypeLike = np.float32, batch: int = 8
) -> list[float]:
    """Measure the seconds a sample of forward and backward of every unit: a median, after a round to warm up.

    Parameters
    ----------
    batch : int
        Samples of a round.
    """
    y = np.zeros((batch, *input_shape), dtype)
    seconds = []
    for unit in found:
        piece = Chain(chain.layers[unit.start : unit.stop])
        params, grads = _zeros(unit.specs, y.dtype), _zeros(unit.specs, y.dtype)
        rounds = []
        for _ in range(1 + ROUNDS):
            begin = perf_counter()
            output, cache = piece.forward(params, y, _context(batch))
            piece.backward(params, cache, output, grads)
            rounds.append(perf_counter() - begin)
        seconds.append(median(rounds[1:]) / batch)
        y = output
    return seconds


def kept_bytes(found: Iterable[Unit]) -> int:
    """Add up what backward needs of a sample in neighbouring units; an array that two of them keep counts once."""
    together: dict[int, int] = {}
    for unit in found:
        together.update(unit.kept)
    return sum(together.values())


def _ranges(layers: Sequence[AnyLayer]) -> list[tuple[int, int]]:
    starts = [index for index, layer in enumerate(layers) if layer.specs()]
    starts[:1] = [0]
    return list(zip(starts, [*starts[1:], len(layers)], strict=True))


def _zeros(specs: Iterable[ParamSpec], like: np.dtype[np.generic]) -> dict[str, Floats]:
    dtype = like if like == np.float64 else np.float32
    return {spec.name: np.zeros(spec.shape, dtype) for spec in specs}


def _context(samples: int) -> Context:
    return Context(train=True, samples=np.arange(samples))


def _multiply_adds(layer: AnyLayer, params: Mapping[str, Floats], x: Floats | Ints) -> float:
    """Count the multiply-adds of forward: those of matrix products, and one an element for everything else."""
    work, _ = _traced(layer, params, x)
    return work


def _traced(layer: AnyLayer, params: Mapping[str, Floats], x: Floats | Ints) -> tuple[float, Floats | Ints]:
    if isinstance(layer, Chain):
        total = 0.0
        for inner in layer.layers:
            work, x = _traced(inner, params, x)
            total += work
        return total, x
    y, _ = layer.forward(params, x, _context(1))
    if isinstance(layer, Linear):
        return prod(x.shape[:-1]) * float(layer.specs()[0].size), y
    if isinstance(layer, Attention):
        return 2.0 * x.shape[1] * y.size, y  # T products of D for each of T·H scores, and the same for the values
    return float(y.size), y


def _name(specs: Sequence[ParamSpec], before: Sequence[Unit]) -> str:
    """Name a unit by what its parameters' names have in common; those of an earlier unit (tied ones) say nothing."""
    earlier = {spec.name for unit in before for spec in unit.specs}
    paths = [spec.name.split(".")[:-1] for spec in specs if spec.name not in earlier]
    shared = takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))
    return ".".join(parts[0] for parts in shared) or "layers"
