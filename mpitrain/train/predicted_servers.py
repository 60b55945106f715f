"""What training through servers will send and keep, from the parameters' shapes alone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mpitrain.codecs.base import Codec
from mpitrain.codecs.registry import make_codec
from mpitrain.collectives.predicted import Sent, sent_for_vector
from mpitrain.comm.frame import HEADER_BYTES
from mpitrain.config.schema import ExchangeConfig
from mpitrain.params import Layout, ParamSpec
from mpitrain.server.clocks import ASYNC, Apply, Refresh, Reply, rule_of
from mpitrain.server.keeper import layout_of
from mpitrain.server.messages import Answer, Push, pack
from mpitrain.server.setting import Piece, Setting
from mpitrain.train.buckets import group_of, pieces_of


@dataclass(frozen=True)
class ServedCost:
    """What the ranks of a column send and keep.

    Attributes
    ----------
    push : Sent
        Of a worker in a step.
    replies, refreshes : list of Sent
        Of each server to all workers: the answers to the pushes of a step; and the weights that end a round, in the
        place of the answers to its last step.
    worker_elements : int
        What a worker remembers of gradients that it has sent and of weights that it has got, both halves.
    server_elements : list of int
        The same of each server, for all workers.
    held : list of int
        Elements of the weights that each server holds.
    """

    push: Sent
    replies: list[Sent]
    refreshes: list[Sent]
    worker_elements: int
    server_elements: list[int]
    held: list[int]


def predict_served(
    specs: Sequence[ParamSpec], exchange: ExchangeConfig, workers: int, held: Mapping[str, str]
) -> ServedCost:
    """Predict what the ranks of a column send, in a step in which nobody is late and nothing is lost.

    Parameters
    ----------
    specs : list of ParamSpec
        What each worker of the column holds.
    exchange : ExchangeConfig
        With its memory and the number of its servers resolved.
    workers : int
        Of the column.
    held : mapping
        Labels of the tensors that other ranks of the replica hold, too.
    """
    pieces = pieces_of(Layout(list(specs), group_of(exchange, held)), exchange, held)
    servers, down, raw = exchange.servers or 1, make_codec(exchange.server_codec), make_codec("raw")
    setting = Setting(workers, pieces, rule_of(exchange), down)
    owned = [setting.owned_by(number, servers) for number in range(servers)]
    memory = "none" if exchange.server_codec == "raw" else "delta"
    answer = _numbers(len(Answer._fields))
    kept = {piece.index: 2 * piece.size * (memory == "delta") for piece in pieces}
    return ServedCost(
        push=_streams(pieces) + _numbers(len(Push._fields)) * servers,
        replies=[(_vectors(mine, down, memory) + answer) * workers for mine in owned],
        refreshes=[(_vectors(mine, raw, "none") + answer) * workers for mine in owned],
        worker_elements=sum(2 * piece.size * (piece.memory != "none") + kept[piece.index] for piece in pieces),
        server_elements=[
            workers * sum(2 * piece.size * (piece.memory == "delta") + kept[piece.index] for piece in mine)
            for mine in owned
        ],
        held=[layout_of(mine).size for mine in owned],
    )


def predict_orders(exchange: ExchangeConfig, workers: int, others: int, *, last: bool = False) -> Sent:
    """Predict what the first server tells ``others`` servers of a step; ``last``: of the one that ends a round."""
    if exchange.mode == ASYNC:
        applies = _order(Apply(((0, 1),), 1, 1)) * workers
    else:
        applies = _order(Apply(tuple((worker, 1) for worker in range(workers)), 1, 1))
    return (applies + (_order(Refresh()) if last else _order(Reply(0, 1)) * workers)) * others


def _order(op: Apply | Reply | Refresh) -> Sent:
    return _numbers(len(pack(op, 0)))


def _numbers(count: int) -> Sent:
    """Count a message of float64 numbers."""
    return Sent(HEADER_BYTES + 8 * count, 1)


def _vectors(pieces: Sequence[Piece], codec: Codec, memory: str) -> Sent:
    return sum((sent_for_vector(codec, memory, piece.size) for piece in pieces), Sent())


def _streams(pieces: Sequence[Piece]) -> Sent:
    return sum((sent_for_vector(piece.codec, piece.memory, piece.size) for piece in pieces), Sent())
