"""Which part of the model leaves and comes back when, in a round of local steps: pure arithmetic.

Fragment k = 0 … P−1 is applied after step a_k = ⌈(k + 1)·H / P⌉ of each round and sent ``delay`` steps earlier, so that
traffic is spread over the round, computation goes on while it is under way, and at the end of a round nothing is.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from mpitrain.errors import ConfigError, count


@dataclass(frozen=True)
class Rounds:
    """When fragments are sent and applied.

    Attributes
    ----------
    h : int
        Steps of a full round.
    fragments : int
        Parts that travel by themselves.
    delay : int
        Steps that a part is under way; less than ``h / fragments``, so that each is sent in the round in which it is
        applied, after one step of it at least.
    """

    h: int
    fragments: int = 1
    delay: int = 0

    def applied(self, fragment: int) -> int:
        """Return the step of a full round (from 1) after which a fragment is applied."""
        return -(-(fragment + 1) * self.h // self.fragments)

    def sent(self, fragment: int) -> int:
        """Return the step of a full round after which a fragment is sent."""
        return self.applied(fragment) - self.delay

    def sends(self, turn: int, length: int) -> list[int]:
        """List the fragments to send after step ``turn`` of a round of ``length`` steps, in this order.

        A short round, the last one of a run, ends with whatever else a full one would still do.
        """
        return [k for k in range(self.fragments) if min(self.sent(k), length) == turn]

    def applies(self, turn: int, length: int) -> list[int]:
        """List the fragments to apply after step ``turn``, and after what is sent there."""
        return [k for k in range(self.fragments) if min(self.applied(k), length) == turn]


def deal(weights: Sequence[int], fragments: int, together: Collection[int] = ()) -> list[list[int]]:
    """Deal buckets to fragments, about the same bytes to each: the largest first to the least loaded (Graham, 1969).

    Parameters
    ----------
    weights : sequence of int
        Bytes of each bucket.
    together : collection of int
        Buckets that belong to the first fragment: those of tensors that other ranks of the replica hold, too, which
        must change at the same step on all of them, whatever else each of them holds.

    Returns
    -------
    list of list of int
        Buckets of each fragment, in ascending order.

    Raises
    ------
    ConfigError
        There are fewer parts to deal than fragments.
    """
    free = [bucket for bucket in range(len(weights)) if bucket not in together]
    parts = len(free) + bool(together)
    if parts < fragments:
        raise ConfigError(
            f"exchange.fragments = {fragments}, but what this rank holds of the model leaves in "
            f"{count(parts, 'part')}; set exchange.fragments = {parts} or less, or a smaller exchange.bucket_mb"
        )
    dealt: list[list[int]] = [sorted(together), *([] for _ in range(fragments - 1))]
    loads = [sum(weights[bucket] for bucket in together), *[0] * (fragments - 1)]
    for bucket in sorted(free, key=lambda bucket: (-weights[bucket], bucket)):
        fragment = min(range(fragments), key=lambda k: (bool(dealt[k]), loads[k], k))
        dealt[fragment].append(bucket)
        loads[fragment] += weights[bucket]
    return [sorted(buckets) for buckets in dealt]
