"""The start of a run: the grid, the same weights everywhere, and the run folder."""

import os
from pathlib import Path
from typing import cast

import numpy as np
from msgspec import structs

from mpitrain.checkpoint.store import CheckpointStore
from mpitrain.comm.agreement import agree, broadcast, gather
from mpitrain.comm.fault import VARIABLE, FaultHook, unread_variables
from mpitrain.comm.frame import MAX_MESSAGE_BYTES
from mpitrain.comm.grid import Axis
from mpitrain.comm.machine import Level, shared_memory_findings
from mpitrain.config.load import Resolved
from mpitrain.config.schema import Config, TrainConfig
from mpitrain.config.validate import chunks_of, micro_batches_of
from mpitrain.errors import ConfigError
from mpitrain.nn.layer import Chain
from mpitrain.partition import GridShape
from mpitrain.train.build import Learned
from mpitrain.train.console import Narrator
from mpitrain.train.hashing import check_same
from mpitrain.train.runfolder import CONFIG, Row, RunFolder
from mpitrain.train.session import Resume, Session, named
from mpitrain.train.summary import describe


def fit_grid(resolved: Resolved, world: Axis) -> tuple[Resolved, GridShape]:
    """Fill in what follows from the number of ranks and stages."""
    parallel = resolved.config.parallel
    servers = resolved.config.exchange.servers or 0
    shape = agree(world, lambda: GridShape.fit(world.size, parallel.dp, parallel.pp, parallel.tp, servers))
    parallel = structs.replace(
        parallel,
        dp=shape.dp,
        micro_batches=micro_batches_of(parallel, shape.pp),
        chunks=chunks_of(parallel, shape.pp),
    )
    config = structs.replace(resolved.config, parallel=parallel)
    return Resolved(config, resolved.sources), shape


def warn(resolved: Resolved, faults: FaultHook, narrator: Narrator) -> None:
    """Tell what was set and has no effect, and what breaks this run on purpose."""
    if faults.text:
        narrator.say(f"FAULTS ON PURPOSE: {VARIABLE}={faults.text}")
    for warning in [*resolved.warnings(), *unread_variables()]:
        narrator.say(f"warning   {warning}")


def warn_of_host(world: Axis, narrator: Narrator) -> None:
    """Have one rank of every host tell where shared memory will not do. Collective over ``world``."""
    here = ranks_of_host(world)
    if world.size > 1 and here[0] == world.rank:
        for finding in shared_memory_findings(len(here)):
            if finding.level is not Level.OK:
                narrator.warn(str(finding))


def prepare(session: Session, resume: Resume | None, *, overwrite: bool) -> Row | None:
    """Give all replicas the same weights, new or from a checkpoint, and open the run folder.

    Returns the summary of a run that is complete, which is left as it is.
    """
    parts, world = session.parts, session.world
    resumed = resume is not None and session.load(resume)
    if resumed and (summary := _complete(session)):
        ended = f"change train.{summary['stopped']}, which ended it," if summary.get("stopped") else "raise train.steps"
        session.narrator.say(f"the run in {session.folder.path} is complete; {ended} to go on")
        return summary
    if not resumed:
        if resume == "auto":
            every = parts.config.checkpoint.every
            agree(world, lambda: session.folder.check_not_lost(every) if session.writes else None)
        _first_weights(session)
    with parts.exchange.model():
        check_same(world, parts.params, "before the first step")
    _open_folder(session, resume if resumed else None, overwrite=overwrite)
    return None


def _first_weights(session: Session) -> None:
    """Draw the weights or take them from another run, and give all holders of a tensor the same. Collective."""
    parts, config = session.parts, session.parts.config
    if config.train.init:
        tensors, shards = named("params", parts.params)
        initial_store(config.train.init, session.world).load_tensors(tensors, shards=shards, all_of="params/")
    else:
        parts.params.initialize(config.train.seed)
    timeout_s = config.network.peer_timeout_s
    for group in parts.shared.groups.values():
        for spec in group.specs:
            broadcast(group.axis, parts.params[spec.name], timeout_s=timeout_s, piece_bytes=MAX_MESSAGE_BYTES)
    if not parts.grid.apart:
        broadcast(parts.grid.data, parts.params.flat, timeout_s=timeout_s, piece_bytes=MAX_MESSAGE_BYTES)
        return
    for spec in Chain(parts.part.chunks).specs():  # a server may hold some of its column's tensors only
        held = parts.params[spec.name] if spec.name in parts.params else np.empty(spec.shape, parts.params.flat.dtype)
        broadcast(parts.grid.column, held, timeout_s=timeout_s, piece_bytes=MAX_MESSAGE_BYTES)


def initial_store(folder: str, world: Axis) -> CheckpointStore:
    """Find the checkpoints of the run that `train.init` names. Collective over ``world``; raises ConfigError."""
    run = RunFolder(Path(folder))

    def check() -> None:
        if world.rank == 0 and not (run.path / CONFIG).is_file():
            raise ConfigError(
                f'train.init = "{folder}" is not a run folder: it has no {CONFIG}; give the run.folder of a training'
            )

    agree(world, check)
    return CheckpointStore(run.checkpoints, world, 1, FaultHook("", world.rank))


def known_before(config: Config, folder: RunFolder, world: Axis, *, resumed: bool) -> Learned | None:
    """Read what the model of `train.init` has learned from its data; None where there is none. Collective."""
    if not config.train.init:
        return None
    store = CheckpointStore(folder.checkpoints, world, 1, FaultHook("", world.rank))
    if not resumed or store.newest() is None:
        store = initial_store(config.train.init, world)
    meta = store.load_tensors({})
    return Learned(**cast(dict[str, list[str]], meta["learned"]))  # type: ignore[arg-type]


def _open_folder(session: Session, resume: Resume | None, *, overwrite: bool) -> None:
    """Set aside or drop what this start makes again, and say what begins. Collective over the world."""
    step = session.loop.counters.step
    leads = ranks_of_host(session.world)[0] == session.world.rank
    writes = session.writes or (leads and not session.parts.config.run.shared_fs)
    session.held = agree(session.world, lambda: session.folder.hold() if writes else None)
    moved = session.store.set_aside_after(step) if resume is not None else []

    def begin() -> int:
        if not writes:
            return 0
        return session.folder.begin(
            session.resolved,
            overwrite=overwrite,
            resumed_step=step if resume is not None else None,
            aside=session.folder.checkpoints / moved[0] if moved else None,
            ranks=session.world.size,
        )

    start = agree(session.world, begin)
    for line in describe(session.parts):
        session.narrator.say(line)
    if moved:
        session.narrator.say(f"aside     the steps after {step} are now {', '.join(moved)}")
    if resume is not None:
        session.narrator.say(f"resume    from step {step} (start {start} of this run)")


def _complete(session: Session) -> Row | None:
    """Return the summary of a resumed run that had come to its end, also an early one. Collective over the world."""
    summary = cast("Row | None", gather(session.world, session.folder.summary())[0])
    step, config = session.loop.counters.step, session.parts.config.train
    if not summary or summary.get("steps") != step:
        return None
    ended_early = summary.get("stopped") and summary.get("stop_rules") == stop_rules(config)
    return summary if step == config.steps or ended_early else None


def stop_rules(config: TrainConfig) -> dict[str, object]:
    """List what may end a run before its last step."""
    return {"target": config.target, "patience": config.patience}


def ranks_of_host(world: Axis) -> list[int]:
    """List the ranks that run on this host, this one among them. Collective over ``world``."""
    hosts = gather(world, os.uname().nodename)
    return [rank for rank, host in enumerate(hosts) if host == hosts[world.rank]]
