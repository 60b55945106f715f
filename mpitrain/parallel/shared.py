"""Tensors that several ranks of one replica hold: their gradients are added up before they leave the replica.

Two kinds: what the tensor axis does not split (norms, biases), held by all its ranks, and tied tensors, held by
several stages of the pipeline. The sum travels as float bits, so all holders go on with the same gradient, and the
same codec applied to it leaves the same bits on all of them.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from mpitrain.arrays import Floats, aligned_zeros
from mpitrain.codecs.registry import make_codec
from mpitrain.collectives.base import Bucket, BucketState, Event, Traffic, Transport
from mpitrain.collectives.direct import Direct
from mpitrain.collectives.reducer import Reducer
from mpitrain.comm.agreement import gather
from mpitrain.comm.grid import Axis, ProcessGrid
from mpitrain.kernels.reduce import count_not_finite
from mpitrain.params import Params, ParamSpec

TENSOR = "tensor"
"""Label of what all ranks of the tensor axis hold."""


@dataclass(frozen=True)
class Shared:
    """Tensors with the same holders.

    Attributes
    ----------
    axis : Axis
        The holders; owned by the grid.
    specs : list of ParamSpec
        In forward order.
    replicated : bool
        Whether the holders are the ranks of the tensor axis.
    """

    axis: Axis
    specs: list[ParamSpec]
    replicated: bool

    def adds(self, spec: ParamSpec) -> bool:
        """Tell whether this rank's gradient is an addend.

        What every rank of the tensor axis computes in full counts once: their values may differ in the last bit.
        """
        return not self.replicated or spec.partial or self.axis.rank == 0


class SharedTensors:
    """Which tensors of this rank are held by others of its replica, too.

    Parameters
    ----------
    grid : ProcessGrid
        Its tensor and pipeline axes are used. Collective over its world.
    specs : list of ParamSpec
        Tensors of this rank.

    Attributes
    ----------
    holders : dict
        For every shared tensor, a label: see `holders`.
    groups : dict
        Tensors with the same holders, by that label.
    """

    def __init__(self, grid: ProcessGrid, specs: Sequence[ParamSpec]) -> None:
        stages = cast(list[list[str]], gather(grid.pipeline, [spec.name for spec in specs]))
        self.holders = holders(specs, stages, grid.tensor.size)
        axes: dict[str, Axis | None] = {TENSOR: grid.tensor}
        for on in _tied_stages(stages):
            axes[_label(on)] = grid.among(grid.pipeline, on, "pipeline (stages that share a tensor)")
        self.groups: dict[str, Shared] = {}
        for label, axis in axes.items():
            members = [spec for spec in specs if self.holders.get(spec.name) == label]
            if axis is not None and members:
                self.groups[label] = Shared(axis, members, replicated=label == TENSOR)

    def counts(self, name: str) -> bool:
        """Tell whether this rank counts the tensor in sums over the replica: one of its holders does."""
        label = self.holders.get(name)
        return label is None or self.groups[label].axis.rank == 0


def holders(specs: Sequence[ParamSpec], stages: Sequence[Sequence[str]], tp: int) -> dict[str, str]:
    """Find the tensors of a rank that others of its replica hold, too.

    Parameters
    ----------
    specs : list of ParamSpec
        Tensors of the rank.
    stages : list of list of str
        Names of the tensors of every stage.
    tp : int
        Ranks of the tensor axis.

    Returns
    -------
    dict
        By name a label, the same for all tensors with the same holders, on all of them.
    """
    found: dict[str, str] = {}
    for spec in specs:
        on = _stages_of(spec.name, stages)
        if len(on) > 1:
            found[spec.name] = _label(on)
        elif tp > 1 and spec.shard is None:
            found[spec.name] = TENSOR
    return found


def _label(stages: tuple[int, ...]) -> str:
    return f"stages {', '.join(map(str, stages))}"


def _stages_of(name: str, stages: Sequence[Sequence[str]]) -> tuple[int, ...]:
    return tuple(stage for stage, names in enumerate(stages) if name in names)


def _tied_stages(stages: Sequence[Sequence[str]]) -> list[tuple[int, ...]]:
    """List the different sets of stages that hold some tensor together."""
    sets = {_stages_of(name, stages) for names in stages for name in names}
    return sorted(on for on in sets if len(on) > 1)


class SharedSums:
    """Adds up the gradients of shared tensors.

    Parameters
    ----------
    shared : SharedTensors
        Which, and with whom.
    grads : Params
        Replaced by the sums.
    transport : Transport
        Limits of the messages.

    Attributes
    ----------
    traffic : Traffic
        What this rank has sent for them since the last `add`.
    events : list of Event or None
        Where to note what was done when; None to note nothing.
    """

    def __init__(self, shared: SharedTensors, grads: Params, transport: Transport) -> None:
        self._shared = shared
        self._grads = grads
        self._sums = [_Sum(group, grads, transport) for group in shared.groups.values()]
        self._held: list[str] = []
        self.traffic = Traffic()
        self.events: list[Event] | None = None

    def hold(self, names: Collection[str]) -> list[str]:
        """Take note of finished gradients; return those that nobody shares, which may leave at once."""
        holders = self._shared.holders
        self._held += [name for name in names if name in holders]
        return [name for name in names if name not in holders]

    def add(self) -> list[str]:
        """Add up what was held; return its names. Collective over the replica, once backward is done.

        Where some addend is not finite, all holders are left with NaN, and the step will be rejected.
        """
        names, self._held = self._held, []
        self.traffic = sum((total.run(self._grads, self.events) for total in self._sums), Traffic())
        return names

    def not_finite(self) -> list[str]:
        """Name the tensors whose addends on this rank were not finite in the last `add`."""
        return [name for total in self._sums for name in total.not_finite]


class _Sum:
    """The sum over one set of holders, in one message each way."""

    def __init__(self, group: Shared, grads: Params, transport: Transport) -> None:
        self._group = group
        self.not_finite: list[str] = []
        size = sum(spec.size for spec in group.specs)
        self._values: Floats = aligned_zeros(size, grads.flat.dtype)
        self._reducer: Reducer = Direct(group.axis, transport)
        self._state: BucketState = self._reducer.open(Bucket(self._values), make_codec("raw", grads.flat.dtype), "none")

    def run(self, grads: Params, events: list[Event] | None) -> Traffic:
        """Replace the gradients by their sum."""
        parts = self._views()
        self._reducer.events = events
        for spec in self._group.specs:
            parts[spec.name][:] = grads[spec.name].reshape(-1) if self._group.adds(spec) else 0
        pending = self._reducer.start(self._state)
        traffic = pending.wait()
        self.not_finite = [spec.name for spec in self._group.specs if pending.nonfinite and self._is_bad(grads, spec)]
        for spec in self._group.specs:
            grads[spec.name].reshape(-1)[:] = float("nan") if pending.nonfinite else parts[spec.name]
        self._state.commit()
        return traffic

    def _is_bad(self, grads: Params, spec: ParamSpec) -> bool:
        return self._group.adds(spec) and count_not_finite(grads[spec.name].reshape(-1)) > 0

    def _views(self) -> Mapping[str, Floats]:
        views: dict[str, Floats] = {}
        start = 0
        for spec in self._group.specs:
            views[spec.name] = self._values[start : start + spec.size]
            start += spec.size
        return views
