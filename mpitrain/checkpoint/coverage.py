"""Parts of tensors: where two meet, and whether some make a whole. Pure arithmetic."""

from collections.abc import Sequence
from itertools import combinations
from math import prod

from mpitrain.partition import ShardSpec


def is_place(spec: ShardSpec) -> bool:
    """Tell whether a part lies inside its tensor."""
    whole, start, stop = spec.global_shape, spec.start, spec.stop
    if not len(whole) == len(start) == len(stop):
        return False
    return all(0 <= a <= b <= n for a, b, n in zip(start, stop, whole, strict=True))


def overlap(one: ShardSpec, other: ShardSpec) -> ShardSpec | None:
    """Return what two parts of one tensor share; None where that is no element."""
    start = tuple(map(max, one.start, other.start))
    stop = tuple(map(min, one.stop, other.stop))
    return ShardSpec(one.global_shape, start, stop) if all(map(int.__lt__, start, stop)) else None


def index_in(holder: ShardSpec, part: ShardSpec) -> tuple[slice, ...]:
    """Return the index of ``part`` in the array of ``holder``, of which it is a part."""
    return tuple(slice(a - o, b - o) for a, b, o in zip(part.start, part.stop, holder.start, strict=True))


def contradiction(parts: Sequence[ShardSpec]) -> str:
    """Say why parts do not cover their tensor exactly once; empty where they do."""
    shapes = {part.global_shape for part in parts}
    if len(shapes) != 1:
        return f"its shards disagree about its shape ({', '.join(sorted(map(str, shapes))) or 'none is there'})"
    (whole,) = shapes
    if any(overlap(one, other) for one, other in combinations(parts, 2)):
        return "its shards overlap"
    covered = sum(prod(part.shape) for part in parts)
    if covered != prod(whole):
        return f"its shards hold {covered:,} of its {prod(whole):,} elements"
    return ""


def cut_rows(spec: ShardSpec, most: int) -> list[ShardSpec]:
    """Cut a part along its first dimension into parts of at most ``most`` elements, or of one row."""
    if not spec.shape:
        return [spec]
    rows = max(1, most // max(1, prod(spec.shape[1:])))
    first, last = spec.start[0], spec.stop[0]
    return [
        ShardSpec(spec.global_shape, (row, *spec.start[1:]), (min(row + rows, last), *spec.stop[1:]))
        for row in range(first, last, rows)
    ]
