"""Counter-based noise: a pure function of a key and an index, so that any run can be repeated and any part skipped."""

from typing import Any

import numpy as np

from mpitrain.kernels.jit import kernel

_STEP = np.uint32(0x9E3779B9)
_MIX_A = np.uint32(0x7FEB352D)
_MIX_B = np.uint32(0x846CA68B)
_TO_UNIT = np.float32(2.0**-24)


@kernel
def noise(key_a: Any, key_b: Any, index: Any) -> Any:
    """Draw a float32 in [0, 1) for element ``index`` (uint32) under a 64-bit key given as two uint32.

    The mixer is "lowbias32" (Wellons, 2018), a bijection of 32 bits whose outputs show the least bias found.
    """
    h = np.uint32(np.uint32(index * _STEP) + key_a)
    h = np.uint32((h ^ (h >> np.uint32(16))) * _MIX_A)
    h = np.uint32((h ^ (h >> np.uint32(15)) ^ key_b) * _MIX_B)
    h = np.uint32(h ^ (h >> np.uint32(16)))
    return np.float32(h >> np.uint32(8)) * _TO_UNIT
