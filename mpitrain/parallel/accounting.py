"""How many bytes of activations a rank keeps, counted from the arrays themselves."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt


def base_of(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the array that owns the memory of a view."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def bases_of(arrays: Iterable[npt.NDArray[Any]]) -> set[int]:
    """Identify the memory of arrays that are not to be counted; valid as long as they live."""
    return {id(base_of(array)) for array in arrays}


def buffers_of(*items: object, exclude: Collection[int] = ()) -> dict[int, int]:
    """Find the memory that keeping ``items`` keeps alive: bytes by identity.

    Walks dataclasses, tuples, lists and mappings. Several views of one buffer are one, a view of a part of it counts as
    the whole.

    Parameters
    ----------
    exclude : collection of int
        What ``bases_of`` says of arrays that live anyway: parameters, inputs.
    """
    found = {id(base): base.nbytes for base in (base_of(array) for array in _arrays(items))}
    return {base: nbytes for base, nbytes in found.items() if base not in exclude}


def nbytes_of(*items: object, exclude: Collection[int] = ()) -> int:
    """Count the bytes that keeping ``items`` keeps alive; see `buffers_of`."""
    return sum(buffers_of(*items, exclude=exclude).values())


def _arrays(root: object) -> Iterator[npt.NDArray[Any]]:
    stack = [root]
    while stack:
        item = stack.pop()
        if isinstance(item, np.ndarray):
            yield item
        elif isinstance(item, tuple | list):
            stack.extend(item)
        elif isinstance(item, Mapping):
            stack.extend(item.values())
        else:
            kind: Any = type(item)
            stack.extend([getattr(item, name) for name in _fields(kind)])


@cache
def _fields(kind: type) -> tuple[str, ...]:
    """Name what a kind of object holds, if it is a dataclass: asked of every cache of every step."""
    return tuple(field.name for field in fields(kind)) if is_dataclass(kind) else ()


class Ledger:
    """Bytes that are kept now, and the most that ever were.

    Attributes
    ----------
    current, peak : int
    """

    def __init__(self) -> None:
        self.current = 0
        self.peak = 0

    def change(self, nbytes: int) -> None:
        """Add bytes that are kept from now on, or take off (negative) bytes that were freed."""
        self.current += nbytes
        self.peak = max(self.peak, self.current)
