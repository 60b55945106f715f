"""Four float64 side by side, for sums whose order is fixed: numba alone makes them one value at a time.

In LLVM's own vector type, which compiles for every processor to what it has, with the same bits: every lane is added
up in the order of the source.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import models, register_model
from numba.np import arrayobj

from mpitrain.kernels.bits import instruction

COUNT = 4

_VECTOR = ir.VectorType(ir.DoubleType(), COUNT)


class _Lanes(types.Type):
    def __init__(self) -> None:
        super().__init__("float64 x 4")


@register_model(_Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _VECTOR)


_lanes = _Lanes()


@instruction(lambda: np.zeros(COUNT))
def zeros(typing_context: Any) -> Any:
    """Begin sums."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return ir.Constant(_VECTOR, [0.0] * COUNT)

    return _lanes(), build


@instruction(lambda array, start: array[start : start + COUNT].astype(np.float64))
def load(typing_context: Any, array: Any, start: Any) -> Any:
    """Read elements ``start`` to ``start + 3`` of a contiguous vector of float32 or float64; unchecked."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = arrayobj.make_array(array)(context, builder, args[0]).data
        item = data.type.pointee
        place = builder.bitcast(builder.gep(data, [args[1]]), ir.VectorType(item, COUNT).as_pointer())
        values = builder.load(place, align=1 if not array.aligned else array.dtype.bitwidth // 8)
        return values if item == ir.DoubleType() else builder.fpext(values, _VECTOR)

    if array.ndim != 1 or array.layout != "C" or array.dtype not in (types.float32, types.float64):
        return None
    return _lanes(array, types.intp), build


@instruction(lambda sums, a, b: sums + a * b)
def add_products(typing_context: Any, sums: Any, a: Any, b: Any) -> Any:
    """Return ``sums + a * b``, rounded twice."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fadd(args[0], builder.fmul(args[1], args[2]))

    return _lanes(_lanes, _lanes, _lanes), build


@instruction(tuple)
def split(typing_context: Any, lanes: Any) -> Any:
    """Return the lanes as a tuple of float64."""
    kind = types.UniTuple(types.float64, COUNT)

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        parts = [builder.extract_element(args[0], ir.Constant(ir.IntType(32), lane)) for lane in range(COUNT)]
        return context.make_tuple(builder, kind, parts)

    return kind(_lanes), build
