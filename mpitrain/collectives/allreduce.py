"""The library call: a compressed allreduce for any numpy array, without the rest of the package."""

from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from mpitrain.arrays import Floats, aligned_zeros
from mpitrain.codecs.memory import SENDERS
from mpitrain.codecs.noise import noise_key
from mpitrain.codecs.registry import make_codec
from mpitrain.collectives.base import Bucket, Traffic, Transport, compile_kernels
from mpitrain.collectives.registry import COLLECTIVES, make_reducer
from mpitrain.collectives.segments import segment_elements
from mpitrain.collectives.server import servers_refusal
from mpitrain.comm.agreement import agree, first_on_node, same_everywhere
from mpitrain.comm.frame import HEADER_BYTES, MAX_MESSAGE_BYTES
from mpitrain.comm.grid import Axis, duplicate
from mpitrain.config.codec_names import parse_codec
from mpitrain.config.schema import ExchangeConfig
from mpitrain.config.validate import refusal
from mpitrain.errors import ConfigError, LaunchError

ACCEPTED = (np.float16, np.float32, np.float64)
ROUNDINGS = ("nearest", "stochastic")


class Allreduce:
    """Sum arrays of one size over a communicator, sending compressed bytes.

    Parameters
    ----------
    comm : MPI.Comm
        Ranks that take part. It is duplicated: messages of the caller are never met.
    size : int
        Elements of every array; 0 is legal.
    codec : str
        What bytes travel: a name as in configurations. raw sends the value itself, fp16 and bf16 2 bytes, int8 1.02,
        int4 0.52, int2 a quarter and sign an eighth of one; "topk-100" the largest of every 100 values, "ecq-2.5"
        about 2.5 bits a value, "ecq-20dB" as many as that precision needs.
    memory : {"residual", "delta", "none"} or None
        What is remembered between calls: ``residual`` adds what rounding lost to the next array (for gradients),
        ``delta`` sends the change against the last sum (for slowly changing arrays). None: ``residual``, or ``none``
        with raw.
    collective : {"direct", "ring", "server", "native"}
        How they travel; ``native`` is MPI_Allreduce and carries raw only.
    servers : int or None
        Ranks that add up for all, the last of ``comm``, where the collective is ``server``. None: one.
    dtype : float32 or float64
        Type in which sums are made. Arrays may be float16, float32 or float64 and are converted to it.
    rounding : {"nearest", "stochastic"}
        Stochastic rounding (int8, int4) is right on average.
    seed : int
        Of stochastic rounding; the same on all ranks.
    timeout_s : float
        Silence after which a peer counts as lost.
    max_message_bytes : int
        Longer messages are sent in pieces.
    segment_kb : int
        Size of the messages in which a rank's part of the array travels, in 10^3 bytes of float32, so that coding and
        the wire go on side by side; 0: it is one message.
    name : str
        Of the array, for messages.

    Raises
    ------
    ConfigError
        Unknown names or a refused combination; on all ranks.

    Notes
    -----
    Building, calling and closing are collective over ``comm``. Use as a context manager, or call ``close``.

    Examples
    --------
    >>> with mpitrain.Allreduce(MPI.COMM_WORLD, gradient.size) as allreduce:  # doctest: +SKIP
    ...     traffic = allreduce(gradient)
    """

    def __init__(
        self,
        comm: MPI.Comm,
        size: int,
        *,
        codec: str = "int8",
        memory: str | None = None,
        collective: str = "direct",
        servers: int | None = None,
        dtype: npt.DTypeLike = np.float32,
        rounding: str = "nearest",
        seed: int = 0,
        timeout_s: float = 60.0,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        segment_kb: int = ExchangeConfig().segment_kb,
        name: str = "array",
    ) -> None:
        _check_limits(dtype, timeout_s, max_message_bytes, segment_kb)
        self.name = name
        self._axis = Axis(duplicate(comm, timeout_s=timeout_s), "allreduce")
        self._closed = False
        memory = memory or ("none" if codec == "raw" else "residual")
        try:
            agree(self._axis, lambda: _check(size, codec, memory, collective, rounding), timeout_s=timeout_s)
            agree(self._axis, lambda: _check_servers(servers, collective, self._axis.size), timeout_s=timeout_s)
            serving = 1 if servers is None else int(servers)
            how = [collective, serving, rounding, int(seed), max_message_bytes, segment_kb]
            choice = [int(size), codec, memory, np.dtype(dtype).str, *how]
            same_everywhere(self._axis, choice, "the arguments of Allreduce")
        except ConfigError:
            self.close()
            raise
        self._seed, self._calls = int(seed), 0
        self._work: Floats = aligned_zeros(int(size), dtype)
        coder = make_codec(codec, dtype, stochastic=rounding == "stochastic")
        transport = Transport(timeout_s, max_message_bytes, segment_elements(segment_kb))
        self._reducer = make_reducer(collective, self._axis, transport, servers=serving)
        self._state = self._reducer.open(Bucket(self._work), coder, memory)
        first_on_node(self._axis, lambda: compile_kernels(coder, memory))

    def __call__(self, array: npt.NDArray[Any]) -> Traffic:
        """Replace ``array`` by the sum over all ranks, the same bits everywhere.

        Parameters
        ----------
        array : float16, float32 or float64 array
            Any shape and strides, ``size`` elements; overwritten in place. A float16 sum that overflows is infinite.

        Returns
        -------
        Traffic
            Bytes, messages and seconds of this rank.

        Raises
        ------
        TypeError
            Integers, booleans, complex numbers or objects, before anything is sent.
        ValueError
            Wrong number of elements, an array that cannot be written, or a call after ``close`` or a lost peer.
        FloatingPointError
            NaN or infinity in some rank's array, or in the sum: raised on all ranks, ``array`` and the memories are
            unchanged.
        PeerLostError, ProtocolError
            A rank stayed away, or called something else.
        """
        self._check_array(array)
        with np.errstate(all="ignore"):  # what is not finite is reported below, once
            self._work[:] = array.reshape(-1)
        self._calls += 1
        try:
            pending = self._reducer.start(self._state, noise_key(self._seed, self._calls, self._axis.rank))
            traffic = pending.wait()
        except LaunchError:
            # The ranks are out of step for good: messages of this call may still arrive in the next.
            self._closed = True
            raise
        if pending.nonfinite:
            self._state.rollback()
            raise FloatingPointError(f"{self.name}: NaN or infinity in an array or in the sum; nothing was changed")
        self._state.commit()
        with np.errstate(over="ignore"):
            array[...] = self._work.reshape(array.shape)
        return traffic

    def _check_array(self, array: npt.NDArray[Any]) -> None:
        if self._closed:
            raise ValueError(f"{self.name}: this Allreduce was closed, or lost a peer; build a new one")
        if not isinstance(array, np.ndarray) or array.dtype not in ACCEPTED:
            kind = getattr(array, "dtype", type(array).__name__)
            raise TypeError(f"{self.name}: expected a numpy array of float16, float32 or float64, got {kind}")
        if array.size != self._work.size:
            raise ValueError(f"{self.name}: expected {self._work.size} elements, got {array.size} ({array.shape})")
        if not array.flags.writeable:
            raise ValueError(f"{self.name}: the array is read-only, but the sum replaces it; pass a copy")

    def close(self) -> None:
        """Free the communicator. Collective; a second time does nothing."""
        if not self._closed:
            self._closed = True
            self._axis.comm.Free()

    def __enter__(self) -> "Allreduce":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Freeing is collective: after an error on this rank alone it would wait for the others.
        if error is None:
            self.close()


def _check_limits(dtype: npt.DTypeLike, timeout_s: float, max_message_bytes: int, segment_kb: int) -> None:
    if np.dtype(dtype) not in (np.float32, np.float64):
        raise ConfigError(f"Allreduce: dtype: expected float32 or float64, got {np.dtype(dtype)}")
    if not timeout_s > 0:
        raise ConfigError(f"Allreduce: timeout_s: expected more than 0, got {timeout_s}")
    if not HEADER_BYTES <= max_message_bytes <= 2**31 - 1:
        raise ConfigError(f"Allreduce: max_message_bytes: expected {HEADER_BYTES} to 2^31 - 1, got {max_message_bytes}")
    if segment_kb < 0:
        raise ConfigError(f"Allreduce: segment_kb: expected 0 or more, got {segment_kb}")


def _check(size: int, codec: str, memory: str, collective: str, rounding: str) -> None:
    if not isinstance(size, int | np.integer) or size < 0:
        raise ConfigError(f"Allreduce: expected a size of 0 or more, got {size!r}")
    try:
        parse_codec(codec)
    except ConfigError as error:
        raise ConfigError(f"Allreduce: codec: {error}") from None
    for what, name, known in (
        ("memory", memory, SENDERS),
        ("collective", collective, COLLECTIVES),
        ("rounding", rounding, ROUNDINGS),
    ):
        if name not in known:
            raise ConfigError(f"Allreduce: {what}: expected one of {', '.join(known)}, got {name!r}")
    if reason := refusal(collective, codec, memory, rounding):
        raise ConfigError(f"Allreduce: {reason}")


def _check_servers(servers: int | None, collective: str, ranks: int) -> None:
    if servers is not None and collective != "server":
        raise ConfigError(f'Allreduce: servers = {servers!r} is read by collective "server", got "{collective}"')
    if servers is not None and not isinstance(servers, int | np.integer):
        raise ConfigError(f"Allreduce: servers: expected a number of ranks, got {servers!r}")
    if collective == "server" and (reason := servers_refusal(1 if servers is None else int(servers), ranks)):
        raise ConfigError(f"Allreduce: {reason}")
