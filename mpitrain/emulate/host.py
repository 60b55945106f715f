"""How a process becomes a host: namespaces of its own, a name, a network device; every failure says what is missing."""

import contextlib
import errno
import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

from mpitrain.emulate import kernel
from mpitrain.errors import LaunchError

DEVICE = "mt0"
"""The interface that leads to the other hosts."""

NETMASK = "255.255.0.0"

ROOT_REMEDY = "run it as root with CAP_SYS_ADMIN and CAP_NET_ADMIN"
USER_REMEDY = (
    f"{ROOT_REMEDY}, or let users have namespaces: sysctl user.max_user_namespaces and "
    "user.max_net_namespaces > 0, kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0, "
    "as far as these exist"
)
TUN_REMEDY = "modprobe tun (in a container: --device /dev/net/tun), and let users open it: chmod 666 /dev/net/tun"
MOUNT_REMEDY = f"{ROOT_REMEDY}; in a container add --security-opt apparmor=unconfined --security-opt seccomp=unconfined"


@contextlib.contextmanager
def needing(what: str, remedy: str) -> Iterator[None]:
    """Turn a refusal of the kernel into a message with a remedy (LaunchError)."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise LaunchError(f"emulate: {what} cannot be had here: {reason}; {remedy}") from None


def become_privileged(*, rootless: bool) -> None:
    """Get the rights to make hosts: those of root, or those of any user in a user namespace; raises LaunchError."""
    if rootless or not kernel.holds():
        with needing("a user namespace", USER_REMEDY):
            kernel.enter_user_namespace()


def become_host(name: str, address: str, mtu: int, names: Path) -> int:
    """Move this process into namespaces of its own, and return the descriptor of its TUN device; raises LaunchError.

    Parameters
    ----------
    name, address : str
        Host name and IPv4 address.
    mtu : int
        Largest packet in bytes.
    names : Path
        What it sees as /etc/hosts.
    """
    outside = _tcp_settings()
    with needing("network, name and mount namespaces", USER_REMEDY):
        kernel.unshare(kernel.NEW_NETWORK | kernel.NEW_NAMES | kernel.NEW_MOUNTS)
        socket.sethostname(name)
    with needing("a mount over /etc/hosts", MOUNT_REMEDY):
        kernel.make_mounts_private()
        kernel.bind(names, "/etc/hosts")
    with contextlib.suppress(OSError):  # /sys goes on to list the interfaces outside, which only a doctor would read
        kernel.mount_sys()
    _switch_off_ipv6()
    _set_tcp(outside)
    with needing(f"a TUN device ({kernel.TUN})", TUN_REMEDY):
        tun = kernel.open_tun(DEVICE)
    with needing(f"address {address} and MTU {mtu} on a TUN device", ROOT_REMEDY):
        kernel.configure("lo")
        kernel.configure(DEVICE, address, NETMASK, mtu)
    return tun


def _switch_off_ipv6() -> None:
    """Spare the links the packets in which an interface looks for IPv6 routers."""
    for scope in ("all", "default"):
        try:
            Path(f"/proc/sys/net/ipv6/conf/{scope}/disable_ipv6").write_text("1", encoding="ascii")
        except OSError as error:  # a kernel without IPv6, or a container that lets nothing be set: they are dropped
            if error.errno not in (errno.ENOENT, errno.EROFS, errno.EACCES, errno.EPERM):
                raise


def _tcp_settings() -> dict[Path, str]:
    """Read how this machine's TCP is set: a new network namespace would start with the kernel's defaults."""
    found = {}
    for path in Path("/proc/sys/net/ipv4").glob("tcp_*"):
        with contextlib.suppress(OSError):  # some may only be written, or only be seen by root
            found[path] = path.read_text(encoding="ascii", errors="replace")
    return found


def _set_tcp(settings: Mapping[Path, str]) -> None:
    """Set what differs from this network namespace's, as far as it is a matter of namespaces."""
    for path, text in settings.items():
        with contextlib.suppress(OSError):
            if path.read_text(encoding="ascii", errors="replace") != text:
                path.write_text(text, encoding="ascii")


def check_device() -> None:
    """Refuse early where no TUN device can be had; raises LaunchError."""
    with needing(f"a TUN device ({kernel.TUN})", TUN_REMEDY):
        os.close(os.open(kernel.TUN, os.O_RDWR))
