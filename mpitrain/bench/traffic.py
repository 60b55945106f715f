"""Plain sockets under load, as processes of their own: ``python -m mpitrain.bench.traffic ROLE …``.

========  ===================  ====================================================================================
role      arguments            does
========  ===================  ====================================================================================
sink      PORT                 takes one TCP stream to its end
source    HOST PORT SECONDS    fills one
listen    PORT COUNT           takes UDP packets until COUNT of them or the last one are there
probe     HOST PORT COUNT      sends UDP packets, one every ``INTERVAL_S``
========  ===================  ====================================================================================

All say ``ready`` first; those that send wait for a line on standard input. All end with a line of JSON.
"""

import json
import socket
import struct
import sys
import time
from collections.abc import Callable

PIECE = 2**16
INTERVAL_S = 0.01
PROBE_BYTES = 100
HEADERS = 28
"""Bytes of the IPv4 and UDP headers."""

STAMP = struct.Struct("qq")
"""Number of the packet, and when it was sent (ns of CLOCK_REALTIME, on which the kernel tells when it came)."""

KERNEL_TIME = 35
"""SO_TIMESTAMPNS of <asm-generic/socket.h>."""

PATIENCE_S = 5.0
"""Without a packet for so long, a listener gives up."""


def sink(port: str) -> dict[str, float]:
    """Take a stream; return its bytes and seconds."""
    with socket.create_server(("", int(port))) as server:
        _ready()
        stream, _ = server.accept()
        with stream:
            space, nbytes, begin = bytearray(2**20), 0, time.perf_counter()
            while got := stream.recv_into(space):
                nbytes += got
            return {"bytes": nbytes, "seconds": time.perf_counter() - begin}


def source(host: str, port: str, seconds: str) -> dict[str, float]:
    """Fill a stream for some seconds; return the bytes that the kernel took."""
    with socket.create_connection((host, int(port))) as stream:
        _wait()
        piece, nbytes, end = bytes(PIECE), 0, time.perf_counter() + float(seconds)
        while time.perf_counter() < end:
            stream.sendall(piece)
            nbytes += PIECE
        return {"bytes": nbytes}


def listen(port: str, count: str) -> dict[str, list[float]]:
    """Take packets; return the number and the seconds on the way of each, in the order in which they came."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taker:
        taker.setsockopt(socket.SOL_SOCKET, KERNEL_TIME, 1)
        taker.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**22)
        taker.bind(("", int(port)))
        _ready()
        numbers: list[float] = []
        seconds: list[float] = []
        while len(numbers) < int(count):
            try:
                packet, extra, _, _ = taker.recvmsg(PIECE, 64)
            except TimeoutError:
                break
            taker.settimeout(PATIENCE_S)
            came_s, came_ns = struct.unpack("qq", extra[0][2])
            number, sent_ns = STAMP.unpack_from(packet)
            numbers.append(number)
            seconds.append((came_s * 10**9 + came_ns - sent_ns) / 1e9)
            if number == int(count) - 1:
                break
        return {"numbers": numbers, "seconds": seconds}


def probe(host: str, port: str, count: str) -> dict[str, float]:
    """Send packets of ``PROBE_BYTES`` and their headers, one every ``INTERVAL_S``."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.connect((host, int(port)))
        _wait()
        begin = time.perf_counter()
        for number in range(int(count)):
            time.sleep(max(0.0, begin + number * INTERVAL_S - time.perf_counter()))
            packet = STAMP.pack(number, time.clock_gettime_ns(time.CLOCK_REALTIME))
            sender.send(packet.ljust(PROBE_BYTES, b"\0"))
        return {"bytes": int(count) * (PROBE_BYTES + HEADERS)}


ROLES: dict[str, Callable[..., object]] = {"sink": sink, "source": source, "listen": listen, "probe": probe}


def _ready() -> None:
    print("ready", flush=True)


def _wait() -> None:
    _ready()
    sys.stdin.readline()


if __name__ == "__main__":
    print(json.dumps(ROLES[sys.argv[1]](*sys.argv[2:])), flush=True)
