"""Comparisons that turn a column into a flag, as ``data.flags`` writes them."""

import math
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mpitrain.errors import ConfigError

COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}
"""Longer signs first: the expression below takes the first that fits."""

_FORM = re.compile(rf"\s*(?P<column>\S.*?)\s*(?P<sign>{'|'.join(COMPARISONS)})\s*(?P<number>\S+)\s*")


@dataclass(frozen=True)
class Flag:
    """A column compared with a number.

    Attributes
    ----------
    text : str
        As written: the name of the new column.
    column : str
        Column that is compared, and replaced.
    sign : str
        One of `COMPARISONS`.
    number : float
        Finite.
    """

    text: str
    column: str
    sign: str
    number: float


def parse_flag(text: str) -> Flag:
    """Read a comparison such as ``mode == 7``; raises ConfigError where it is none."""
    form = _FORM.fullmatch(text)
    try:
        number = float(form["number"]) if form else math.nan
    except ValueError:
        number = math.nan
    if form is None or not math.isfinite(number):
        raise ConfigError(
            f"data.flags: expected a column, one of {' '.join(COMPARISONS)}, and a finite number, got {text!r}; "
            'write for example "mode == 7"'
        )
    return Flag(text.strip(), form["column"], form["sign"], number)
