"""All parameters of a model in one allocation, with named views.

The layout orders tensors by group (tensors that one codec serves travel together), forward order within a group.
Large tensors start on a multiple of ``ALIGN`` elements, so that a codec's blocks never span two of them; small ones
are packed. Gradients, optimizer moments and memories are further buffers of the same layout.
"""

import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt

from mpitrain.arrays import Floats, aligned_zeros
from mpitrain.errors import ConfigError
from mpitrain.partition import ShardSpec

ALIGN = 128
"""Elements on which large tensors and groups start: the block of the codecs."""

SMALL_SIZE = 1024
"""Tensors with fewer elements, and all 1-D ones, count as small: they lose most by coarse codecs and weigh least."""


@dataclass(frozen=True)
class ParamSpec:
    """A parameter tensor as its layer declares it.

    Attributes
    ----------
    name : str
        Dotted path, unique in the model: ``blocks.0.attention.qkv.weight``.
    shape : tuple of int
        Shape of the held part; of the whole tensor where it is not split.
    std : float
        Standard deviation of the normal initial values; 0 for a constant.
    mean : float
        Mean of the initial values: 1 for gains, 0 elsewhere.
    decay : bool
        Whether weight decay applies (matrices, not gains and biases).
    shard : ShardSpec or None
        Position in the global tensor; None when the tensor is whole.
    partial : bool
        Of a whole tensor that all ranks of the tensor axis hold: whether each rank's gradient covers only its part of
        the sequence, so that the gradients must be added; otherwise they are all the same.
    """

    name: str
    shape: tuple[int, ...]
    std: float = 0.0
    mean: float = 0.0
    decay: bool = False
    shard: ShardSpec | None = None
    partial: bool = False

    @property
    def size(self) -> int:
        """Elements of the held part."""
        return prod(self.shape)

    @property
    def place(self) -> ShardSpec:
        """Position of the held part in the global tensor."""
        return self.shard or ShardSpec.whole(self.shape)

    @property
    def small(self) -> bool:
        """Whether the default rules send this tensor with little compression; as a whole, however it is split."""
        return len(self.shape) < 2 or prod(self.place.global_shape) < SMALL_SIZE


@dataclass(frozen=True)
class Segment:
    """One tensor's place in the flat buffer: elements ``start`` to ``stop``."""

    spec: ParamSpec
    group: str
    start: int

    @property
    def stop(self) -> int:
        """End of the tensor in the flat buffer."""
        return self.start + self.spec.size


class Layout:
    """Where each tensor lies in the flat buffer.

    Parameters
    ----------
    specs : list of ParamSpec
        Tensors in forward order.
    group_of : callable
        Names the group of a tensor; groups follow each other in order of first appearance.
    """

    def __init__(self, specs: list[ParamSpec], group_of: Callable[[ParamSpec], str] = lambda spec: "all") -> None:
        names = [spec.name for spec in specs]
        if len(set(names)) != len(names):
            raise ConfigError(f"model: two parameters share a name: {sorted(n for n in names if names.count(n) > 1)}")
        groups: dict[str, list[ParamSpec]] = {}
        for spec in specs:
            groups.setdefault(group_of(spec), []).append(spec)
        self.segments: dict[str, Segment] = {}
        self.groups: dict[str, tuple[int, int]] = {}
        cursor = 0
        for group, members in groups.items():
            start = cursor = _round_up(cursor)
            for spec in members:
                cursor = cursor if spec.small else _round_up(cursor)
                self.segments[spec.name] = Segment(spec, group, cursor)
                cursor += spec.size
            self.groups[group] = (start, cursor)
        self.size = cursor
        self.specs = specs

    @property
    def num_parameters(self) -> int:
        """Elements of all tensors, without the padding between them."""
        return sum(spec.size for spec in self.specs)

    def members(self, group: str) -> list[Segment]:
        """List the segments of a group in the order of the buffer."""
        return [segment for segment in self.segments.values() if segment.group == group]


class Params(Mapping[str, Floats]):
    """A flat buffer with named views; writing into a view writes into the buffer.

    Parameters
    ----------
    layout : Layout
        Shared by parameters, gradients and optimizer moments.
    dtype : dtype
        float32 to train; float64 runs the same code for gradient checks.

    Attributes
    ----------
    flat : (layout.size,) array
        The whole allocation, zero at the start and in the padding.
    """

    def __init__(self, layout: Layout, dtype: npt.DTypeLike = np.float32) -> None:
        self.layout = layout
        self.flat: Floats = aligned_zeros(layout.size, dtype)
        self._views = {
            name: self.flat[segment.start : segment.stop].reshape(segment.spec.shape)
            for name, segment in layout.segments.items()
        }

    def __getitem__(self, name: str) -> Floats:
        return self._views[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)

    def zeros_like(self) -> "Params":
        """Allocate a zeroed buffer of the same layout and type."""
        return Params(self.layout, self.flat.dtype)

    def initialize(self, seed: int) -> None:
        """Draw initial values; a tensor's values depend on the seed and its name alone, not on the layout."""
        for spec in self.layout.specs:
            place = spec.place
            rng = np.random.Generator(np.random.PCG64([seed, zlib.crc32(spec.name.encode())]))
            values = spec.mean + spec.std * rng.standard_normal(place.global_shape) if spec.std else spec.mean
            self[spec.name][...] = values[place.slices] if isinstance(values, np.ndarray) else values


def _round_up(index: int) -> int:
    return -(-index // ALIGN) * ALIGN
