"""Pipeline parallelism: the stage of this rank, its neighbours, and what is remembered between steps.

Piece v of the model is chunk ``v // stages`` of stage ``v % stages``; cut v lies between the pieces v and v + 1.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt

from mpitrain.arrays import Floats, Ints
from mpitrain.codecs.base import Codec
from mpitrain.codecs.registry import make_codec
from mpitrain.collectives.base import Event, Traffic, Transport
from mpitrain.comm.frame import Tag
from mpitrain.comm.grid import Axis
from mpitrain.errors import ConfigError
from mpitrain.nn.layer import Chain, Context, Finished, Tensors
from mpitrain.parallel.channel import Channel, Handover, Way, Wire
from mpitrain.parallel.coding import Differential, Plain
from mpitrain.parallel.references import References
from mpitrain.parallel.schedule import Action, plan
from mpitrain.parallel.trip import Loss, Stage, Sums, Training, Trip


@dataclass(frozen=True, kw_only=True)
class PipelineSettings:
    """How a pipeline works; the same on all its ranks.

    Attributes
    ----------
    schedule : str
        See `mpitrain.parallel.schedule.plan`.
    micro_batches : int
        Parts of a batch, if it has as many samples; at least 1.
    codec, gradient_codec : str
        Of activations and of the gradients by them.
    memory : "none" or "delta"
        delta: activations travel as the change against the same sample's last ones.
    reference_bytes : int
        Budget of one cut for memory = "delta", at each of its ends.
    num_samples : int
        How many different samples this replica can ever see (memory = "delta").
    """

    schedule: str = "1f1b"
    micro_batches: int = 1
    codec: str = "raw"
    gradient_codec: str = "raw"
    memory: str = "none"
    reference_bytes: int = 64_000_000
    num_samples: int = 0


class Pipeline:
    """One stage of a model that is cut over the ranks of an axis; with one rank, the whole model.

    Parameters
    ----------
    axis : Axis
        The stages of one replica, in the order of layers. No other messages of the tags ACTIVATION and GRADIENT may
        travel on it.
    chunks : sequence of Chain
        The pieces that this rank holds, in forward order.
    settings : PipelineSettings
    cut_shapes : sequence of shapes
        Of one sample's activation at every cut of the whole model, ``len(chunks) · axis.size - 1`` of them.
    transport : Transport
        Limits of the messages.
    dtype : dtype
        float32 or float64, that of the parameters.

    Attributes
    ----------
    axis, settings
        As given.

    Raises
    ------
    ConfigError
        A schedule, codec or memory that cannot be.
    """

    def __init__(
        self,
        axis: Axis,
        chunks: Sequence[Chain],
        settings: PipelineSettings,
        *,
        cut_shapes: Sequence[Sequence[int]],
        transport: Transport | None = None,
        dtype: npt.DTypeLike = np.float32,
    ) -> None:
        pieces = len(chunks) * axis.size
        if len(cut_shapes) != pieces - 1:
            raise ValueError(
                f"pipeline: {pieces} pieces of a model have {pieces - 1} cuts, got {len(cut_shapes)} shapes"
            )
        if settings.memory not in ("none", "delta"):
            raise ConfigError(f'parallel.memory: expected "none" or "delta", got {settings.memory!r}')
        self.axis = axis
        self.settings = settings
        self._dtype = dtype
        self._wire = Wire(axis, transport or Transport())
        self._stage = Stage(tuple(chunks), self._wire)
        self._shapes = cut_shapes
        self._handovers: dict[tuple[int, Tag], Handover] = {}
        self._references: dict[str, References] = {}
        self._codecs = {
            Tag.ACTIVATION: make_codec(settings.codec, dtype),
            Tag.GRADIENT: make_codec(settings.gradient_codec, dtype),
        }
        for chunk in range(len(chunks)):
            self._connect(chunk, chunk * axis.size + axis.rank, pieces)
        self._plans: dict[int, list[Action]] = {}
        self._order(1)  # refuses an impossible schedule now

    def _connect(self, chunk: int, piece: int, pieces: int) -> None:
        """Make the ways to and from a piece of the model."""
        if piece > 0:
            self._stage.inputs["forward", chunk] = self._way(piece - 1, Tag.ACTIVATION, piece - 1, "in")
            self._stage.outputs["backward", chunk] = self._way(piece - 1, Tag.GRADIENT, piece - 1, "out")
        if piece < pieces - 1:
            self._stage.outputs["forward", chunk] = self._way(piece, Tag.ACTIVATION, piece + 1, "out")
            self._stage.inputs["backward", chunk] = self._way(piece, Tag.GRADIENT, piece + 1, "in")

    def _way(self, cut: int, kind: Tag, to: int, end: str) -> Way:
        if self.axis.size == 1:
            return self._handovers.setdefault((cut, kind), Handover())
        coding = self._coding(f"pipeline.cut{cut}.{end}", self._codecs[kind], kind, prod(self._shapes[cut]))
        return Channel(self._wire, cut, kind, to % self.axis.size, coding, self._shapes[cut])

    def _coding(self, name: str, codec: Codec, kind: Tag, elements: int) -> Plain | Differential:
        settings = self.settings
        if kind is Tag.GRADIENT or settings.memory == "none":
            return Plain(codec)
        references = References(elements, settings.num_samples, settings.reference_bytes, self._dtype)
        self._references[name] = references
        return Differential(codec, references)

    def run(
        self,
        params: Tensors,
        grads: Tensors,
        x: Floats | Ints | None,
        context: Context,
        *,
        loss: Loss,
        finished: Finished | None = None,
        forward_done: Callable[[Sums], None] | None = None,
    ) -> Sums:
        """Take a batch forward and backward. Collective over the axis.

        Parameters
        ----------
        params, grads : mappings of arrays
            Of this rank's chunks; gradients are added into ``grads``.
        x : (B, ...) array or None
            The batch; read by the first stage only. Untouched until this returns.
        context : Context
            ``samples`` names the B samples of the batch, the same on all stages; may be none.
        loss : callable
            ``loss(output, part)`` with the output of the samples ``part``, a slice of the batch; called on the last
            stage only. Its ``dout`` is already divided by the total of the step, the only place where scaling happens.
        finished : callable, optional
            Told the names of parameters whose gradients this batch will not touch again, each exactly once.
        forward_done : callable, optional
            Called once, when this rank has done its last forward pass and before its remaining backward passes, with
            what ``run`` returns.

        Returns
        -------
        Sums
            Zeros except on the last stage.

        Raises
        ------
        PeerLostError, ProtocolError, CodecError
        """
        self._wire.nonfinite = False
        micro_batches = self._micro_batches(len(context.samples))
        training = Training(
            self._stage,
            params,
            grads,
            x,
            context,
            micro_batches=micro_batches,
            loss=loss,
            finished=finished,
            forward_done=forward_done,
        )
        return training.go(self._order(micro_batches))

    def evaluate(self, params: Tensors, x: Floats | Ints | None, count: int, *, loss: Loss) -> Sums:
        """Take ``count`` samples forward only, raw and without memory. Collective over the axis.

        Parameters, results and errors are those of ``run``.
        """
        micro_batches = self._micro_batches(count)
        context = Context(train=False, samples=np.arange(count))
        trip = Trip(self._stage, params, x, context, micro_batches=micro_batches, loss=loss)
        return trip.go([action for action in self._order(micro_batches) if action.kind == "forward"])

    def _micro_batches(self, samples: int) -> int:
        return max(1, min(self.settings.micro_batches, samples))

    def commit(self) -> None:
        """Make the references those of this step."""
        for references in self._references.values():
            references.commit()

    def rollback(self) -> None:
        """Forget this step: the references stay those of the last accepted one."""
        for references in self._references.values():
            references.rollback()

    def state(self) -> dict[str, Floats | Ints]:
        """Name the live arrays, of fixed sizes, that a checkpoint must keep; to restore, write into them at once."""
        return {
            f"{name}.{part}": values
            for name, references in self._references.items()
            for part, values in references.state().items()
        }

    def _order(self, micro_batches: int) -> list[Action]:
        if micro_batches not in self._plans:
            whole = plan(self.settings.schedule, self.axis.size, micro_batches, len(self._stage.chunks))
            self._plans[micro_batches] = whole[self.axis.rank]
        return self._plans[micro_batches]

    @property
    def nonfinite(self) -> bool:
        """Whether a message of the last ``run``, from or to this rank, was not finite.

        Known to its two ends alone. All ranks learn of it by the NaN that it leaves in gradients on every stage, which
        the exchange finds and the replica agrees on.
        """
        return self._wire.nonfinite

    @property
    def traffic(self) -> Traffic:
        """What messages and waits have cost; added to, and the caller may replace it."""
        return self._wire.traffic

    @traffic.setter
    def traffic(self, value: Traffic) -> None:
        self._wire.traffic = value

    @property
    def events(self) -> list[Event] | None:
        """Where to note what was done when (wait, encode, decode, forward, backward); None to note nothing."""
        return self._wire.events

    @events.setter
    def events(self, value: list[Event] | None) -> None:
        self._wire.events = value

    @property
    def streams(self) -> list[tuple[Codec, str]]:
        """List the codecs and memories in use, whose kernels may be compiled in advance."""
        if self.axis.size == 1:
            return []
        raw = make_codec("raw", self._dtype)
        return [
            (self._codecs[Tag.ACTIVATION], self.settings.memory),
            (self._codecs[Tag.GRADIENT], "none"),
            (raw, "none"),
        ]

    @property
    def peak_bytes(self) -> int:
        """Most bytes of activations that training kept at once: caches, received arrays, gradients of the loss.

        Without parameters, the batch, messages under way and references.
        """
        return self._stage.ledger.peak

    @property
    def current_bytes(self) -> int:
        """Bytes of activations that are kept now: none between steps."""
        return self._stage.ledger.current

    @property
    def reference_bytes(self) -> int:
        """Bytes of past activations."""
        return sum(references.nbytes for references in self._references.values())

    @property
    def hits(self) -> int:
        """Samples sent so far, over all cuts of this rank, whose past was known."""
        return sum(references.hits for references in self._senders())

    @property
    def misses(self) -> int:
        """Samples sent so far whose past was not known."""
        return sum(references.misses for references in self._senders())

    def _senders(self) -> Iterator[References]:
        return (references for name, references in self._references.items() if name.endswith(".out"))
