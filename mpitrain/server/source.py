"""A worker's end of everything between it and one server."""

from collections import deque
from collections.abc import Sequence

from mpitrain.arrays import Floats
from mpitrain.codecs.memory import SENDERS, NoMemory
from mpitrain.codecs.raw import Raw
from mpitrain.comm.frame import Frame, Tag
from mpitrain.comm.waiting import Requests
from mpitrain.server.link import Link
from mpitrain.server.mail import Inbox, Outbox
from mpitrain.server.messages import Answer, Kind, Push
from mpitrain.server.setting import Piece, Setting, align, down_memory, slots_of
from mpitrain.server.stream import Incoming, Outgoing, expected


class Source:
    """What a worker has to do with one server.

    Parameters
    ----------
    link, peer
        The way there.
    pieces : list of Piece
        The buckets that the server owns.
    setting : Setting
        What both ends have agreed on.
    weights : list of arrays
        Those of every bucket of the column; written by `take`.

    Attributes
    ----------
    pushes : dict of int to Outgoing
        Gradients, by bucket.
    changes : list of Incoming
        Changes of the weights, one for every piece.
    answers : deque of Answer
        What the server has told and `take` has not taken, oldest first.
    """

    def __init__(self, link: Link, peer: int, pieces: Sequence[Piece], setting: Setting, weights: list[Floats]) -> None:
        self.link, self.peer, self.pieces = link, peer, pieces
        self._setting, self._weights = setting, weights
        slots = slots_of(setting.rule)
        self.outbox = Outbox(link, peer, len(Push._fields))
        self.inbox = Inbox(link, peer, len(Answer._fields))
        self.pushes = {
            piece.index: Outgoing(
                link, peer, Tag.PUSH.of_bucket(piece.index), SENDERS[piece.memory](piece.codec, piece.size), slots
            )
            for piece in pieces
        }
        self.changes = [
            Incoming(link, peer, Tag.REPLY.of_bucket(piece.index), down_memory(setting.down, piece.size), slots)
            for piece in pieces
        ]
        self.answers: deque[Answer] = deque()
        self._raw: deque[list[tuple[Frame, Requests]]] = deque()

    @property
    def progress(self) -> int:
        """Grow whenever something arrives."""
        raw = sum(requests.progress for frames in self._raw for _, requests in frames)
        return raw + sum(change.progress for change in self.changes)

    def poll(self) -> int:
        """Advance all messages; return how many answers are there with all that belongs to them."""
        self.outbox.poll()
        for push in self.pushes.values():
            push.poll()
        while (values := self.inbox.take()) is not None:
            answer = Answer(*values)
            if answer.kind != Kind.ALIVE:
                self.answers.append(answer)
            if answer.kind == Kind.WEIGHTS:
                self._raw.append([self._receive_raw(piece) for piece in self.pieces])
        return self._complete()

    def _receive_raw(self, piece: Piece) -> tuple[Frame, Requests]:
        frame = Frame(piece.size * self._weights[piece.index].itemsize)
        return frame, self.link.receive(frame, self.peer, self._setting.weights_tag(piece))

    def _complete(self) -> int:
        changes = min((change.arrived() for change in self.changes), default=len(self.answers))
        raw = iter(self._raw)
        for position, answer in enumerate(self.answers):
            if answer.kind == Kind.WEIGHTS:
                if not all(requests.poll() for _, requests in next(raw)):
                    return position
            elif changes == 0:
                return position
            else:
                changes -= 1
        return len(self.answers)

    def follows(self, position: int, skipped: int) -> bool:
        """Tell whether the change at a position, after ``skipped`` older ones, is the next of its stream."""
        return all(change.follows(position, change.sequence + position - skipped) for change in self.changes)

    def take(self, *, good: bool) -> Answer:
        """Decode the oldest answer into the weights, or lose it."""
        answer = self.answers.popleft()
        if answer.kind == Kind.WEIGHTS:
            self._take_raw(answer)
            return answer
        for piece, change in zip(self.pieces, self.changes, strict=True):
            if good:
                change.take(self._weights[piece.index])
            else:
                change.drop()
        return answer

    def _take_raw(self, answer: Answer) -> None:
        codec = Raw(self._setting.down.dtype)
        for (frame, requests), piece, change in zip(self._raw.popleft(), self.pieces, self.changes, strict=True):
            self.link.arrived(requests)
            weights = self._weights[piece.index]
            header = expected(NoMemory(codec, piece.size), int(answer.version))
            payload = frame.open(requests.received_bytes, header, self.link.axis.label(self.peer))
            if payload is not None:
                codec.decode(payload, weights)
            change.sequence = int(answer.sequence)
        self.align()

    def align(self) -> None:
        """Let changes follow on the weights that are here."""
        for piece, change in zip(self.pieces, self.changes, strict=True):
            align(change.memory, self._weights[piece.index])

    def close(self) -> None:
        """Withdraw what is posted."""
        self.inbox.cancel()
        for change in self.changes:
            change.cancel()
