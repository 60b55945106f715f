"""Codecs by the name that a configuration gives them."""

import numpy as np
import numpy.typing as npt

from mpitrain.codecs.base import Codec
from mpitrain.codecs.blocks import BlockScaled
from mpitrain.codecs.ecq import Ecq
from mpitrain.codecs.half import Half
from mpitrain.codecs.int4 import Int4
from mpitrain.codecs.int8 import Int8
from mpitrain.codecs.raw import Raw
from mpitrain.errors import ConfigError

CODECS: dict[str, type[Codec]] = {kind.wire_id: kind for kind in (Raw, Half, Int8, Int4, Ecq)}


def make_codec(name: str, dtype: npt.DTypeLike = np.float32, *, stochastic: bool = False) -> Codec:
    """Build a codec.

    Raises
    ------
    ConfigError
        Unknown name, or stochastic rounding where the codec has none.
    """
    if name not in CODECS:
        raise ConfigError(f"codec: expected one of {', '.join(CODECS)}, got {name!r}")
    kind = CODECS[name]
    if not stochastic:
        return kind(dtype)
    if not issubclass(kind, BlockScaled):
        able = ", ".join(name for name, kind in CODECS.items() if issubclass(kind, BlockScaled))
        raise ConfigError(f"codec: stochastic rounding needs one of {able}, got {name!r}")
    return kind(dtype, stochastic=True)
