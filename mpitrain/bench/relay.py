"""``mpitrain bench relay``: how much the emulator carries, at which share of a core, and how exact its delays are.

Hosts in a star send TCP streams to one another. Beside them, two hosts on a link of their own send small packets, whose
delay is known: what it differs is the error. The kernel notes when they come, so that no process has to be in time.
"""

import json
import os
import select
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import IO

from mpitrain.bench import traffic
from mpitrain.bench.records import Record, show
from mpitrain.emulate import settings
from mpitrain.emulate.counts import Counts
from mpitrain.emulate.emulation import Emulation
from mpitrain.errors import LaunchError, MpitrainError
from mpitrain.topology.model import Constant, Direction, Link, Site, Topology

PORT = 7700
DELAY_S = 0.005
"""Of the links of the star, one way; the link of the packets whose delay is known has twice that."""

PROBE_BYTES_S = 125e6
QUEUE_S = 0.1
HANG_S = 60.0
"""A guard against hanging, in addition to the seconds that were asked for."""


@dataclass(frozen=True)
class Part:
    """A process under way on a host."""

    process: "subprocess.Popen[str]"

    def begin(self) -> None:
        """Give the sign that it waits for."""
        if self.process.stdin:
            self.process.stdin.write("\n")
            self.process.stdin.flush()

    def end(self, timeout_s: float) -> dict[str, list[float]]:
        """Wait for its end, and return what it has found; raises LaunchError."""
        try:
            output, _ = self.process.communicate(timeout=timeout_s)
            found: dict[str, list[float]] = json.loads(output)
        except (subprocess.TimeoutExpired, ValueError):
            raise LaunchError(f"bench relay: {' '.join(self.process.args)} has not ended well") from None  # type: ignore[arg-type]
        return found


def main(hosts: int, mbps: float, seconds: float, mtu: int, path: Path | None) -> int:
    """Measure without load, then with it."""
    try:
        with Emulation(star(hosts, mbps, mtu)) as emulation:
            records = [measure(emulation, streams, seconds) for streams in (0, hosts)]
    except MpitrainError as error:
        print(f"mpitrain: {error}", file=sys.stderr)
        return int(error.exit_code)
    title = f"relay: {hosts} hosts in a star, streams of {mbps:g} Mbit/s together, MTU {mtu}, {os.cpu_count()} cores"
    show(f"{title} for all processes", records, path)
    return 0


def star(hosts: int, mbps: float, mtu: int) -> Topology:
    """Lay out hosts around a hub, each with its share of the rate, and two more for packets whose delay is known."""
    rate = mbps * 125_000 / hosts
    way = Direction(Constant(rate), DELAY_S, queue_bytes=int(rate * QUEUE_S) + 32 * mtu)
    known = Direction(Constant(PROBE_BYTES_S), 2 * DELAY_S, queue_bytes=32 * mtu)
    cells = [Site(f"cell{number}") for number in range(hosts)]
    links = [Link((cell.name, "hub"), way, way) for cell in (*cells, Site("one"))]
    sites = (*cells, Site("hub", slots=0), Site("one"), Site("two"))
    return Topology(sites, (*links, Link(("one", "two"), known, known)), name="bench relay", mtu=mtu)


def measure(emulation: Emulation, streams: int, seconds: float) -> Record:
    """Send for some seconds; return what the relay did meanwhile."""
    packets = int(seconds / traffic.INTERVAL_S)
    with ExitStack() as stack:
        listener = _start(emulation, stack, "two", "listen", PORT, packets)
        sinks = [_start(emulation, stack, f"cell{number}", "sink", PORT) for number in range(streams)]
        senders = [_start(emulation, stack, "one", "probe", "two", PORT, packets)]
        for number in range(streams):
            dest = f"cell{(number + 1) % streams}"
            senders.append(_start(emulation, stack, f"cell{number}", "source", dest, PORT, seconds))
        before = emulation.counts()
        for sender in senders:
            sender.begin()
        senders[0].end(seconds + HANG_S)
        after = emulation.counts()
        seen = listener.end(seconds + HANG_S)["seconds"]
        for part in (*senders[1:], *sinks):
            part.end(seconds + HANG_S)
    return record(before, after, seen, streams)


def record(before: Counts, after: Counts, seen_s: Sequence[float], streams: int) -> Record:
    """Make one flat record.

    Parameters
    ----------
    before, after : Counts
        Of the relay, around the time in which packets were sent.
    seen_s : sequence of float
        Seconds that the packets with a known delay were on the way.
    """
    one, two = before.relay, after.relay
    wall_s = two.wall_s - one.wall_s
    wanted_s = 2 * DELAY_S + (traffic.PROBE_BYTES + traffic.HEADERS) / PROBE_BYTES_S
    errors_ms = [abs(each - wanted_s) * 1e3 for each in seen_s]
    packets = two.delivered_packets - one.delivered_packets
    return {
        "tcp_streams": streams,
        "delivered_mbps": (two.delivered_bytes - one.delivered_bytes) / wall_s / 125_000,
        "delivered_packets_s": packets / wall_s,
        "relay_cores": (two.cpu_s - one.cpu_s) / wall_s,
        "relay_us_per_packet": (two.cpu_s - one.cpu_s) / packets * 1e6,
        "delay_error_median_ms": median(errors_ms),
        "delay_error_p99_ms": quantiles(errors_ms, n=100)[-1],
        "limited_s": two.limited_seconds - one.limited_seconds,
        "scheduling": two.scheduling,
    }


def _start(emulation: Emulation, stack: ExitStack, site: str, role: str, *arguments: object) -> Part:
    """Start one part of the traffic on a host, and return once it is ready; it ends with the stack."""
    words = [sys.executable, "-m", "mpitrain.bench.traffic", role, *map(str, arguments)]
    process = stack.enter_context(
        subprocess.Popen(
            emulation.inside(words, site),
            env=settings.inherited() | emulation.environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
    )
    stack.callback(process.kill)
    if not process.stdout or not _is_ready(process.stdout):
        raise LaunchError(f"bench relay: {role} on {site} did not start")
    return Part(process)


def _is_ready(output: IO[str]) -> bool:
    """Wait for the first line of a part of the traffic, in which it says so; it may hang."""
    poll = select.poll()
    poll.register(output, select.POLLIN)
    return bool(poll.poll(HANG_S * 1e3)) and output.readline() == "ready\n"
