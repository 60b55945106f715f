"""Hosts of a topology on this machine, as a context manager."""

import contextlib
import json
import os
import shlex
import shutil
import socket
import sys
import tempfile
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from mpitrain.comm.hints import EMULATION
from mpitrain.comm.signals import StopRequest
from mpitrain.comm.supervising import supervise
from mpitrain.emulate import processes, settings, warden
from mpitrain.emulate.agent import HOSTS
from mpitrain.emulate.counts import Counts
from mpitrain.emulate.host import check_device
from mpitrain.emulate.relay import ASK, addresses, check_size
from mpitrain.errors import ConfigError, LaunchError
from mpitrain.topology.graph import check_connected
from mpitrain.topology.model import Topology

PREFIX = "mpitrain-emulation."
"""Of the folders of emulations in the temporary one, followed by the mark and a random part."""

ANSWER_S = 30.0
"""Longest wait for an answer of a process of our own."""

END_S = 15.0
"""Longest wait for the warden to clear up; it gives processes that hang about half of that."""


class Emulation:
    """Hosts of a topology on this machine; to be used in a ``with``.

    Parameters
    ----------
    topology : Topology
        One host a site. Commands run on the first site that has slots, where no other is named.
    rootless : bool
        Use a user namespace even as root.

    Raises
    ------
    ConfigError
        From entering: a site that no link reaches, or more sites than a process can have descriptors.
    LaunchError
        From entering: rights that are missing, with the remedy. From the others: the emulation has broken down.
    """

    def __init__(self, topology: Topology, *, rootless: bool = False) -> None:
        self.topology = topology
        self._rootless = rootless
        self._mark = processes.make_mark(os.getpid())
        self._last: Counts | None = None
        self._folder = Path("FOLDER")

    def __enter__(self) -> Self:
        """Make the hosts; what dead emulations have left behind goes first."""
        self.check()
        end_stale()
        prefix = f"{PREFIX}{self._mark.replace(':', '-')}."
        self._folder = Path(tempfile.mkdtemp(prefix=prefix, dir=_plain_folder()))
        self._write_files()
        task = warden.Task(self.topology, self._mark, self._folder, self._rootless)
        self._lifeline, its_lifeline = socket.socketpair()
        self._control, its_control = socket.socketpair()
        body = partial(warden.watch, task, its_lifeline, its_control)
        self._warden = warden.fork(body, self._lifeline, self._control)
        its_lifeline.close()
        its_control.close()
        for end in (self._lifeline, self._control):
            end.settimeout(ANSWER_S)
        try:
            hosts = self._await_hosts()
            (self._folder / HOSTS).write_text(json.dumps(hosts), encoding="utf-8")
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Count for the last time, and leave nothing behind."""
        with contextlib.suppress(LaunchError):
            self._last = self.counts()
        self._end()

    def environment(self) -> dict[str, str]:
        """Return the variables under which ``mpirun -n N …``, run inside, spans the hosts.

        Before the hosts are made, a word stands for the folder that will be theirs.
        """
        found = settings.variables(self._mark, self._folder / "agent", self._folder / "hostfile")
        return settings.wishes(self.topology, settings.open_mpi_version()) | found

    def inside(self, command: list[str], site: str | None = None) -> list[str]:
        """Return the command that runs another one on a host; start it with `environment` in addition."""
        name = self.topology.site(site).name if site else self._first
        return [sys.executable, "-m", "mpitrain.emulate.agent", str(self._folder), "--exec", name, *command]

    def run(
        self,
        command: list[str],
        site: str | None = None,
        *,
        stop: StopRequest | None = None,
        together: bool = False,
        trains: bool = True,
    ) -> int:
        """Run a command on a host to its end, handing signals on, and return its exit code; main thread only.

        ``together`` and ``trains`` are told to `supervise`.

        Raises
        ------
        LaunchError
            The relay has ended, and the command with it.
        """
        variables = settings.inherited() | self.environment()
        inside = self.inside(command, site)
        code = supervise(inside, stop or StopRequest(), variables, together=together, trains=trains)
        self.counts()
        return code

    def counts(self) -> Counts:
        """Return what the links have carried so far, or in all after the end; raises LaunchError."""
        if self._last:
            return self._last
        try:
            self._control.sendall(ASK)
            return Counts.from_json(_read_line(self._control))
        except OSError as error:
            raise LaunchError(f"emulate: the relay between the hosts has ended: {error}; start again") from None

    @property
    def _first(self) -> str:
        return next(site.name for site in self.topology.sites if site.slots)

    def check(self) -> None:
        """Refuse what cannot work before anything starts; raises ConfigError and LaunchError."""
        outer = os.environ.get(EMULATION, "")
        if processes.is_alive(outer):
            raise LaunchError(f"emulate: this is an emulated host already ({EMULATION}={outer}); start it outside")
        if not self.topology.slots:
            raise ConfigError(f"topology {self.topology.name}: no site has slots; give one slots = 1")
        check_size(self.topology)
        check_connected(self.topology)
        check_device()

    def _write_files(self) -> None:
        """Write what hosts and launchers read: names, hosts and their slots, the stand-in for ssh."""
        pairs = list(zip(self.topology.sites, addresses(self.topology), strict=True))
        ranked = [site for site, _ in pairs if site.slots]
        agent = shlex.join([sys.executable, "-m", "mpitrain.emulate.agent", str(self._folder)])
        texts = {
            warden.NAMES: ["127.0.0.1 localhost", *(f"{address} {site.name}" for site, address in pairs)],
            "hostfile": [f"{site.name} slots={site.slots}" for site in ranked],
            "hostfile.mpich": [f"{site.name}:{site.slots}" for site in ranked],
            "agent": ["#!/bin/sh", f'exec {agent} "$@"'],
        }
        for name, lines in texts.items():
            (self._folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
        (self._folder / warden.NAMES).chmod(0o644)
        (self._folder / "agent").chmod(0o755)

    def _await_hosts(self) -> dict[str, int]:
        try:
            answer = json.loads(_read_line(self._lifeline))
        except OSError as error:
            raise LaunchError(f"emulate: the hosts did not come up: {error}") from None
        if "error" in answer:
            raise LaunchError(answer["error"])
        hosts: dict[str, int] = answer["hosts"]
        return hosts

    def _end(self) -> None:
        """Let the warden clear up, or do it where it is gone."""
        self._control.close()
        self._lifeline.close()
        warden.join(self._warden, END_S)
        processes.end_all(partial(processes.members, self._mark, ()))
        shutil.rmtree(self._folder, ignore_errors=True)


def end_stale() -> None:
    """Remove what dead emulations have left behind: processes, and folders of this user."""
    processes.end_stale()
    for folder in _plain_folder().glob(f"{PREFIX}*"):
        mark = folder.name.removeprefix(PREFIX).rpartition(".")[0].replace("-", ":")
        with contextlib.suppress(FileNotFoundError):  # another emulator removes it at the same time
            if not processes.is_alive(mark) and folder.stat().st_uid == os.geteuid():
                shutil.rmtree(folder, ignore_errors=True)


def _plain_folder() -> Path:
    """Return a folder for temporary files whose path launchers leave in one piece: they split it at such signs."""
    folder = tempfile.gettempdir()
    return Path("/tmp" if set(folder) & set(" \t:,;") else folder)


def _read_line(end: socket.socket) -> bytes:
    """Read a line, in time (TimeoutError) and to its end (EOFError is an OSError here: the other side has gone)."""
    line = bytearray()
    while not line.endswith(b"\n"):
        piece = end.recv(65536)
        if not piece:
            raise ConnectionResetError("it has gone")
        line += piece
    return bytes(line)
