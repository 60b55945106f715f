"""The process that carries packets between the hosts as slowly as the links of the topology would."""

import contextlib
import gc
import os
import resource
import select
import socket
import time
from collections.abc import Sequence

from mpitrain.emulate.counts import Counts, Gauge, RelayLoad, link_counts
from mpitrain.emulate.kernel import TUN_HEADER, sharpen_timers
from mpitrain.emulate.network import Network, Route
from mpitrain.errors import ConfigError
from mpitrain.topology.model import Topology

ROUNDS = 4
"""How many packets of a host are taken at most before those that are due have their turn."""

PAUSE_S = 2e-4
"""From one look at the hosts to the next one, at least: busy links cost fewer of them, packets may be as late."""

PRIORITY, NICE = 1, -10
IPV4, VERSION, DEST = 4, TUN_HEADER, slice(TUN_HEADER + 16, TUN_HEADER + 20)
"""Version and address of the receiver in the header of a packet."""

ASK = b"counts\n"

SELECTABLE = 1024
"""Descriptors from this one on select(2) does not take (FD_SETSIZE)."""

SPARE = 64
"""Descriptors that a process has beside those of the hosts."""


def check_size(topology: Topology) -> None:
    """Refuse more sites than there can be descriptors, one a host; raises ConfigError."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    scarce = allowed != resource.RLIM_INFINITY and allowed < SELECTABLE
    most = max(0, (allowed if scarce else SELECTABLE) - SPARE)
    if len(topology.sites) > most:
        remedy = f"raise ulimit -n, which is {allowed}, or leave some out" if scarce else "leave some out"
        raise ConfigError(
            f"topology {topology.name}: expected at most {most} sites to emulate here, got {len(topology.sites)}; "
            f"{remedy}"
        )


def addresses(topology: Topology) -> list[str]:
    """Give every site an address in 10.77.0.0/16."""
    return [f"10.77.{number // 250}.{number % 250 + 1}" for number in range(len(topology.sites))]


class Relay:
    """Carries packets until the other end of ``control`` is closed.

    Parameters
    ----------
    topology : Topology
        Sites in the order of ``tuns``.
    tuns : sequence of int
        Descriptors of the TUN devices, which do not block.
    control : socket
        Answers ``ASK`` with a line of JSON (`counts.Counts`).
    scheduling : str
        For the counts.

    Attributes
    ----------
    watched : list of int
        Descriptors that may still bring something.
    """

    def __init__(
        self, topology: Topology, tuns: Sequence[int], control: socket.socket, scheduling: str = "no priority"
    ) -> None:
        self._network = Network(topology, TUN_HEADER)
        self._tuns = list(tuns)
        self._sources = {descriptor: number for number, descriptor in enumerate(self._tuns)}
        self._control = control
        self._numbers = {socket.inet_aton(text): number for number, text in enumerate(addresses(topology))}
        self._routes: dict[tuple[int, bytes], Route | None] = {}
        self._gauge = Gauge()
        self._bytes = self._packets = self._unroutable = self._refused = 0
        self._space = memoryview(bytearray(TUN_HEADER + topology.mtu))
        self._spaces = (self._space,)
        self._scheduling = scheduling
        self._begin_s = self._begin_cpu_s = 0.0
        self.watched: list[int] = []

    def run(self) -> None:
        """Carry."""
        self._begin_s, self._begin_cpu_s = time.perf_counter(), time.process_time()
        self.watched = [self._control.fileno(), *self._sources]
        window_s = 1.0
        while True:
            now_s = time.perf_counter() - self._begin_s
            self._deliver(now_s)
            if now_s >= window_s:
                self._gauge.second(now_s, time.process_time() - self._begin_cpu_s)
                window_s = now_s + 1.0
            pause_s = min(self._network.next_s, window_s) - (time.perf_counter() - self._begin_s)
            ready, _, _ = select.select(self.watched, (), (), max(0.0, pause_s))
            rest_s = self._begin_s + now_s + PAUSE_S - time.perf_counter()
            if rest_s > 0:
                time.sleep(rest_s)
            for _ in range(ROUNDS):
                if not self._collect(ready):
                    return
                ready, _, _ = select.select(self.watched, (), (), 0.0)
                if not ready:
                    break

    def _collect(self, ready: Sequence[int]) -> bool:
        """Take one packet of each host that has some, and send it on its way; False once the emulator has gone."""
        network, space, spaces = self._network, self._space, self._spaces
        now_s = time.perf_counter() - self._begin_s
        if network.next_s <= now_s:
            self._deliver(now_s)
        for descriptor in ready:
            source = self._sources.get(descriptor)
            if source is None:
                if not self._answer():
                    return False
                continue
            try:
                # Into memory at hand, and copied: half of the time of os.read, which takes new memory for the most.
                packet = bytes(space[: os.readv(descriptor, spaces)])
            except BlockingIOError:
                continue
            except OSError:
                packet = b""
            if not packet:  # someone inside has taken the device away
                self.watched.remove(descriptor)
                continue
            key = (source, packet[DEST])
            try:
                route = self._routes[key]
            except KeyError:
                route = self._routes[key] = self._find_route(*key)
            if route is None or packet[VERSION] >> 4 != IPV4:
                self._unroutable += 1
            else:
                network.enter(now_s, route, packet)
        return True

    def _find_route(self, source: int, address: bytes) -> Route | None:
        dest = self._numbers.get(address)
        return None if dest is None or dest == source else self._network.route(source, dest)

    def _deliver(self, now_s: float) -> None:
        """Hand over what is due."""
        for due_s, dest, packet in self._network.due(now_s):
            try:
                os.write(self._tuns[dest], packet)
            except OSError:  # the kernel is short of memory, or the host has gone
                self._refused += 1
                continue
            self._packets += 1
            self._bytes += len(packet) - TUN_HEADER
            self._gauge.note(time.perf_counter() - self._begin_s - due_s)

    def _answer(self) -> bool:
        """Answer the emulator; False once it has closed its end."""
        if not self._control.recv(len(ASK)):
            return False
        with contextlib.suppress(BrokenPipeError):
            self._control.sendall(self.counts().to_json() + b"\n")
        return True

    def counts(self) -> Counts:
        """Take stock."""
        gauge = self._gauge
        load = RelayLoad(
            delivered_packets=self._packets,
            delivered_bytes=self._bytes,
            unroutable_packets=self._unroutable,
            refused_packets=self._refused,
            wall_s=time.perf_counter() - self._begin_s,
            cpu_s=time.process_time() - self._begin_cpu_s,
            busiest_share=gauge.busiest,
            late_median_ms=gauge.quantile_ms(0.5),
            late_p99_ms=gauge.quantile_ms(0.99),
            seconds=gauge.seconds,
            limited_seconds=gauge.limited_seconds,
            scheduling=self._scheduling,
        )
        return Counts(link_counts(self._network), load)


def carry(topology: Topology, tuns: Sequence[int], control: socket.socket) -> None:
    """Be the process of a relay: in time, whoever computes on the same cores."""
    sharpen_timers()
    gc.disable()  # nothing here refers to itself; a collection would only make packets late
    Relay(topology, tuns, control, _take_priority()).run()


def _take_priority() -> str:
    """Ask to run as soon as a packet is due, whoever computes; say what was granted."""
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(PRIORITY))
        return "real-time priority"
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, NICE)
        return f"nice {NICE}"
    return "no priority"
