"""Reading by all ranks together: each shard is read by one rank that has it, which sends what others need of it.

So any number of ranks in any layout can read what any other has written, from one disk or from many.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np

from mpitrain.arrays import Bytes, Floats, Ints
from mpitrain.checkpoint import files
from mpitrain.checkpoint.claims import Claim, claims_of
from mpitrain.checkpoint.record import Commit
from mpitrain.checkpoint.transfer import Block, choose_reader, list_blocks, place, plan_rounds
from mpitrain.checkpoint.verdict import judge, refuse
from mpitrain.comm.agreement import agree, broadcast, gather
from mpitrain.comm.frame import MAX_MESSAGE_BYTES
from mpitrain.comm.grid import Axis
from mpitrain.errors import CheckpointError, DamageError
from mpitrain.partition import ShardSpec


@dataclass(frozen=True)
class Wanted:
    """Arrays that this rank wants to have filled, as in `Snapshot`; ``local`` is None where no rank wants its own."""

    tensors: Mapping[str, Floats]
    local: Mapping[str, Floats | Ints] | None
    shards: Mapping[str, ShardSpec]

    def claims(self) -> list[Claim]:
        """Describe them."""
        return claims_of("tensors", self.tensors, self.shards) + claims_of("local", self.local or {}, {})

    def place(self, block: Block, values: Floats) -> None:
        """Copy what a block has of an array of this rank."""
        is_tensor = block.group == "tensors"
        arrays: Mapping[str, Floats | Ints] = self.tensors if is_tensor else self.local or {}
        array = arrays[block.name]
        spec = self.shards.get(block.name) if is_tensor else None
        place(block, values, array, spec or ShardSpec.whole(array.shape))


@dataclass(frozen=True)
class StepReader:
    """Reads one step; all methods are collective over the axis.

    Attributes
    ----------
    axis : Axis
        All ranks that load together.
    folder : Path
        Of the step; on hosts without a common disk each has its own.
    record : Commit
        The same on all ranks.
    timeout_s : float
        Patience with the disk of the slowest rank.
    """

    axis: Axis
    folder: Path
    record: Commit
    timeout_s: float

    def read(self, wanted: Wanted, *, all_of: str | None) -> list[str]:
        """Fill arrays; return what of the files is damaged, before anything was written to.

        Parameters
        ----------
        wanted : Wanted
            Other ranks may want other arrays, and other parts of them.
        all_of : str or None
            The ranks together must want every tensor of the step whose name begins like this; None: any of them.

        Raises
        ------
        CheckpointError
            On all ranks: the step is of another model, or the disk fails.
        """
        claims, having = self._gather_claims(wanted)
        self._check_model(claims, all_of)
        blocks = list_blocks(self.record.tensors, claims)
        readers = {shard: choose_reader(shard, having) for shard in {block.shard for block in blocks}}
        mine = [block for block in blocks if readers[block.shard] == self.axis.rank]
        memories = [[claim.name for claim in one if claim.group == "local"] for one in claims]
        with ExitStack() as stack:
            shards = files.OpenShards(stack)
            checks = [
                partial(self._check_shard, shards, shard, mine, None if wanted.local is None else memories[shard])
                for shard in sorted({block.shard for block in mine})
            ]
            if damage := judge(self.axis, checks, timeout_s=self.timeout_s)[1]:
                return damage
            # A file that cannot be read from here on has changed since, or its disk fails: an older step is no remedy.
            own, sent = _split(blocks, readers)
            agree(self.axis, lambda: self._take(own, shards, wanted), timeout_s=self.timeout_s)
            for batch in plan_rounds(sent, readers):
                self._exchange(batch, shards, wanted)
        return []

    def _gather_claims(self, wanted: Wanted) -> tuple[list[list[Claim]], list[set[int]]]:
        """Learn what every rank wants, and which shards it has."""
        found = [rank for rank in range(self.record.ranks) if self._path(rank).exists()]
        mine = [msgspec.to_builtins(wanted.claims()), found]
        everything = cast(list[tuple[object, list[int]]], gather(self.axis, mine, timeout_s=self.timeout_s))
        return (
            [msgspec.convert(claims, list[Claim]) for claims, _ in everything],
            [set(shards) for _, shards in everything],
        )

    def _path(self, shard: int) -> Path:
        return self.folder / files.shard_name(shard)

    def _check_model(self, claims: Sequence[Sequence[Claim]], all_of: str | None) -> None:
        """Refuse tensors that the step does not hold, or not as they are wanted; all ranks know all claims."""
        tensors = self.record.tensors
        wanted = {claim.name: claim for one in claims for claim in one if claim.group == "tensors"}
        needed = set() if all_of is None else {name for name in tensors if name.startswith(all_of)}
        unknown = sorted(needed - set(wanted))
        missing = sorted(set(wanted) - set(tensors))
        if unknown or missing:
            shown = f"it holds {unknown[0]}" if unknown else f"it lacks {missing[0]}"
            refuse(
                f"checkpoint: {self.folder} is of another model: {shown} ({len(unknown)} unknown, {len(missing)} "
                "missing); resume with the configuration that wrote it"
            )
        for claim in (claim for one in claims for claim in one if claim.group == "tensors"):
            saved = tensors[claim.name]
            if (saved.dtype, saved.shape) != (claim.dtype, claim.spec.global_shape):
                refuse(
                    f"checkpoint: {self.folder}: {claim.name} is {saved.dtype} {saved.shape}, but this model needs "
                    f"{claim.dtype} {claim.spec.global_shape}; resume with the configuration that wrote it"
                )

    def _check_shard(
        self, shards: files.OpenShards, shard: int, blocks: Sequence[Block], memories: Sequence[str] | None
    ) -> None:
        """Hold a shard against its checksum and against what is wanted of it."""
        path = self._path(shard)
        if not path.exists():
            raise DamageError(
                f"checkpoint: {path} is missing{' on the disks of all ranks' if self.axis.size > 1 else ''}; after "
                "run.shared_fs = false start on the hosts that wrote it, or copy their shards into one folder"
            )
        files.check_digest(path, self.record.shards[path.name])
        if memories is not None:
            _check_memories(shards[path], memories)
        for block in blocks:
            if block.shard == shard:
                files.check_dataset(shards[path], block.dataset, block.piece.shape, block.dtype)

    def _read(self, shards: files.OpenShards, block: Block) -> Floats:
        return files.read_part(shards[self._path(block.shard)], block.dataset, block.index)

    def _take(self, blocks: Sequence[Block], shards: files.OpenShards, wanted: Wanted) -> None:
        """Read what no other rank needs."""
        for block in blocks:
            if block.ranks == (self.axis.rank,):
                wanted.place(block, self._read(shards, block))

    def _exchange(self, batch: Mapping[int, Sequence[Block]], shards: files.OpenShards, wanted: Wanted) -> None:
        """Read some blocks, send them to all ranks, and receive those of others."""
        rank = self.axis.rank
        mine = agree(self.axis, lambda: self._load(batch.get(rank, ()), shards), timeout_s=self.timeout_s)
        for reader, blocks in sorted(batch.items()):
            data = mine if reader == rank else _message(blocks)
            broadcast(self.axis, data, root=reader, timeout_s=self.timeout_s, piece_bytes=MAX_MESSAGE_BYTES)
            for block, values in _views(data, blocks):
                if rank in block.ranks:
                    wanted.place(block, values)

    def _load(self, blocks: Sequence[Block], shards: files.OpenShards) -> Bytes:
        """Read blocks into one message."""
        data = _message(blocks)
        for block, values in _views(data, blocks):
            values[...] = self._read(shards, block)
        return data


def _message(blocks: Sequence[Block]) -> Bytes:
    return np.empty(sum(block.nbytes for block in blocks), np.uint8)


def _split(blocks: Sequence[Block], readers: Mapping[int, int]) -> tuple[list[Block], list[Block]]:
    """Tell what only its reader needs from what must be sent."""
    own = [block for block in blocks if block.ranks == (readers[block.shard],)]
    return own, [block for block in blocks if block.ranks != (readers[block.shard],)]


def _check_memories(shard: Any, names: Sequence[str]) -> None:
    saved = files.list_names(shard, "local")
    if saved != set(names):
        raise CheckpointError(
            f"checkpoint: {shard.filename} holds {len(saved)} codec memories, but this configuration has {len(names)}; "
            "resume with the exchange section that wrote it"
        )


def _views(data: Bytes, blocks: Sequence[Block]) -> Iterator[tuple[Block, Floats]]:
    """Divide a message into the values of its blocks."""
    start = 0
    for block in blocks:
        yield block, data[start : start + block.nbytes].view(block.dtype).reshape(block.part.shape)
        start += block.nbytes
