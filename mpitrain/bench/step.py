"""The ranks of ``mpitrain bench step``: a training step beside torch's DistributedDataParallel, in the same run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isclose
from pathlib import Path
from typing import Protocol, cast

from mpitrain.bench.cells import Cell, parse_cells
from mpitrain.bench.ours import OurFamily, check_config
from mpitrain.bench.ranks import described, on_ranks
from mpitrain.bench.records import show
from mpitrain.bench.rounds import PEER_FIELDS, Family, Taken, Turns, compare, measure
from mpitrain.comm.agreement import agree, gather
from mpitrain.comm.grid import Axis
from mpitrain.config.load import Resolved, read_config, resolve
from mpitrain.config.plain import Tree, parse_toml
from mpitrain.config.schema import Config
from mpitrain.errors import count
from mpitrain.train.start import fit_grid

SAMPLES_A_RANK = 8

DEFAULT = """
[model]
kind = "transformer"
task = "classify"
layers = 5
d_model = 128
heads = 4
d_ff = 504            # 0.99 million parameters
[data]
window = 64
stations = {stations}
[train]
batch_size = {batch_size}
[optim]
schedule = "constant"
"""
"""What is trained where no configuration is given."""

HIDDEN = ["model"]
"""Fields that the title tells instead of the table."""

INSTALL = "pip install torch==2.13.0"

SAME = 1e-3
"""Relative difference up to which loss and gradient norm of two libraries count as the same."""


class Peers(Protocol):
    """Another product that trains the same."""

    family: Family

    def close(self) -> None:
        """Leave in order. Collective."""


MakePeers = Callable[..., Peers]
"""Called with the world, our step alone, one of our steps with exchange, and ``timeout_s``."""


@dataclass(frozen=True)
class Request:
    """What was asked for.

    Attributes
    ----------
    config : Path or None
        Configuration; None for the default one.
    overrides : list of str
        ``section.key=value`` of all cells.
    cells : list of str
        What is exchanged, as `bench.cells` has it.
    rounds, steps : int
        Turns of every product, and timed steps of a turn.
    """

    config: Path | None
    overrides: Sequence[str]
    cells: Sequence[str]
    rounds: int
    steps: int

    @property
    def turns(self) -> Turns:
        """How much is measured."""
        return Turns(self.rounds, self.steps)

    def resolve(self, ranks: int) -> list[tuple[Cell, Resolved]]:
        """Read the configuration of every cell; raises ConfigError."""
        tree, origin = self._tree(ranks)
        # Equal shares of every step, and nothing between the steps.
        forced = ["data.placement=shuffled", "train.eval_every=0", f"train.steps={self.turns.total + 1}"]
        found = [
            (cell, resolve(tree, origin, [*self.overrides, *cell.overrides, *forced]))
            for cell in parse_cells(list(self.cells))
        ]
        for _, resolved in found:
            check_config(resolved.config, ranks)
        return found

    def _tree(self, ranks: int) -> tuple[Tree, str]:
        if self.config is not None:
            return read_config(self.config), str(self.config)
        stations, batch_size = max(8, ranks), SAMPLES_A_RANK * ranks
        return parse_toml(DEFAULT.format(stations=stations, batch_size=batch_size)), "bench step's own configuration"


def main(ranks: int | None, request: Request, load_peers: Callable[[], MakePeers], path: Path | None) -> int:
    """Measure every cell beside every peer; rank 0 prints the table."""
    return on_ranks("world", ranks, lambda world: _measure(world, request, load_peers, path))


def _measure(world: Axis, request: Request, load_peers: Callable[[], MakePeers], path: Path | None) -> None:
    configs = agree(world, lambda: request.resolve(world.size))
    fitted = [(cell, fit_grid(resolved, world)[0].config) for cell, resolved in configs]
    first = fitted[0][1]
    ours = OurFamily(world, fitted)
    peers = _peers(world, load_peers, ours, timeout_s=first.network.peer_timeout_s)
    families = [ours.family, *([peers.family] if peers else [])]
    taken = [family.alone.step() for family in families]
    check_same(*taken)
    found = measure(world, [product for family in families for product in family.members], request.turns)
    model = f"{first.model.kind} {ours.alone.parts.num_parameters / 1e6:.2f} M"
    layout = f"dp={world.size} {first.exchange.collective}"
    records = compare(model, layout, ours.family, peers.family if peers else None, found)
    title = f"{model}, {_title(world, request, first)}"
    if world.rank == 0:
        show(title, records, path, hidden=HIDDEN if peers else [*HIDDEN, *PEER_FIELDS])
    ours.close()
    if peers:
        peers.close()


def _peers(world: Axis, load: Callable[[], MakePeers], ours: OurFamily, *, timeout_s: float) -> Peers | None:
    """Build the peers, or say why there are none; the same on all ranks."""
    reason = ""
    try:
        make = load()
    except ImportError as error:
        reason = str(error).strip().partition("\n")[0]
    reasons = cast(list[str], gather(world, reason))
    if any(reasons):
        rank = next(rank for rank, each in enumerate(reasons) if each)
        if world.rank == 0:
            print(f"bench step: torch cannot be imported on rank {rank} ({reasons[rank]}), so there is nothing beside")
            print(f"our steps; {INSTALL}", flush=True)
        return None
    return make(world, ours.alone, ours.ways[0], timeout_s=timeout_s)


def check_same(mine: Taken, theirs: Taken | None = None) -> None:
    """Refuse peers that compute something else; raises RuntimeError."""
    if theirs is None:
        return
    for what, one, other in (("loss", mine.loss, theirs.loss), ("gradient norm", mine.norm, theirs.norm)):
        if not isclose(one, other, rel_tol=SAME):
            raise RuntimeError(f"bench step: the {what} of the first step is {one} here, but {other} by the peer")


def _title(world: Axis, request: Request, config: Config) -> str:
    """Say what was measured, and how many ranks had to share how many processors. Collective over ``world``."""
    name = request.config.stem if request.config else "default configuration"
    return (
        f"{name}, {config.train.batch_size // world.size} samples a rank, {described(world)}; medians of "
        f"{count(request.rounds, 'turn')} of {count(request.steps, 'step')}; "
        "exposed: step minus the same step without exchange (alone)"
    )
