"""Tensor parallelism: sums, all-gathers and reduce-scatters between the parts of a layer, as compressed messages."""

from collections import OrderedDict
from math import prod

import numpy as np
import numpy.typing as npt

from mpitrain.arrays import Floats, aligned_zeros
from mpitrain.codecs.base import Codec
from mpitrain.codecs.registry import make_codec
from mpitrain.collectives.base import Bucket, BucketState, Event, Traffic, Transport
from mpitrain.collectives.direct import Direct
from mpitrain.collectives.reducer import Pending
from mpitrain.comm.grid import Axis
from mpitrain.nn.split import TensorSplit
from mpitrain.partition import bounds, split_sizes

KEPT_BUFFERS = 8
"""Shapes whose buffers are kept: two sizes of micro-batches, two of evaluation, as sums or as slices."""


class TensorParallel(TensorSplit):
    """One rank's part of every layer, exchanging with the others of the tensor axis.

    All of them must run the same layers on the same batches, one after the other.

    Parameters
    ----------
    axis : Axis
        The tensor axis; its communicator carries nothing else.
    transport : Transport
        Limits of the messages.
    codec : str
        As what bytes the sums and slices of training travel; those of evaluations travel raw.
    sequence : bool
        As of `TensorSplit`.
    dtype : float32 or float64
        Of the parameters, and so of all activations.

    Attributes
    ----------
    axis, transport
        As given.
    traffic : Traffic
        What the exchanges have cost so far; the caller takes it and starts it anew.
    """

    def __init__(
        self,
        axis: Axis,
        transport: Transport,
        codec: str = "raw",
        *,
        sequence: bool = False,
        dtype: npt.DTypeLike = np.float32,
    ) -> None:
        super().__init__(axis.rank, axis.size, sequence=sequence)
        self.axis = axis
        self.transport = transport
        self.traffic = Traffic()
        self._codec, self._raw = make_codec(codec, dtype), make_codec("raw", dtype)
        self._direct = Direct(axis, transport)
        self._states: OrderedDict[tuple[int, ...], BucketState] = OrderedDict()

    @property
    def events(self) -> list[Event] | None:
        """Where to note what was done when; None to note nothing."""
        return self._direct.events

    @events.setter
    def events(self, value: list[Event] | None) -> None:
        self._direct.events = value

    @property
    def held_bytes(self) -> int:
        """Count the bytes of all buffers that are kept."""
        return sum(
            state.bucket.values.nbytes + state.total.nbytes + state.frame_bytes for state in self._states.values()
        )

    def total(self, x: Floats, *, exact: bool) -> Floats:
        """Sum over the ranks; see `TensorSplit.total`."""
        state = self._state(x.size, self._raw if exact else self._codec)
        state.bucket.values[:] = x.reshape(-1)
        nonfinite = self._finish(self._direct.start(state))
        return _copy(state.bucket.values.reshape(x.shape), nonfinite=nonfinite)

    def gather_slices(self, x: Floats, time: int, *, exact: bool) -> Floats:
        """Join the time slices of all ranks; see `TensorSplit.gather_slices`."""
        batch, _, *rest = x.shape
        state, whole_TB = self._time_major((time, batch, *rest), exact=exact)
        whole_TB[slice(*self.bounds(time))] = x.swapaxes(0, 1)
        nonfinite = self._finish(self._direct.gather(state))
        return _copy(whole_TB.swapaxes(0, 1), nonfinite=nonfinite)

    def scatter_slices(self, x: Floats, *, exact: bool) -> Floats:
        """Sum over the ranks and return this rank's time slice; see `TensorSplit.scatter_slices`."""
        batch, time, *rest = x.shape
        state, whole_TB = self._time_major((time, batch, *rest), exact=exact)
        whole_TB[...] = x.swapaxes(0, 1)
        nonfinite = self._finish(self._direct.scatter(state))
        start, stop = self.bounds(time)
        return _copy(state.total.reshape(stop - start, batch, *rest).swapaxes(0, 1), nonfinite=nonfinite)

    def _time_major(self, shape: tuple[int, ...], *, exact: bool) -> tuple[BucketState, Floats]:
        """Return buffers for (T, B, …), in which every rank's slice is one piece, and a view of that shape."""
        step = prod(shape[1:])
        chunks = [(start * step, stop * step) for start, stop in bounds(split_sizes(shape[0], self.size))]
        state = self._state(prod(shape), self._raw if exact else self._codec, chunks)
        return state, state.bucket.values.reshape(shape)

    def _state(self, size: int, codec: Codec, chunks: list[tuple[int, int]] | None = None) -> BucketState:
        """Return the buffers for a vector, new ones where the last few had other sizes: the same case on all ranks."""
        key = (size, codec.format_number, *(stop for _, stop in chunks or []))
        if key not in self._states:
            bucket = Bucket(aligned_zeros(size, codec.dtype))
            self._states[key] = self._direct.open(bucket, codec, "none", chunks=chunks)
            if len(self._states) > KEPT_BUFFERS:
                self._states.popitem(last=False)
        self._states.move_to_end(key)
        return self._states[key]

    def _finish(self, pending: Pending) -> bool:
        """Complete an exchange; return whether some rank's values were not finite."""
        self.traffic += pending.wait()
        return pending.nonfinite


def _copy(values: Floats, *, nonfinite: bool) -> Floats:
    """Take a result out of the buffers, which the next exchange reuses."""
    return np.full(values.shape, np.nan, values.dtype) if nonfinite else np.array(values, order="C")
