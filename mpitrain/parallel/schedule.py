"""In which order a stage of the pipeline works: pure plans, and a simulator that holds them against their theory.

A model is cut into ``stages · chunks`` consecutive pieces (virtual stages); stage s holds the pieces
``chunk · stages + s``. Within one chunk every plan handles the micro-batches of one direction in ascending order, so
that messages between two pieces never overtake each other.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from mpitrain.errors import ConfigError

Kind = Literal["forward", "backward"]


class Action(NamedTuple):
    """One pass of one micro-batch through one chunk of a stage."""

    kind: Kind
    chunk: int
    micro: int


Plan = list[list[Action]]
"""The actions of every stage, in order."""


def plan(schedule: str, stages: int, micro_batches: int, chunks: int = 1) -> Plan:
    """Order the passes of every stage.

    Parameters
    ----------
    schedule : str
        ``afab``: all forward passes, then all backward passes (GPipe, Huang et al., 2019). ``1f1b``: one forward, one
        backward after a warm-up, so that stage s keeps at most ``min(micro_batches, stages - s)`` micro-batches
        (PipeDream-Flush, Narayanan et al., 2021a). ``interleaved``: 1f1b over several chunks a stage (Narayanan et
        al., 2021b).
    stages, micro_batches, chunks : int
        At least 1 each; any number of micro-batches works with any number of stages.

    Raises
    ------
    ConfigError
        Unknown schedule, or chunks where the schedule has none.
    """
    if schedule not in _ORDERS:
        raise ConfigError(f"parallel.schedule: expected one of {', '.join(_ORDERS)}, got {schedule!r}")
    if chunks > 1 and schedule != "interleaved":
        raise ConfigError(
            f'parallel: chunks = {chunks} with schedule = "{schedule}", which has one a stage; '
            'set parallel.schedule = "interleaved" or leave parallel.chunks out'
        )
    return [_ORDERS[schedule](stage, stages, micro_batches, chunks) for stage in range(stages)]


def _all_forward_all_backward(stage: int, stages: int, micro_batches: int, chunks: int) -> list[Action]:
    micros = range(micro_batches)
    return [Action("forward", 0, micro) for micro in micros] + [Action("backward", 0, micro) for micro in micros]


def _one_forward_one_backward(stage: int, stages: int, micro_batches: int, chunks: int) -> list[Action]:
    forwards = [Action("forward", 0, micro) for micro in range(micro_batches)]
    backwards = [Action("backward", 0, micro) for micro in range(micro_batches)]
    return _alternate(forwards, backwards, warm_up=stages - 1 - stage)


def _interleaved(stage: int, stages: int, micro_batches: int, chunks: int) -> list[Action]:
    """Send groups of ``stages`` micro-batches through chunk after chunk.

    The order is that of the next multiple of ``stages`` without the micro-batches that are not there: what depends on
    what lies within a micro-batch, so leaving some out cannot make the others wait in a circle.
    """
    if chunks == 1:
        return _one_forward_one_backward(stage, stages, micro_batches, chunks)
    passes = -(-micro_batches // stages) * stages * chunks
    steps = [_group_order(index, stages, chunks) for index in range(passes)]
    forwards = [Action("forward", chunk, micro) for chunk, micro in steps]
    backwards = [Action("backward", chunks - 1 - chunk, micro) for chunk, micro in steps]
    order = _alternate(forwards, backwards, warm_up=2 * (stages - 1 - stage) + (chunks - 1) * stages)
    return [action for action in order if action.micro < micro_batches]


def _group_order(index: int, stages: int, chunks: int) -> tuple[int, int]:
    """Return (chunk, micro) of the pass with this number."""
    group, place = divmod(index, stages * chunks)
    chunk, member = divmod(place, stages)
    return chunk, group * stages + member


def _alternate(forwards: list[Action], backwards: list[Action], *, warm_up: int) -> list[Action]:
    """Begin with ``warm_up`` forward passes (all, if there are fewer), alternate, and end with backward passes."""
    warm_up = min(warm_up, len(forwards))
    order = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        order += [forward, backward]
    return order + backwards[len(forwards) - warm_up :]


_ORDERS: dict[str, Callable[[int, int, int, int], list[Action]]] = {
    "1f1b": _one_forward_one_backward,
    "afab": _all_forward_all_backward,
    "interleaved": _interleaved,
}


@dataclass(frozen=True)
class Simulation:
    """What a plan takes.

    Attributes
    ----------
    makespan_s : float
        Until the last stage has done its last action.
    bubble : float
        Share of all stages' time in which they wait.
    in_flight : list of int
        For every stage, the most passes whose forward is done and whose backward is not.
    """

    makespan_s: float
    bubble: float
    in_flight: list[int]


def simulate(order: Plan, forward_s: float = 1.0, backward_s: float = 2.0, message_s: float = 0.0) -> Simulation:
    """Play a plan through: every pass takes the same time on all stages, every message between two of them another.

    Raises
    ------
    RuntimeError
        The stages wait for each other in a circle.
    """
    stages, chunks = len(order), 1 + max(action.chunk for actions in order for action in actions)
    cost = {"forward": forward_s, "backward": backward_s}
    done: dict[tuple[Kind, int, int], float] = {}
    clock = [0.0] * stages
    left = [list(reversed(actions)) for actions in order]
    moved = True
    while moved:
        moved = False
        for stage, actions in enumerate(left):
            while actions:
                kind, chunk, micro = actions[-1]
                piece = chunk * stages + stage
                needs = _needs(kind, piece, micro, last=piece == stages * chunks - 1)
                if any(need not in done for need in needs):
                    break
                ready = [done[need] + message_s * (need[1] % stages != stage) for need in needs]
                clock[stage] = max([clock[stage], *ready]) + cost[kind]
                done[kind, piece, micro] = clock[stage]
                actions.pop()
                moved = True
    stuck = [f"stage {stage} before {actions[-1]}" for stage, actions in enumerate(left) if actions]
    if stuck:
        raise RuntimeError(f"the stages wait for each other: {', '.join(stuck)}")
    busy = sum(cost[action.kind] for actions in order for action in actions)
    bubble = 1 - busy / (stages * max(clock)) if max(clock) else 0.0
    return Simulation(max(clock), bubble, [_most_in_flight(actions) for actions in order])


def _needs(kind: Kind, piece: int, micro: int, *, last: bool) -> list[tuple[Kind, int, int]]:
    """List the passes that must be done before this one."""
    if kind == "forward":
        return [("forward", piece - 1, micro)] if piece else []
    own: tuple[Kind, int, int] = ("forward", piece, micro)
    return [own] if last else [own, ("backward", piece + 1, micro)]


def _most_in_flight(actions: Sequence[Action]) -> int:
    now = most = 0
    for action in actions:
        now += 1 if action.kind == "forward" else -1
        most = max(most, now)
    return most
