"""Pure splitting arithmetic: chunks of a vector, shapes of the process grid, shards of a tensor."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import gcd

from mpitrain.errors import ConfigError, count


def split_sizes(total: int, parts: int) -> list[int]:
    """Split ``total`` into ``parts`` sizes that differ by at most one, larger ones first (10 on 4 is 3, 3, 2, 2)."""
    base, extra = divmod(total, parts)
    return [base + (part < extra) for part in range(parts)]


def split_weighted(total: int, weights: list[int]) -> list[int]:
    """Split ``total`` in proportion to ``weights``; largest remainders get the rest, ties to the lower index."""
    whole = sum(weights)
    if whole == 0:
        return split_sizes(total, len(weights))
    sizes = [total * weight // whole for weight in weights]
    by_remainder = sorted(range(len(weights)), key=lambda i: (-(total * weights[i] % whole), i))
    for index in by_remainder[: total - sum(sizes)]:
        sizes[index] += 1
    return sizes


def bounds(sizes: list[int]) -> list[tuple[int, int]]:
    """Turn sizes into consecutive half-open ranges."""
    ends = list(accumulate(sizes))
    return [(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def chunk_bounds(size: int, parts: int, block: int = 1) -> list[tuple[int, int]]:
    """Cut a vector of ``size`` elements into ``parts`` ranges that start on multiples of ``block``.

    Ranges may be empty; together they cover the vector, so any size and any number of parts is legal.
    """
    blocks = split_sizes(-(-size // block), parts)
    return [(min(a * block, size), min(b * block, size)) for a, b in bounds(blocks)]


def server_bounds(size: int, ranks: int, servers: int, block: int = 1) -> list[tuple[int, int]]:
    """Cut a vector like ``chunk_bounds`` among the last ``servers`` of the ranks; the others get empty ranges."""
    return [(0, 0)] * (ranks - servers) + chunk_bounds(size, servers, block)


MOST_SUGGESTED = 1024
"""Up to where divisors are searched for a suggestion."""


def tensor_refusal(sizes: Mapping[str, int], tp: int) -> str | None:
    """Say why the tensor axis cannot split a model, or None where it can.

    Parameters
    ----------
    sizes : mapping of str to int
        What each of its ranks must hold an equal part of, by the name for the message: ``model.heads``, for example.
    tp : int
        Ranks of the tensor axis.
    """
    odd = next((name for name, size in sizes.items() if size % tp), None)
    if odd is None:
        return None
    common = gcd(*sizes.values())
    valid = [str(d) for d in range(1, min(common, MOST_SUGGESTED) + 1) if common % d == 0]
    choice = f"{', '.join(valid[:-1])} or {valid[-1]}" if len(valid) > 1 else valid[0]
    return f"{odd} = {sizes[odd]} does not divide by parallel.tp = {tp}; set parallel.tp = {choice}"


def split_widths(hidden: Sequence[int]) -> dict[str, int]:
    """Name the hidden widths of an MLP that the tensor axis splits: every other one, each between two linear maps."""
    return {f"model.hidden[{index}]": hidden[index] for index in range(0, len(hidden), 2)}


@dataclass(frozen=True)
class GridShape:
    """The process grid: data, pipeline and tensor axes. The tensor axis varies fastest.

    Attributes
    ----------
    dp, pp, tp : int
        Replicas of the model; parts of it by layers; parts of every layer.
    servers : int
        Rows of ranks that serve the replicas: they follow the ``dp`` rows of these, and are split like them.
    """

    dp: int
    pp: int = 1
    tp: int = 1
    servers: int = 0

    @property
    def workers(self) -> int:
        """Ranks that train: the first ones."""
        return self.dp * self.pp * self.tp

    @property
    def size(self) -> int:
        """Ranks that the grid covers."""
        return (self.dp + self.servers) * self.pp * self.tp

    def __str__(self) -> str:
        return f"dp={self.dp} pp={self.pp} tp={self.tp}" + (f" servers={self.servers}" if self.servers else "")

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """Return (row, pp, tp) of a rank; rows from ``dp`` on serve."""
        return rank // (self.pp * self.tp), rank // self.tp % self.pp, rank % self.tp

    @classmethod
    def fit(cls, ranks: int, dp: int | None, pp: int, tp: int, servers: int = 0) -> "GridShape":
        """Derive ``dp`` where it is left out, and refuse a grid that does not cover the ranks.

        Raises
        ------
        ConfigError
            The product of the axes is not the number of ranks.
        """
        inner = pp * tp
        if servers:
            return cls._fit_servers(ranks, dp, pp, tp, servers)
        if dp is None and ranks % inner == 0:
            return cls(ranks // inner, pp, tp)
        if dp is None:
            factors = [number for number in range(1, ranks + 1) if ranks % number == 0]
            raise ConfigError(
                f"parallel: pp*tp = {pp}*{tp} = {inner} does not divide {count(ranks, 'rank')}; "
                f"start a multiple of {inner} ranks, or set parallel.pp and parallel.tp so that their product is "
                f"one of {', '.join(map(str, factors))}"
            )
        if dp * inner != ranks:
            remedy = f"set parallel.dp = {ranks // inner} or start" if ranks % inner == 0 else "start"
            raise ConfigError(
                f"parallel: dp*pp*tp = {dp}*{pp}*{tp} = {dp * inner}, but {count(ranks, 'rank')} run; "
                f"{remedy} {count(dp * inner, 'rank')}"
            )
        return cls(dp, pp, tp)

    @classmethod
    def _fit_servers(cls, ranks: int, dp: int | None, pp: int, tp: int, servers: int) -> "GridShape":
        inner = pp * tp
        rows, rest = divmod(ranks, inner)
        if rest or rows <= servers or dp not in (None, rows - servers):
            more = "" if dp else f", or more: a multiple of {inner}" if inner > 1 else ", or more"
            raise ConfigError(
                f"parallel: (dp + exchange.servers)*pp*tp = ({dp or 'dp'} + {servers})*{pp}*{tp}, but "
                f"{count(ranks, 'rank')} run; start {count((servers + (dp or 1)) * inner, 'rank')}{more}"
            )
        return cls(rows - servers, pp, tp, servers)


@dataclass(frozen=True)
class ShardSpec:
    """Which part of a global tensor a rank holds: element ranges per dimension."""

    global_shape: tuple[int, ...]
    start: tuple[int, ...]
    stop: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> "ShardSpec":
        """Describe a tensor that is not split."""
        return cls(shape, (0,) * len(shape), shape)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the held part."""
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index of the held part in the global tensor."""
        return tuple(slice(a, b) for a, b in zip(self.start, self.stop, strict=True))
