"""The last step, saved by one rank without those that are lost."""

from collections.abc import Iterator
from contextlib import contextmanager

from mpitrain.checkpoint.store import CheckpointStore
from mpitrain.comm.grid import alone
from mpitrain.errors import MpitrainError, PeerLostError
from mpitrain.train.session import Session

GRACE_S = 10.0
"""So long the other ranks leave the one that saves, before they end the job."""


@contextmanager
def rescuing(session: Session) -> Iterator[None]:
    """If a peer is lost meanwhile, save the last completed step on rank 0, if it holds the whole model.

    It is a step of a run of one rank: no memories of codecs come back from it, since those of the others are lost.
    All other ranks only leave time for it. The error tells of it, and goes on.
    """
    try:
        yield
    except PeerLostError as lost:
        _rescue(session, lost)
        raise


def _rescue(session: Session, lost: PeerLostError) -> None:
    parts, counters = session.parts, session.loop.counters
    if not parts.exchange.replicates or parts.config.parallel.pp * parts.config.parallel.tp > 1:
        return
    # Of a step whose update was made, other ranks may be lost before it is counted.
    counters.step = parts.exchange.weights.state.step + counters.skipped
    if not counters.step:
        return
    if session.world.rank:
        lost.grace_s = GRACE_S
        return
    store = CheckpointStore(session.folder.checkpoints, alone(), parts.config.checkpoint.keep, session.faults)
    try:
        if store.newest() != counters.step:
            store.save(session.snapshot(store.axis))
        told = f"rank 0 has saved step {counters.step}, go on with --resume auto"
    except MpitrainError as error:
        told = f"rank 0 cannot save step {counters.step}: {error}"
    lost.args = (f"{lost}; {told}",)
