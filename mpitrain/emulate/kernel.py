"""What the emulator asks of the Linux kernel that Python 3.11 has no function for: namespaces, mounts, TUN devices."""

import ctypes
import fcntl
import os
import signal
import socket
import struct
from collections.abc import Iterable
from pathlib import Path

NEW_MOUNTS, NEW_NAMES, NEW_USERS, NEW_NETWORK = 0x00020000, 0x04000000, 0x10000000, 0x40000000
"""CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWUSER and CLONE_NEWNET of <linux/sched.h>."""

NAMESPACES = {"user": NEW_USERS, "net": NEW_NETWORK, "uts": NEW_NAMES, "mnt": NEW_MOUNTS}
"""By their names below /proc/PID/ns, in the order in which they must be entered."""

SYS_CHROOT, SYS_PTRACE, SYS_ADMIN, NET_ADMIN = 18, 19, 21, 12  # <linux/capability.h>
NEEDED = (SYS_CHROOT, SYS_PTRACE, SYS_ADMIN, NET_ADMIN)
"""Capabilities that it takes to make hosts and to enter them."""

TUN = Path("/dev/net/tun")
TUN_SET, TUN_FLAGS = 0x400454CA, 0x0001 | 0x1000 | 0x4000  # TUNSETIFF; IFF_TUN | IFF_NO_PI | IFF_VNET_HDR
TUN_OFFLOAD, TUN_CHECKSUM = 0x400454D0, 0x01  # TUNSETOFFLOAD; TUN_F_CSUM
TUN_HEADER = 10
"""Bytes before each packet (struct virtio_net_hdr): they say that its checksum is still to be made, which nobody does
where packets only go from one TUN device to another. Sums over every byte would cost the relay and the hosts time."""

SET_ADDRESS, SET_NETMASK, SET_MTU, GET_FLAGS, SET_FLAGS = 0x8916, 0x891C, 0x8922, 0x8913, 0x8914
UP = 0x1
BIND, RECURSIVE, PRIVATE = 0x1000, 0x4000, 0x40000  # MS_BIND, MS_REC and MS_PRIVATE of <sys/mount.h>
AMBIENT, AMBIENT_RAISE, SET_NAME, DEATH_SIGNAL, SLACK = 47, 2, 15, 1, 29  # prctl(2)
CAPABILITY_VERSION = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def unshare(flags: int) -> None:
    """Leave namespaces of the parent for new ones (unshare(2)); raises OSError."""
    _checked(_libc.unshare(flags))


def enter(process: int) -> None:
    """Move this process into the namespaces of another; raises OSError.

    The working folder stays the one of the same path. Where it takes a user namespace, rights in it survive exec.
    """
    here = os.getcwd()
    own, other = Path("/proc/self/ns"), Path(f"/proc/{process}/ns")
    different = {name: flag for name, flag in NAMESPACES.items() if not (own / name).samefile(other / name)}
    descriptors = [(os.open(other / name, os.O_RDONLY), flag) for name, flag in different.items()]
    for descriptor, flag in descriptors:
        _checked(_libc.setns(descriptor, flag))
        os.close(descriptor)
    if "user" in different:
        keep_capabilities()
    os.chdir(here)


def enter_user_namespace() -> None:
    """Become a user of the same name who has all rights over the namespaces that follow; raises OSError."""
    user, group = os.geteuid(), os.getegid()
    unshare(NEW_USERS)
    Path("/proc/self/setgroups").write_text("deny", encoding="ascii")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1", encoding="ascii")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1", encoding="ascii")
    keep_capabilities()


def keep_capabilities() -> None:
    """Hand the rights over this user namespace on to programs that it starts: only root keeps them by itself."""
    header = struct.pack("Ii", CAPABILITY_VERSION, 0)
    sets = ctypes.create_string_buffer(24)
    _checked(_libc.capget(header, sets))
    effective, permitted, _, *high = struct.unpack("6I", sets.raw)
    wanted = sum(1 << number for number in NEEDED) & permitted
    _checked(_libc.capset(header, struct.pack("6I", effective, permitted, wanted, *high)))
    for number in NEEDED:
        if wanted >> number & 1:
            _checked(_libc.prctl(AMBIENT, AMBIENT_RAISE, number, 0, 0))


def holds(capabilities: Iterable[int] = NEEDED) -> bool:
    """Tell whether this process may do what needs these capabilities, by /proc/self/status."""
    lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    effective = next(int(line.split()[1], 16) for line in lines if line.startswith("CapEff:"))
    return all(effective >> number & 1 for number in capabilities)


def make_mounts_private() -> None:
    """Keep mounts that follow from showing outside."""
    _mount("none", "/", None, RECURSIVE | PRIVATE)


def bind(source: Path | str, target: Path | str) -> None:
    """Show a file or folder, with what is mounted below, at another place; raises OSError."""
    _mount(str(source), str(target), None, BIND | RECURSIVE)


def mount_sys() -> None:
    """Let /sys show the interfaces of this network namespace, and the control groups as before; raises OSError."""
    groups = os.open("/sys/fs/cgroup", os.O_PATH) if Path("/sys/fs/cgroup").is_dir() else None
    _mount("sysfs", "/sys", "sysfs", 0)
    if groups is not None:
        bind(f"/proc/self/fd/{groups}", "/sys/fs/cgroup")
        os.close(groups)


def _mount(source: str, target: str, kind: str | None, flags: int) -> None:
    arguments = (os.fsencode(source), os.fsencode(target), kind.encode() if kind else None)
    _checked(_libc.mount(*arguments, ctypes.c_ulong(flags), None))


def open_tun(name: str) -> int:
    """Make a TUN device in this network namespace; it lives as long as the descriptor, which does not block."""
    descriptor = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, TUN_SET, struct.pack("16sH22x", name.encode(), TUN_FLAGS))
    fcntl.ioctl(descriptor, TUN_OFFLOAD, TUN_CHECKSUM)
    return descriptor


def configure(name: str, address: str = "", netmask: str = "", mtu: int = 0) -> None:
    """Give an interface of this network namespace what is not left out, and switch it on; raises OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        for request, text in ((SET_ADDRESS, address), (SET_NETMASK, netmask)):
            if text:
                packed = struct.pack("16sHH4s16x", name.encode(), socket.AF_INET, 0, socket.inet_aton(text))
                fcntl.ioctl(asker, request, packed)
        if mtu:
            fcntl.ioctl(asker, SET_MTU, struct.pack("16si20x", name.encode(), mtu))
        answer = fcntl.ioctl(asker, GET_FLAGS, struct.pack("16sH22x", name.encode(), 0))
        flags = struct.unpack_from("H", answer, 16)[0] | UP
        fcntl.ioctl(asker, SET_FLAGS, struct.pack("16sH22x", name.encode(), flags))


def name_process(name: str) -> None:
    """Show a name in lists of processes, of at most 15 bytes."""
    _libc.prctl(SET_NAME, name.encode()[:15])


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent dies."""
    _libc.prctl(DEATH_SIGNAL, signal.SIGKILL)


def sharpen_timers() -> None:
    """Have the kernel wake this process at the time that it asked for, not up to 50 µs later."""
    _libc.prctl(SLACK, 1)
