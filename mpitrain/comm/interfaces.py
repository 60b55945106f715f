"""Network interfaces of this machine, from the kernel's own files: which Open MPI may try, and which it should."""

import contextlib
import fcntl
import os
import socket
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from mpitrain.comm.machine import ROOT, Finding, Level, read_or_empty
from mpitrain.errors import count

UP, LOOPBACK = 0x1, 0x8  # IFF_UP and IFF_LOOPBACK of <net/if.h>
GET_ADDRESS = 0x8915  # SIOCGIFADDR of <linux/sockios.h>

CONTAINER_NETWORKS = ("br-", "cali", "cilium", "cni", "docker", "flannel", "lxc", "lxdbr", "podman", "veth", "virbr")
"""How the interfaces begin that lead to containers and virtual machines of this host, and to no other host."""

VARIABLES = ("OMPI_MCA_btl_tcp_if_include", "OMPI_MCA_btl_tcp_if_exclude")


@dataclass(frozen=True)
class Interface:
    """A network interface; ``address`` is its IPv4 address, or empty."""

    name: str
    address: str
    up: bool
    loopback: bool = False
    internal: bool = False

    def __str__(self) -> str:
        return f"{self.name} {self.address or 'no IPv4 address'}{'' if self.up else ' (down)'}"


def ipv4_address(name: str) -> str:
    """Ask the kernel for the IPv4 address of an interface; empty where it has none."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        answer = fcntl.ioctl(asker.fileno(), GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
        return socket.inet_ntoa(answer[20:24])
    return ""


def list_interfaces(root: Path = ROOT, address: Callable[[str], str] = ipv4_address) -> list[Interface]:
    """List the interfaces below ``root``/sys/class/net by name."""
    found = []
    with contextlib.suppress(OSError):
        for folder in sorted(path for path in (root / "sys/class/net").iterdir() if path.is_dir()):
            flags, state = read_or_empty(folder / "flags") or "0x0", read_or_empty(folder / "operstate")
            name, bits = folder.name, int(flags, 16)
            found.append(
                Interface(
                    name,
                    address(name),
                    up=bool(bits & UP) and state in ("up", "unknown", ""),
                    loopback=bool(bits & LOOPBACK),
                    internal=name.startswith(CONTAINER_NETWORKS) or (folder / "bridge").exists(),
                )
            )
    return found


def interface_findings(interfaces: list[Interface], environment: Mapping[str, str] = os.environ) -> list[Finding]:
    """Say which interfaces there are, and name the one to choose where Open MPI could take a wrong one."""
    usable = [each for each in interfaces if each.up and each.address and not each.loopback]
    outward = [each for each in usable if not each.internal]
    internal = sum(each.internal for each in interfaces)
    parts = [str(each) for each in interfaces if not each.loopback and not each.internal]
    parts += [f"{count(internal, 'interface')} of containers or virtual machines"] * bool(internal)
    listed = "network: " + (", ".join(parts) or "no interface")
    chosen = [(name, environment[name]) for name in VARIABLES if environment.get(name)]
    if chosen:
        return [_chosen_finding(*chosen[0], listed, interfaces)]
    if not usable:
        return [Finding(Level.WARN, f"{listed}; none is up with an address", "ranks on this host alone will work")]
    if len(usable) == 1:
        return [Finding(Level.OK, listed)]
    best = (outward or usable)[0].name
    remedy = f"on several hosts name the one that reaches the others: export OMPI_MCA_btl_tcp_if_include={best}"
    return [Finding(Level.WARN, f"{listed}; Open MPI tries them all", remedy)]


def _chosen_finding(variable: str, value: str, listed: str, interfaces: list[Interface]) -> Finding:
    known = {each.name for each in interfaces}
    unknown = [name for name in value.split(",") if name not in known and "/" not in name]  # or a network, a.b.c.d/n
    what = f"{listed}; {variable}={value}"
    if unknown and variable.endswith("include"):
        return Finding(Level.FAIL, f"{what} names no interface of this machine", f"unset {variable} or correct it")
    return Finding(Level.OK, what)
