"""A small model split in every way: which rank of a grid holds which part of which tensor."""

from functools import cache

import numpy as np

from mpitrain.partition import GridShape, ShardSpec, bounds, split_sizes

VOCABULARY, WIDTH, BLOCKS = 11, 8, 3
"""Neither the vocabulary nor the blocks divide by any number of ranks up to 8; the width does by 1, 2, 4 and 8."""

TIED = "embedding.weight"
"""On the first and on the last stage."""


def whole_tensors(seed=0):
    """Return every tensor whole, with values that tell one from another; one is float64, one has no elements."""
    rng = np.random.default_rng(seed)
    shapes = {TIED: (VOCABULARY, WIDTH), "position": (3, WIDTH), "norm.gain": (WIDTH,), "scale": (), "none": (0, 2)}
    for block in range(BLOCKS):
        shapes |= {f"blocks.{block}.up": (2 * WIDTH, WIDTH), f"blocks.{block}.up.bias": (2 * WIDTH,)}
        shapes |= {f"blocks.{block}.down": (WIDTH, 2 * WIDTH)}
    names = [*(f"params/{name}" for name in shapes), f"optimizer/first/{TIED}", "optimizer/first/blocks.1.down"]
    tensors = {
        name: np.asarray(rng.standard_normal(shapes[name.removeprefix("optimizer/first/").removeprefix("params/")]))
        for name in names
    }
    tensors = {name: values.astype(np.float32) for name, values in tensors.items()}
    tensors["params/position"] = tensors["params/position"].astype(np.float64) / 3
    return tensors


@cache
def part_of(name, shape, grid, rank):
    """Return the part of a tensor that a rank of the grid holds; None where it is on another stage."""
    _, stage, tensor_rank = grid.coordinates(rank)
    if stage not in stages_of(name, grid.pp):
        return None
    if name.endswith(("up", "up.bias", TIED)):
        return rows(shape, 0, grid.tp, tensor_rank)
    return rows(shape, 1, grid.tp, tensor_rank) if name.endswith("down") else ShardSpec.whole(shape)


def stages_of(name, stages):
    """List the stages that hold a tensor; a stage may have no block at all."""
    if name.endswith(TIED):
        return {0, stages - 1}
    if "blocks." not in name:
        return {0} if name.endswith("position") else {stages - 1}
    block = int(name.split("blocks.")[1].split(".")[0])
    return {next(stage for stage, (a, b) in enumerate(bounds(split_sizes(BLOCKS, stages))) if a <= block < b)}


def rows(shape, dim, parts, index):
    """Cut one dimension into ragged parts."""
    start, stop = [0] * len(shape), list(shape)
    start[dim], stop[dim] = bounds(split_sizes(shape[dim], parts))[index]
    return ShardSpec(shape, tuple(start), tuple(stop))


def held(grid, rank, whole):
    """Return the arrays that a rank holds of whole tensors, copied, and the parts that they are."""
    specs = {name: part_of(name, values.shape, grid, rank) for name, values in whole.items()}
    specs = {name: spec for name, spec in specs.items() if spec}
    split = {name: spec for name, spec in specs.items() if spec != ShardSpec.whole(spec.global_shape)}
    return {name: np.array(whole[name][spec.slices]) for name, spec in specs.items()}, split


def layouts(most):
    """List all grids of at most that many ranks."""
    sizes = range(1, most + 1)
    return [GridShape(d, p, t) for d in sizes for p in sizes for t in sizes if d * p * t <= most]
