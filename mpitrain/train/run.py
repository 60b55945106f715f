"""A whole run, from an empty folder (or a checkpoint) to its summary."""

import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

from msgspec import structs

from mpitrain.checkpoint.snapshot import Snapshot
from mpitrain.checkpoint.store import CheckpointStore
from mpitrain.collectives.base import Traffic
from mpitrain.comm.agreement import agree, broadcast, gather, same_everywhere
from mpitrain.comm.fault import VARIABLE, FaultHook
from mpitrain.comm.frame import MAX_MESSAGE_BYTES
from mpitrain.comm.grid import Axis, Comm, ProcessGrid
from mpitrain.comm.runtime import Position
from mpitrain.config.load import Resolved
from mpitrain.errors import ConfigError, StoppedEarlyError
from mpitrain.partition import GridShape
from mpitrain.train.build import Parts, build
from mpitrain.train.console import Narrator
from mpitrain.train.evaluate import Score, evaluate
from mpitrain.train.hashing import params_sha256
from mpitrain.train.loop import Counters, Loop
from mpitrain.train.runfolder import Row, RunFolder
from mpitrain.train.summary import describe, progress_line, summarize

FIXED = (
    "model.",
    "data.",
    "exchange.",
    "optim.kind",
    "parallel.",
    "train.seed",
    "train.batch_size",
    "train.class_weights",
)
"""Settings that a resumed run shares with its past, or it would silently become another one."""

FREE = ("data.path", "data.readers", "exchange.overlap")
"""Of these, the ones that change no bit."""


@dataclass
class Session:
    """One start of a run."""

    resolved: Resolved
    parts: Parts
    folder: RunFolder
    store: CheckpointStore
    loop: Loop
    narrator: Narrator
    faults: FaultHook

    @property
    def writes(self) -> bool:
        """Whether this rank writes the run folder of its disk."""
        return self.parts.grid.world.rank == 0


def train(
    resolved: Resolved,
    comm: Comm,
    *,
    resume: bool = False,
    overwrite: bool = False,
    bar: bool = False,
    position: Position | None = None,
) -> Row:
    """Train as the configuration says. Collective over ``comm``.

    Parameters
    ----------
    resolved : Resolved
        Must be the same on all ranks.
    resume : bool
        Go on from the newest checkpoint in ``run.folder``.
    overwrite : bool
        Replace a run that ``run.folder`` already holds.
    bar : bool
        Draw a progress bar instead of writing lines.
    position : Position, optional
        Kept up to date with the step, for reports of errors.

    Returns
    -------
    dict
        What summary.json holds.

    Raises
    ------
    MpitrainError
        With the exit code of its kind; agreed between all ranks where they can still talk.
    """
    position = position or Position()
    world = Axis(comm, "world")
    begin = time.perf_counter()
    faults = agree(world, lambda: FaultHook.from_environment(world.rank))
    same_everywhere(world, resolved.lines(), "the configurations")
    resolved, shape = _fit_grid(resolved, world)
    config = resolved.config
    folder = RunFolder(Path(config.run.folder))
    agree(world, lambda: folder.check_free(resume=resume, overwrite=overwrite))

    with ProcessGrid(comm, shape) as grid:
        narrator = Narrator(world.rank, config.train.steps, bar=bar)
        _warn(resolved, faults, narrator)
        parts = build(config, grid)
        agree(world, lambda: faults.check_tensors(parts.params.keys()))
        store = CheckpointStore(folder.checkpoints, grid.world, config.checkpoint.keep, faults)
        loop = Loop(parts, narrator, faults, position)
        session = Session(resolved, parts, folder, store, loop, narrator, faults)
        try:
            _prepare(session, resume=resume, overwrite=overwrite)
            return _completed(session) if resume and _is_complete(session) else _run(session, begin)
        finally:
            parts.loader.close()
            narrator.close()


def _fit_grid(resolved: Resolved, world: Axis) -> tuple[Resolved, GridShape]:
    """Fill in the ranks of the data axis."""
    parallel = resolved.config.parallel
    shape = agree(world, lambda: GridShape.fit(world.size, parallel.dp, 1, 1))
    config = structs.replace(resolved.config, parallel=structs.replace(parallel, dp=shape.dp))
    return Resolved(config, resolved.sources), shape


def _warn(resolved: Resolved, faults: FaultHook, narrator: Narrator) -> None:
    """Tell what was set and has no effect, and what breaks this run on purpose."""
    if faults.text:
        narrator.say(f"FAULTS ON PURPOSE: {VARIABLE}={faults.text}")
    for warning in resolved.warnings():
        narrator.say(f"warning   {warning}")
    for name in sorted(name for name in os.environ if name.startswith("MPITRAIN_") and name != VARIABLE):
        narrator.say(f"warning   {name} is set, but nothing reads it: configuration comes from the file and --set")


def _prepare(session: Session, *, resume: bool, overwrite: bool) -> None:
    """Give all replicas the same weights, new or from a checkpoint, and open the run folder."""
    parts, world = session.parts, session.parts.grid.world
    if resume:
        _load(session)
        if _is_complete(session):
            return
    else:
        parts.params.initialize(parts.config.train.seed)
        timeout_s = parts.config.network.peer_timeout_s
        broadcast(world, parts.params.flat, timeout_s=timeout_s, piece_bytes=MAX_MESSAGE_BYTES)
    same_everywhere(world, params_sha256(parts.params), "the weights before the first step")
    step = session.loop.counters.step
    first_of_host = _first_of_host(world)
    writes = session.writes or (first_of_host and not parts.config.run.shared_fs)
    agree(
        world,
        lambda: (
            session.folder.begin(session.resolved, overwrite=overwrite, resumed_step=step if resume else None)
            if writes
            else None
        ),
    )
    for line in describe(parts):
        session.narrator.say(line)
    if resume:
        session.narrator.say(f"resume    from step {step}")


def _is_complete(session: Session) -> bool:
    """Tell whether the run that was resumed had come to its end. Collective over the world."""
    done = session.loop.counters.step == session.parts.config.train.steps
    return done and bool(gather(session.parts.grid.world, session.folder.summary() is not None)[0])


def _completed(session: Session) -> Row:
    """Leave a complete run as it is."""
    session.narrator.say(f"the run in {session.folder.path} is complete; raise train.steps to go on")
    return cast(Row, gather(session.parts.grid.world, session.folder.summary())[0])


def _first_of_host(world: Axis) -> bool:
    """Tell whether no lower rank runs on this host. Collective over ``world``."""
    hosts = gather(world, os.uname().nodename)
    return hosts.index(hosts[world.rank]) == world.rank


def _run(session: Session, begin: float) -> Row:
    """Take the steps that are left."""
    parts, loop, config = session.parts, session.loop, session.parts.config
    started, first = time.perf_counter(), loop.counters.step
    result: Score | None = None
    session.narrator.say(f"ready     after {started - begin:.1f} s")
    while loop.counters.step < config.train.steps:
        row, stop = loop.step()
        step = loop.counters.step
        last = step == config.train.steps
        result = evaluate(parts) if last or (config.train.eval_every and step % config.train.eval_every == 0) else None
        if result:
            row |= {"test_loss": result.loss, f"test_{result.name}": result.metric}
        if session.writes:
            session.folder.append(row)
        session.narrator.step(step, progress_line(parts, row, result))
        # A streak of rejected steps must not push out the steps that were saved before it.
        due = config.checkpoint.every and step % config.checkpoint.every == 0 and not loop.counters.skipped_in_a_row
        if due or last or stop:
            session.store.save(_snapshot(session))
        if stop and not last:
            error = StoppedEarlyError(f"stopped after step {step} with a checkpoint; go on with --resume")
            error.agreed = True
            raise error
    result = result or evaluate(parts)
    session.faults.at_end()
    return _finish(session, result, wall_s=time.perf_counter() - started, steps=loop.counters.step - first)


def _finish(session: Session, result: Score, *, wall_s: float, steps: int) -> Row:
    """Compare the replicas, add up the bytes of all ranks, and mark the run as complete."""
    parts = session.parts
    world = parts.grid.world
    sha256 = params_sha256(parts.params)
    reports = gather(world, [sha256, session.loop.counters.traffic.sent_bytes])
    hashes, sent = zip(*cast(list[tuple[str, int]], reports), strict=True)
    summary = summarize(
        parts,
        result,
        wall_s=wall_s,
        steps_timed=steps,
        sent_bytes=sum(sent),
        sha256=sha256,
        identical=len(set(hashes)) == 1,
    )
    agree(world, lambda: session.folder.finish(summary) if session.writes else None)
    return summary


def _snapshot(session: Session) -> Snapshot:
    """Collect views of everything that the next step depends on."""
    parts, counters = session.parts, session.loop.counters
    tensors = {f"params/{name}": values for name, values in parts.params.items()}
    for buffer_name, buffer in parts.optimizer_state.buffers.items():
        tensors |= {f"optimizer/{buffer_name}/{name}": values for name, values in buffer.items()}
    local = {name: state.current for name, state in parts.exchange.state().items()}
    totals = gather(parts.grid.world, asdict(counters.traffic))
    meta = {
        "config": session.resolved.to_toml(),
        "optimizer_step": parts.optimizer_state.step,
        "skipped": counters.skipped,
        "skipped_in_a_row": counters.skipped_in_a_row,
        "traffic": totals,
    }
    fixed = [line for line in session.resolved.lines() if line.startswith(FIXED) and not line.startswith(FREE)]
    return Snapshot(counters.step, tensors, local, meta, fixed)


def _load(session: Session) -> None:
    """Fill the live buffers from the newest checkpoint."""
    snapshot = _snapshot(session)
    meta = session.store.load(snapshot)
    steps = session.parts.config.train.steps
    if snapshot.step > steps:
        error = ConfigError(
            f"train.steps = {steps}, but {session.folder.checkpoints} is at step {snapshot.step}; "
            f"set train.steps to {snapshot.step} or more"
        )
        error.agreed = True
        raise error
    session.parts.optimizer_state.step = cast(int, meta["optimizer_step"])
    totals = cast(list[dict[str, float]], meta["traffic"])[session.parts.grid.world.rank]
    session.loop.counters = Counters(
        step=snapshot.step,
        skipped=cast(int, meta["skipped"]),
        skipped_in_a_row=cast(int, meta["skipped_in_a_row"]),
        traffic=Traffic(**totals),  # type: ignore[arg-type]
    )
