"""One start of a run: its objects, what a checkpoint keeps of them, and how they come back from one."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import BinaryIO, Literal, cast

from mpitrain.arrays import Floats
from mpitrain.checkpoint.snapshot import Snapshot
from mpitrain.checkpoint.store import CheckpointStore
from mpitrain.collectives.base import Traffic
from mpitrain.comm.agreement import gather
from mpitrain.comm.fault import FaultHook
from mpitrain.comm.grid import Axis
from mpitrain.config.load import Resolved
from mpitrain.config.validate import unread_keys
from mpitrain.errors import ConfigError
from mpitrain.params import Params
from mpitrain.partition import ShardSpec
from mpitrain.train.buckets import float32_ring_bytes
from mpitrain.train.build import Parts
from mpitrain.train.console import Narrator
from mpitrain.train.loop import Counters, Loop
from mpitrain.train.runfolder import RunFolder
from mpitrain.train.stopping import LossWatch, Progress, StopWish

Resume = Literal["newest", "auto"] | int
"""Which checkpoint to go on from: the newest one, which must be there and sound; the newest sound one, or none where
there is none at all; the one of a step, and no other."""

FIXED = (
    "model.",
    "data.",
    "exchange.",
    "optim.kind",
    "train.init",
    "train.seed",
    "train.batch_size",
    "train.class_weights",
)
"""Settings that a resumed run shares with its past, or it would silently become another one. The grid may change."""

FREE = (
    "data.path",
    "data.readers",
    "exchange.overlap",
    "exchange.raw_last_steps = 0",
    "exchange.reset_every = 0",
    "exchange.segment_kb",
    "exchange.servers = 0",
    'exchange.signal = "gradient"',
    "exchange.warmup_steps = 0",
    "model.tied = false",
    'train.init = ""',
)
"""Of these, the ones that change no bit; and what was so before there was a choice."""


@dataclass
class Session:
    """One start of a run."""

    resolved: Resolved
    parts: Parts
    folder: RunFolder
    store: CheckpointStore
    loop: Loop
    wish: StopWish
    narrator: Narrator
    faults: FaultHook
    held: BinaryIO | None = None

    def close(self) -> None:
        """End the threads, release the run folder, leave the terminal in order."""
        self.parts.loader.close()
        self.narrator.close()
        if self.held is not None:
            self.held.close()

    @property
    def world(self) -> Axis:
        """All ranks of the run."""
        return self.parts.grid.world

    @property
    def writes(self) -> bool:
        """Whether this rank writes the run folder of its disk."""
        return self.world.rank == 0

    def totals(self, axis: Axis | None = None) -> list[dict[str, float]]:
        """Gather what every rank of an axis, or of all, has sent and how it has spent its time. Collective over it."""
        counters = self.loop.counters
        mine = {
            **asdict(counters.traffic),
            "replica_bytes": counters.replica_bytes,
            "fp32_ring_bytes": counters.fp32_ring_bytes,
            "compute_s": counters.compute_s,
        }
        return cast(list[dict[str, float]], gather(axis or self.world, mine))

    def snapshot(self, axis: Axis | None = None) -> Snapshot:
        """Collect views of everything that the next step depends on. Collective over all, or the axis that saves."""
        parts, counters = self.parts, self.loop.counters
        tensors, shards = named("params", parts.params)
        for name, buffer in parts.exchange.tensors().items():
            more, places = named(name, buffer)
            tensors, shards = tensors | more, shards | places
        local = parts.exchange.local() | parts.pipeline.state()
        meta = {
            "config": self.resolved.to_toml(),
            **parts.exchange.facts(),
            "skipped": counters.skipped,
            "skipped_in_a_row": counters.skipped_in_a_row,
            "progress": asdict(counters.progress),
            "losses": asdict(counters.losses),
            "totals": self.totals(axis),
            "learned": asdict(parts.learned),
        }
        fixed = binding_lines(self.resolved)
        fixed += [f"the data's hash = {parts.dataset.content}"] * bool(parts.dataset.content)
        return Snapshot(counters.step, tensors, local, meta, fixed, shards, parts.layout)

    def load(self, resume: Resume) -> bool:
        """Fill the live buffers from a checkpoint; return whether there was one. Collective.

        Raises
        ------
        CheckpointError, ConfigError
            On all ranks; see `CheckpointStore.load`.
        """
        if resume == "auto" and self.store.newest() is None:
            return False
        snapshot = self.snapshot()
        step = resume if isinstance(resume, int) else None
        meta = self.store.load(snapshot, step=step, fallback=resume == "auto", warn=self.narrator.say)
        steps = self.parts.config.train.steps
        if snapshot.step > steps:
            error = ConfigError(
                f"train.steps = {steps}, but {self.folder.checkpoints} is at step {snapshot.step}; "
                f"set train.steps to {snapshot.step} or more"
            )
            error.agreed = True
            raise error
        self.parts.exchange.loaded(meta, local=snapshot.complete)
        self.loop.counters = _counters(snapshot.step, meta, self.parts)
        return True


def binding_lines(resolved: Resolved) -> list[str]:
    """List the settings that a resumed run must share with its past, as ``section.key = value``."""
    read = [line for line in resolved.lines() if line.partition(" ")[0] not in unread_keys(resolved.config)]
    return [line for line in read if line.startswith(FIXED) and not line.startswith(FREE)]


def named(kind: str, buffer: Params) -> tuple[dict[str, Floats], dict[str, ShardSpec]]:
    """Name the tensors of a buffer as checkpoints do, and the place of those that are parts of a larger one."""
    tensors = {f"{kind}/{name}": values for name, values in buffer.items()}
    return tensors, {f"{kind}/{spec.name}": spec.shard for spec in buffer.layout.specs if spec.shard}


def _counters(step: int, meta: Mapping[str, object], parts: Parts) -> Counters:
    saved = cast(list[dict[str, float]], meta["totals"])
    for each in saved:  # before models could be split, all ranks had whole ones, and this was not kept
        each.setdefault("fp32_ring_bytes", float32_ring_bytes(parts.num_parameters, len(saved)) / len(saved) * step)
    totals = _totals(saved, parts.grid.world)
    return Counters(
        step=step,
        skipped=cast(int, meta["skipped"]),
        skipped_in_a_row=cast(int, meta["skipped_in_a_row"]),
        compute_s=totals.pop("compute_s"),
        replica_bytes=int(totals.pop("replica_bytes", 0)),
        fp32_ring_bytes=totals.pop("fp32_ring_bytes"),
        traffic=Traffic(**totals),  # type: ignore[arg-type]
        progress=Progress(**cast(dict[str, float], meta["progress"])),  # type: ignore[arg-type]
        losses=LossWatch(**cast(dict[str, list[float]], meta.get("losses", {}))),  # type: ignore[arg-type]
    )


def _totals(saved: list[dict[str, float]], world: Axis) -> dict[str, float]:
    """Take over what this rank has done; rank 0 stands for all those of a run on another number of ranks."""
    if len(saved) == world.size:
        return dict(saved[world.rank])
    return {key: sum(totals[key] for totals in saved) if world.rank == 0 else 0 for key in saved[0]}
