"""Codecs by the name that a configuration gives them."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from mpitrain.codecs.base import Codec
from mpitrain.codecs.half import Half
from mpitrain.codecs.int8 import Int8
from mpitrain.codecs.raw import Raw
from mpitrain.errors import ConfigError

CODECS: dict[str, type[Codec]] = {kind.wire_id: kind for kind in (Raw, Half, Int8)}


def make_codec(name: str, dtype: npt.DTypeLike = np.float32, *, stochastic: bool = False) -> Codec:
    """Build a codec.

    Raises
    ------
    ConfigError
        Unknown name, or stochastic rounding where the codec has none.
    """
    if name not in CODECS:
        raise ConfigError(f"codec: expected one of {', '.join(CODECS)}, got {name!r}")
    if not stochastic:
        return CODECS[name](dtype)
    rounded: dict[str, Callable[[], Codec]] = {"int8": lambda: Int8(dtype, stochastic=True)}
    if name not in rounded:
        raise ConfigError(f"codec: stochastic rounding needs one of {', '.join(rounded)}, got {name!r}")
    return rounded[name]()
