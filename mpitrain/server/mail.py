"""Small messages of numbers: clocks, counts and wishes."""

from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mpitrain.comm.frame import HEADER_BYTES, Expected, Flag, Frame, Tag
from mpitrain.comm.waiting import Requests
from mpitrain.server.link import Link

FORMAT = 255
"""Number in the header for plain float64 numbers; no codec has it."""


class Outbox:
    """The sending end of numbers to one peer.

    Parameters
    ----------
    link, peer
        Where they go.
    most : int
        Numbers of the longest message.
    """

    def __init__(self, link: Link, peer: int, most: int) -> None:
        self._link, self._peer, self._most = link, peer, most
        self._sends: deque[tuple[Frame, Requests]] = deque()
        self._sequence = 0

    def send(self, values: Sequence[float]) -> None:
        """Start sending."""
        frame = self._free()
        frame.payload[: 8 * len(values)].view(np.float64)[:] = values
        frame.seal(Expected(FORMAT, Flag(0), self._sequence, len(values)), 8 * len(values))
        self._sequence += 1
        self._sends.append((frame, self._link.send(frame, self._peer, Tag.CONTROL)))

    def _free(self) -> Frame:
        if self._sends and self._sends[0][1].poll():
            return self._sends.popleft()[0]
        return Frame(8 * self._most)

    def poll(self) -> None:
        """Let messages that are under way get on."""
        for _, requests in self._sends:
            requests.poll()


class Inbox:
    """The receiving end; parameters as above."""

    def __init__(self, link: Link, peer: int, most: int) -> None:
        self._link, self._peer = link, peer
        self._frame = Frame(8 * most)
        self._sequence = 0
        self._requests = self._post()

    def _post(self) -> Requests:
        return self._link.receive(self._frame, self._peer, Tag.CONTROL)

    def take(self) -> npt.NDArray[np.float64] | None:
        """Return the next message, if it is there; raises ProtocolError."""
        if not self._requests.poll():
            return None
        received = self._requests.received_bytes
        self._link.arrived(self._requests)
        header = Expected(FORMAT, Flag(0), self._sequence, (received - HEADER_BYTES) // 8)
        payload = self._frame.open(received, header, self._link.axis.label(self._peer))
        values = np.empty(0) if payload is None else payload.view(np.float64).copy()
        self._sequence += 1
        self._requests = self._post()
        return values

    def cancel(self) -> None:
        """Withdraw the receive."""
        self._requests.cancel()
