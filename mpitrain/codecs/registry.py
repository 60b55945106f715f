"""Codecs by the name that a configuration gives them."""

import numpy as np
import numpy.typing as npt

from mpitrain.codecs.base import Codec
from mpitrain.codecs.bf16 import BFloat16
from mpitrain.codecs.coded import CodedInt2, CodedInt4, CodedInt8
from mpitrain.codecs.ecq import Ecq
from mpitrain.codecs.half import Half
from mpitrain.codecs.int2 import Int2
from mpitrain.codecs.int4 import Int4
from mpitrain.codecs.int8 import Int8
from mpitrain.codecs.raw import Raw
from mpitrain.codecs.sign import Sign
from mpitrain.codecs.topk import TopK
from mpitrain.config.codec_names import KINDS, parse_codec
from mpitrain.errors import ConfigError

CODECS: dict[str, type[Codec]] = {
    kind.wire_id: kind
    for kind in (Raw, Half, Int8, Int4, BFloat16, Int2, Sign, TopK, Ecq, CodedInt8, CodedInt4, CodedInt2)
}
"""By the name without its parameter."""


def make_codec(name: str, dtype: npt.DTypeLike = np.float32, *, stochastic: bool = False) -> Codec:
    """Build a codec.

    Parameters
    ----------
    name : str
        As `mpitrain.config.codec_names` takes it apart: ``int8``, ``topk-100``, ``ecq-2.5``, ``ecq-20dB``.

    Raises
    ------
    ConfigError
        Unknown name, a parameter out of bounds, or stochastic rounding where the codec has none.
    """
    try:
        choice = parse_codec(name)
    except ConfigError as error:
        raise ConfigError(f"codec: {error}") from None
    options: dict[str, object] = dict(choice.options)
    if stochastic:
        if not KINDS[choice.kind].stochastic:
            able = ", ".join(name for name, kind in KINDS.items() if kind.stochastic)
            raise ConfigError(f"codec: stochastic rounding needs one of {able}, got {name!r}")
        options["stochastic"] = True
    return CODECS[choice.kind](dtype, **options)
