"""What a chain can be cut into, and what each piece costs: counted, by a dry run of one sample; no MPI.

A unit is a layer of the chain with all that follows it up to the next layer with parameters: an activation or a pooling
stays with the layer whose output it maps. What comes before the first parameters belongs to the first unit.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from math import prod
from statistics import median
from time import perf_counter

import numpy as np
import numpy.typing as npt

from mpitrain.arrays import Floats, Ints
from mpitrain.nn.attention import Attention
from mpitrain.nn.layer import AnyLayer, Chain, Context
from mpitrain.nn.linear import Linear
from mpitrain.params import ParamSpec

ROUNDS = 5
"""Times that a unit is measured; the median counts."""


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
    kept : dict of int to int
        Bytes a sample of the arrays that backward needs, by a number that identifies the array among all of the chain:
        two units may keep the same one.
    """

    name: str
    start: int
    stop: int
    specs: tuple[ParamSpec, ...]
    work: float
    output_shape: tuple[int, ...]
    kept: Mapping[int, int]

    @property
    def num_parameters(self) -> int:
        """Elements of the parameters."""
        return sum(spec.size for spec in self.specs)

    @property
    def output_size(self) -> int:
        """Elements a sample that leave it."""
        return prod(self.output_shape)


def units(chain: Chain, input_shape: tuple[int, ...], dtype: npt.DTypeLike = np.float32) -> list[Unit]:
    """List the units of a chain, in forward order.

    Parameters
    ----------
    input_shape : tuple of int
        Of one sample.
    dtype : dtype
        Of the input: an integer type for tokens, which run through float32 parameters.

    Notes
    -----
    Runs one sample of zeros through parameters that are zero and exist for one unit at a time, in training, so that the
    masks of dropout count. The caches of the one sample are held until the end.
    """
    found: list[Unit] = []
    held: list[object] = []
    numbers: dict[int, int] = {}
    y = np.zeros((1, *input_shape), dtype)
    for start, stop in _ranges(chain.layers):
        piece = Chain(chain.layers[start:stop])
        specs = piece.specs()
        params = _zeros(specs, y.dtype)
        work = _multiply_adds(piece, params, y)
        y, cache = piece.forward(params, y, _context(1))
        held += [y, cache]
        mine = {id(buffer) for buffer in buffers(params)}
        kept = {numbers.setdefault(id(b), len(numbers)): b.nbytes for b in buffers(cache) if id(b) not in mine}
        found.append(Unit(_name(specs, found), start, stop, tuple(specs), work, y.shape[1:], kept))
    return found


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


def buffers(value: object) -> Iterator[npt.NDArray[np.generic]]:
    """Yield the arrays that own the memory which a cache (arrays in tuples, mappings and dataclasses) refers to."""
    if isinstance(value, np.ndarray):
        while isinstance(value.base, np.ndarray):
            value = value.base
        yield value
        return
    for part in _parts(value):
        yield from buffers(part)


def kept_bytes(found: Iterable[Unit]) -> int:
    """Add up what backward needs of a sample in neighbouring units; an array that two of them keep counts once."""
    together: dict[int, int] = {}
    for unit in found:
        together.update(unit.kept)
    return sum(together.values())


def _parts(value: object) -> Iterable[object]:
    if isinstance(value, tuple | list):
        return value
    if isinstance(value, Mapping):
        return value.values()
    if is_dataclass(value):
        return [getattr(value, item.name) for item in fields(value)]
    return ()


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
        return prod(x.shape[:-1]) * float(params[f"{layer.name}.weight"].size), y
    if isinstance(layer, Attention):
        return 2.0 * x.shape[1] * y.size, y  # T products of D for each of T·H scores, and the same for the values
    return float(y.size), y


def _name(specs: Sequence[ParamSpec], before: Sequence[Unit]) -> str:
    """Name a unit by what its parameters' names have in common."""
    paths = [spec.name.split(".")[:-1] for spec in specs]
    shared: list[str] = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    name = ".".join(shared) or "layers"
    return f"{name} again" if any(unit.name == name for unit in before) else name
