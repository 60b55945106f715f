"""The process that makes the hosts and the relay, watches over them, and clears up when the emulator is gone.

It waits for the end of a socket that only the emulator holds: an order, or its death, even by SIGKILL, are the same.
"""

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

from mpitrain.emulate import kernel, processes
from mpitrain.emulate.host import become_host, become_privileged
from mpitrain.emulate.relay import addresses, carry
from mpitrain.errors import ExitCode, LaunchError, MpitrainError
from mpitrain.topology.model import Topology

NAMES = "names"
"""File in the folder of an emulation that its hosts see as /etc/hosts."""

HOST_S = 20.0
"""Longest wait for a host that is coming up; the emulator waits longer, and is told which one did not."""


@dataclass(frozen=True)
class Task:
    """What the emulator wants.

    Attributes
    ----------
    topology : Topology
    mark : str
        Of the emulator (`processes.make_mark`).
    folder : Path
        Of the emulation; removed at the end.
    rootless : bool
        Whether to use a user namespace even as root.
    """

    topology: Topology
    mark: str
    folder: Path
    rootless: bool


def fork(body: Callable[[], None], *unwanted: socket.socket) -> int:
    """Run something in a process of its own, which never returns from here; give back its number.

    Parameters
    ----------
    unwanted : socket
        Ends that the new process must not hold.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a parent may have had it ignored: no child could be waited for
    child = os.fork()
    if child:
        return child
    code = int(ExitCode.INTERNAL)
    try:
        for end in unwanted:
            end.close()
        body()
        code = 0
    except BaseException:  # for the code that called fork, this process does not exist
        traceback.print_exc()
    finally:
        os._exit(code)


def join(process: int, limit_s: float) -> None:
    """Wait for the end of a child, and kill it where that does not come in time."""
    descriptor = os.pidfd_open(process)
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        if not poll.poll(limit_s * 1e3):
            os.kill(process, signal.SIGKILL)
    finally:
        os.close(descriptor)
    os.waitpid(process, 0)


def watch(task: Task, lifeline: socket.socket, control: socket.socket) -> None:
    """Make hosts and relay, tell the emulator, wait for its end, and clear up.

    Parameters
    ----------
    lifeline : socket
        Takes one line of JSON: ``{"hosts": {name: process}}`` or ``{"error": text}``; ends with the emulator.
    control : socket
        For the relay.
    """
    os.setsid()  # Ctrl-C is for the emulator
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    kernel.name_process("mt-warden")
    children: list[int] = []
    try:
        become_privileged(rootless=task.rootless)
        tuns = _make_hosts(task, children, (lifeline, control))
        hosts = dict(zip((site.name for site in task.topology.sites), children, strict=True))
        spaces = [space for host in children if (space := processes.namespace(host))]
        children.append(fork(partial(_run_relay, task, tuns, control), lifeline))
        control.close()
        _tell(lifeline, hosts=hosts)
        _wait(lifeline, children[-1])
        processes.end_all(partial(processes.members, task.mark, spaces))
    except MpitrainError as error:
        _tell(lifeline, error=str(error))
    finally:
        shutil.rmtree(task.folder, ignore_errors=True)
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _tell(lifeline: socket.socket, **message: object) -> None:
    with contextlib.suppress(BrokenPipeError):
        lifeline.sendall(json.dumps(message).encode() + b"\n")


def _make_hosts(task: Task, children: list[int], unwanted: tuple[socket.socket, ...]) -> list[int]:
    """Start all hosts, whose processes are added to ``children``; return the TUN device of each."""
    ends: list[socket.socket] = []
    for site, address in zip(task.topology.sites, addresses(task.topology), strict=True):
        ours, theirs = socket.socketpair()
        become = partial(become_host, site.name, address, task.topology.mtu, task.folder / NAMES)
        children.append(fork(partial(_live, become, theirs), ours, *ends, *unwanted))
        theirs.close()
        ends.append(ours)
    return [_receive(end, site.name) for end, site in zip(ends, task.topology.sites, strict=True)]


def _receive(end: socket.socket, name: str) -> int:
    """Take the descriptor that a host sends; raises LaunchError with what it says instead."""
    end.settimeout(HOST_S)
    with end:
        try:
            message, descriptors, _, _ = socket.recv_fds(end, 4096, 1)
        except TimeoutError:
            raise LaunchError(f"emulate: the host {name} did not come up within {HOST_S:g} s; start again") from None
        if descriptors:
            return descriptors[0]
        raise LaunchError(message.decode() or "emulate: a host ended before it had begun")


def _live(become: Callable[[], int], end: socket.socket) -> NoReturn:
    """Be a host: hold its namespaces until the warden ends."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    kernel.end_with_parent()
    try:
        tun = become()
        kernel.name_process(f"mt-{socket.gethostname()}")
        socket.send_fds(end, [b"up"], [tun])
        os.close(tun)
    except LaunchError as error:
        end.sendall(str(error).encode())
        os._exit(int(error.exit_code))
    end.close()
    while True:
        signal.pause()


def _run_relay(task: Task, tuns: list[int], control: socket.socket) -> None:
    kernel.name_process("mt-relay")
    carry(task.topology, tuns, control)


def _wait(lifeline: socket.socket, relay: int) -> None:
    """Return when the emulator or the relay has ended."""
    poll = select.poll()
    poll.register(lifeline, select.POLLIN)
    poll.register(os.pidfd_open(relay), select.POLLIN)
    poll.poll()
