"""A whole run, from an empty folder (or a checkpoint) to its summary."""

import math
import os
import time
from contextlib import closing
from pathlib import Path
from typing import cast

from mpitrain.checkpoint.store import CheckpointStore
from mpitrain.comm.agreement import agree, gather, same_everywhere
from mpitrain.comm.fault import FaultHook
from mpitrain.comm.grid import Axis, Comm, ProcessGrid
from mpitrain.comm.runtime import Position
from mpitrain.comm.signals import StopRequest
from mpitrain.config.load import Resolved
from mpitrain.errors import DivergedError, StoppedEarlyError
from mpitrain.train.build import build
from mpitrain.train.console import Narrator
from mpitrain.train.evaluate import Score, evaluate
from mpitrain.train.hashing import fingerprint
from mpitrain.train.loop import Loop
from mpitrain.train.rescue import rescuing
from mpitrain.train.runfolder import Row, RunFolder
from mpitrain.train.serverloop import ServerLoop
from mpitrain.train.session import Resume, Session
from mpitrain.train.start import fit_grid, known_before, prepare, stop_rules, warn, warn_of_host
from mpitrain.train.stopping import StopWish
from mpitrain.train.summary import Throughput, overlap_note, progress_line, summarize, timeline


def train(
    resolved: Resolved,
    comm: Comm,
    *,
    resume: Resume | None = None,
    overwrite: bool = False,
    bar: bool = False,
    position: Position | None = None,
    stop: StopRequest | None = None,
) -> Row:
    """Train as the configuration says. Collective over ``comm``.

    Parameters
    ----------
    resolved : Resolved
        Must be the same on all ranks.
    resume : "newest", "auto" or int, optional
        Go on from this checkpoint in ``run.folder``.
    overwrite : bool
        Replace a run that ``run.folder`` already holds.
    bar : bool
        Draw a progress bar instead of writing lines.
    position : Position, optional
        Kept up to date with the step, for reports of errors.
    stop : StopRequest, optional
        Signals that this process has received; one of any rank ends the run with a checkpoint.

    Returns
    -------
    dict
        What summary.json holds.

    Raises
    ------
    MpitrainError
        With the exit code of its kind; agreed between all ranks where they can still talk.
    """
    begin = time.perf_counter()
    world = Axis(comm, "world")
    faults = agree(world, lambda: FaultHook.from_environment(world.rank))
    same_everywhere(world, [*resolved.lines(), f"--resume {resume}"], "the configurations")
    resolved, shape = fit_grid(resolved, world)
    config, folder = resolved.config, RunFolder(Path(resolved.config.run.folder))
    agree(world, lambda: folder.check_free(resume=resume is not None, overwrite=overwrite))

    with ProcessGrid(comm, shape, apart=config.exchange.when == "server") as grid:
        narrator = Narrator(world.rank, config.train.steps, bar=bar)
        warn(resolved, faults, narrator)
        warn_of_host(world, narrator)
        parts = build(config, grid, known_before(config, folder, grid.world, resumed=resume is not None))
        agree(world, lambda: faults.check_tensors(parts.part.sizes))
        store = CheckpointStore(folder.checkpoints, grid.world, config.checkpoint.keep, faults)
        wish = StopWish(stop or StopRequest(), faults, config.run)
        kind = ServerLoop if grid.serves else Loop
        loop = kind(parts, wish, narrator, faults, position or Position())
        session = Session(resolved, parts, folder, store, loop, wish, narrator, faults)
        with closing(session), rescuing(session):
            return prepare(session, resume, overwrite=overwrite) or _run(session, begin)


def _run(session: Session, begin: float) -> Row:
    """Take the steps that are left."""
    loop, config = session.loop, session.parts.config
    started, throughput = time.perf_counter(), Throughput()
    result: Score | None = None
    ended: str | None = None
    session.narrator.say(f"ready     after {started - begin:.1f} s")
    while loop.counters.step < config.train.steps and ended is None:
        turn = time.perf_counter()
        before = loop.counters.step
        rows, stop = loop.round()
        throughput.add(rows)
        step = loop.counters.step
        last = step == config.train.steps
        result = None
        with session.parts.exchange.model():
            dead = session.parts.exchange.dead
            if dead:  # its part of the test samples is missing, and the store must not wait for it
                session.store = CheckpointStore(
                    session.folder.checkpoints, session.world, config.checkpoint.keep, session.faults
                )
            elif not loop.failure and (last or _crossed(config.train.eval_every, before, step)):
                result = evaluate(session.parts)
                ended = loop.counters.progress.ended_by(result, config.train)
            _tell(session, rows, result)
            if loop.failure:
                raise loop.failure
            turn_s = time.perf_counter() - turn
            # A streak of rejected steps must not push out the steps that were saved before it.
            due = _crossed(config.checkpoint.every, before, step) and not loop.counters.skipped_in_a_row
            if due or last or stop or ended:
                session.store.save(session.snapshot())
        save_s = time.perf_counter() - turn - turn_s
        if session.parts.exchange.ends_early:
            turn_s -= sum(float(str(row["step_s"])) for row in rows[:-1])
        session.wish.took(turn_s=turn_s, save_s=save_s)
        if dead or (stop and not last and not ended):
            _stop_early(session)
    session.faults.at_end()
    with session.parts.exchange.model():
        result = result or evaluate(session.parts)
        if not math.isfinite(result.loss):
            raise _diverged(result)
        return _finish(session, result, ended, throughput, wall_s=time.perf_counter() - started)


def _diverged(result: Score) -> DivergedError:
    """Build the same error on all ranks, which share the score."""
    error = DivergedError(
        f"the test loss is {result.loss} after the last step; lower optim.lr, lengthen optim.warmup_steps, or set "
        "train.clip_norm"
    )
    error.agreed = True
    return error


def _crossed(every: int, before: int, step: int) -> bool:
    """Tell whether a multiple of ``every`` lies within the steps of a round; 0: never."""
    return every > 0 and step // every > before // every


def _tell(session: Session, rows: list[Row], result: Score | None) -> None:
    """Write the steps of a round down and show them; what was scored at its end goes with the last one."""
    if result:
        rows[-1] |= {"test_loss": result.loss, f"test_{result.name}": result.metric}
        if not math.isfinite(result.loss):
            session.narrator.say(f"warning   step {session.loop.counters.step}: the test loss is {result.loss}")
    if session.writes:
        for row in rows:
            session.folder.append(row)
    # What came before it in a long round was told as it happened.
    text = progress_line(session.parts, rows, result)
    session.narrator.step(session.loop.counters.step, text, always=result is not None)


def _stop_early(session: Session) -> None:
    """End all ranks with exit code 75. Collective over the world."""
    step, dead = session.loop.counters.step, session.parts.exchange.dead
    reasons = cast(list[str], gather(session.world, session.wish.reason(step)))
    rank = next((rank for rank, reason in enumerate(reasons) if reason), 0)
    why = f"the death of worker {dead - 1}" if dead else f"{reasons[rank]} on rank {rank}"
    _write_timeline(session)
    error = StoppedEarlyError(f"stopped after step {step} by {why}, with a checkpoint; go on with --resume auto")
    error.agreed, error.bereaved = True, bool(dead)
    error.teller = int(str(gather(session.world, session.parts.grid.first_rank)[0]))
    raise error


def _write_timeline(session: Session) -> None:
    """Keep what all ranks did in the last step. Collective over the world."""
    lanes = gather(session.world, {"rank": session.world.rank, **timeline(session.loop.events)})
    document: Row = {"step": session.loop.counters.step, "ranks": lanes}
    agree(session.world, lambda: session.folder.write_timeline(document) if session.writes else None)


def _finish(session: Session, result: Score, ended: str | None, throughput: Throughput, *, wall_s: float) -> Row:
    """Compare the replicas, add up what all ranks did, and mark the run as complete."""
    parts = session.parts
    weights = fingerprint(session.world, parts.params)
    about = {"host": os.uname().nodename, "parameters": parts.params.layout.num_parameters, **parts.array_bytes()}
    everywhere = cast(list[Row], gather(session.world, about))
    per_rank: list[Row] = [
        {"rank": rank, **mine, **totals}
        for rank, (mine, totals) in enumerate(zip(everywhere, session.totals(), strict=True))
    ]
    if session.loop.events:
        _write_timeline(session)
    summary = summarize(parts, result, steps=session.loop.counters.step, per_rank=per_rank) | {
        "stopped": ended,
        "stop_rules": stop_rules(parts.config.train),
        "wall_s": wall_s,
        "steps_timed": throughput.steps,
        "samples_per_s": throughput.samples_per_s,
        "param_sha256": weights.sha256,
        "replicas_identical": not weights.differing,
        **parts.exchange.summary(),
    }
    agree(session.world, lambda: session.folder.finish(summary) if session.writes else None)
    for line in overlap_note(cast(float | None, summary["hidden_share"])):
        session.narrator.say(line)
    if ended:
        session.narrator.say(f"ended     after step {session.loop.counters.step} by train.{ended}")
    return summary
