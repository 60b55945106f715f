"""Instructions that numba does not offer, mostly between floats and the integers of their bits, taken from LLVM.

``fptrunc`` and ``fpext`` on the half type are IEEE 754 conversions with rounding to nearest even. They compile to the
processor's instruction where it has one (F16C) and to the compiler's library routine elsewhere, with the same bits.
"""

from collections.abc import Callable
from typing import Any, cast

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np import arrayobj

Instruction = Callable[..., Any]


def instruction(plain: Instruction) -> Callable[[Callable[..., Any]], Instruction]:
    """Make an instruction; ``plain`` does the same in numpy, for kernels that run uncompiled (NUMBA_DISABLE_JIT)."""
    return lambda build: plain if _numba_config.DISABLE_JIT else cast(Instruction, intrinsic(build))


_numba_config: Any = numba.config

_BITS: dict[Any, Any] = {types.float32: types.uint32, types.float64: types.uint64}
_AS_FLOAT: dict[Any, tuple[Any, Any]] = {
    types.uint32: (types.float32, ir.FloatType()),
    types.uint64: (types.float64, ir.DoubleType()),
}


@instruction(lambda bits: bits.view(np.float32 if bits.dtype == np.uint32 else np.float64))
def as_float(typing_context: Any, bits: Any) -> Any:
    """Read the bits of a uint32 as float32, of a uint64 as float64."""
    if bits not in _AS_FLOAT:
        return None
    kind, llvm = _AS_FLOAT[bits]

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], llvm)

    return kind(bits), build


@instruction(lambda value: value.view(np.uint32 if value.dtype == np.float32 else np.uint64))
def as_bits(typing_context: Any, value: Any) -> Any:
    """Read a float32 as the uint32 of its bits, a float64 as uint64."""
    if value not in _BITS:
        return None

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(signature.return_type.bitwidth))

    return _BITS[value](value), build


@instruction(lambda value: np.finfo(value.dtype).tiny)
def smallest_normal(typing_context: Any, value: Any) -> Any:
    """Return the smallest normal number of the type of ``value``."""
    if value not in (types.float32, types.float64):
        return None

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return ir.Constant(args[0].type, 2.0**-126 if value == types.float32 else 2.0**-1022)

    return value(value), build


@instruction(lambda array, start, count: array[start : start + count])
def window(typing_context: Any, array: Any, start: Any, count: Any) -> Any:
    """View elements ``start`` to ``start + count`` of a contiguous vector.

    They must lie in it, which only numba's bounds checks look at. Where the count is written in the source, a loop over
    the view has a length that the compiler knows; that of a slice it never does, since slices end where vectors do.
    """

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        whole = arrayobj.make_array(array)(context, builder, args[0])
        (size,) = cgutils.unpack_tuple(builder, whole.shape)
        if context.enable_boundscheck:
            # As unsigned numbers negative ones are too large; the sum of both could come round to a place within.
            late = builder.icmp_unsigned(">", args[1], size)
            beyond = builder.or_(late, builder.icmp_unsigned(">", args[2], builder.sub(size, args[1])))
            with builder.if_then(beyond, likely=False):
                context.call_conv.return_user_exc(builder, IndexError, ("window is out of bounds",))
        part = arrayobj.make_array(array)(context, builder)
        arrayobj.populate_array(
            part,
            data=builder.gep(whole.data, [args[1]]),
            shape=[args[2]],
            strides=[whole.itemsize],
            itemsize=whole.itemsize,
            meminfo=None,
        )
        return part._getvalue()

    if array.ndim != 1 or array.layout != "C":
        return None
    return array(array, types.intp, types.intp), build


@instruction(lambda value: value.astype(np.float16).view(np.uint16))
def single_to_half(typing_context: Any, value: Any) -> Any:
    """Round a float32 to half precision; returns the 16 bits."""
    if value != types.float32:
        return None

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))

    return types.uint16(types.float32), build


@instruction(lambda bits: np.float32(bits.view(np.float16)))
def half_to_single(typing_context: Any, bits: Any) -> Any:
    """Widen the 16 bits of a half to float32, exactly."""
    if bits != types.uint16:
        return None

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), build


@instruction(lambda word: np.int64((int(word) & -int(word)).bit_length() - 1))
def trailing_zeros(typing_context: Any, word: Any) -> Any:
    """Count the zeros below the lowest one of a uint32 or uint64 that is not 0."""
    if word not in (types.uint32, types.uint64):
        return None

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        count = builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))
        return count if word == types.uint64 else builder.zext(count, ir.IntType(64))

    return types.int64(word), build
