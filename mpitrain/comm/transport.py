"""How MPI's transport is set for a link: buffers, eager messages, the interface, and how ranks wait.

What a link needs follows from its bandwidth-delay product (BDP): the bytes that must be under way for it to be full.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mpitrain.comm.family import OPEN_MPI
from mpitrain.comm.machine import ROOT, Finding, Level, amount, read_or_empty

EAGER_FACTOR, EAGER_MIN, EAGER_MAX = 8, 2**20, 2**22
"""An eager message may be this many times the BDP, and a megabyte on the shortest link: one that is announced first
waits for an answer, which stands in line behind all that its sender has to send. The most bounds what a receiver may
have to keep."""

BUFFER_FACTOR = 2
"""Eager messages that a socket takes at once: the kernel then sends while the rank computes."""

WINDOW_FACTOR = 2
"""A socket's buffer is never less than this many times the BDP: what is lost must be kept until it is sent again."""

INITIAL_WINDOW = 10 * 1460
"""Bytes that TCP sends at first, and again after a pause (RFC 6928, RFC 2861)."""

MPICH_EAGER = ("MPIR_CVAR_CH3_EAGER_MAX_MSG_SIZE", "FI_OFI_RXM_SAR_LIMIT")
"""Of MPICH's older device, and of libfabric where it builds on its own TCP messages; the newer device (ch4) announces
nothing by itself."""

LOOPBACK = "lo"
"""Ranks of one host may use it; Open MPI's launcher has no need of an interface there, and refuses this one."""

HYDRA_INTERFACE = "HYDRA_IFACE"
"""Read by MPICH's launcher itself, not by its ranks."""


@dataclass(frozen=True)
class Kernel:
    """Limits of this machine's kernel; None where it does not tell.

    Attributes
    ----------
    explicit : mapping of str to int
        By ``w`` (send) and ``r`` (receive): the most that a program may ask for (net.core.wmem_max, rmem_max).
    automatic : mapping of str to int
        The most that the kernel takes by itself, the half of which holds data (net.ipv4.tcp_wmem, tcp_rmem).
    restarts : bool
        Whether a connection starts slowly again after a pause (net.ipv4.tcp_slow_start_after_idle).
    """

    explicit: Mapping[str, int | None] = field(default_factory=dict)
    automatic: Mapping[str, int | None] = field(default_factory=dict)
    restarts: bool = False


def read_kernel(root: Path = ROOT) -> Kernel:
    """Read the limits below ``root``/proc/sys/net."""
    net = root / "proc/sys/net"
    return Kernel(
        {way: _last_number(net / f"core/{way}mem_max") for way in "wr"},
        {way: _last_number(net / f"ipv4/tcp_{way}mem") for way in "wr"},
        # BBR paces by what it has measured, and is not asked.
        restarts=read_or_empty(net / "ipv4/tcp_slow_start_after_idle") == "1"
        and not read_or_empty(net / "ipv4/tcp_congestion_control").startswith("bbr"),
    )


def kernel_findings(kernel: Kernel) -> list[Finding]:
    """Say how long a link the sockets of this machine can fill."""
    sizes = [max(kernel.explicit.get(way) or 0, (kernel.automatic.get(way) or 0) // 2) for way in "wr"]
    if not all(sizes):
        return []
    most = min(sizes) // WINDOW_FACTOR
    what = f"sockets keep {amount(most)} under way, enough for 100 Mbit/s with a round trip of {most / 12_500:,.0f} ms"
    pauses = f"; after a pause they begin with {INITIAL_WINDOW / 1000:.1f} kB (net.ipv4.tcp_slow_start_after_idle = 1)"
    return [Finding(Level.OK, what + pauses * kernel.restarts)]


def _last_number(path: Path) -> int | None:
    words = read_or_empty(path).split()
    return int(words[-1]) if words and words[-1].isdecimal() else None


PARAMETER_FILES = {".openmpi/mca-params.conf": "OMPI_MCA_", ".prte/mca-params.conf": "PRTE_MCA_"}
"""Files in a home folder that Open MPI and its launcher read, and how the same is set in the environment."""


def user_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment with what the user has set in Open MPI's files, as if it were set there."""
    found: dict[str, str] = {}
    for file, prefix in PARAMETER_FILES.items():
        for line in read_or_empty(Path(environment.get("HOME", "/")) / file).splitlines():
            name, equals, value = line.partition("#")[0].partition("=")
            if equals:
                found[f"{prefix}{name.strip()}"] = value.strip()
    return found | dict(environment)


@dataclass(frozen=True)
class Settings:
    """What is set, and how it is handed over: as options of the launcher, or as variables around it.

    Attributes
    ----------
    mca : mapping of str to str
        Parameters of Open MPI's ranks.
    runtime : mapping of str to str
        Parameters of Open MPI's launcher, by their full names.
    variables : mapping of str to str
        Environment of MPICH's ranks and launcher.
    kept : tuple of str
        ``NAME=VALUE`` of what the user has set and what is therefore left as it is.
    notes : tuple of str
        What the kernel does not allow, or does to such a link.
    """

    major: int = 5
    mca: Mapping[str, str] = field(default_factory=dict)
    runtime: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    kept: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def environment(self) -> dict[str, str]:
        """Everything as variables, for launchers that are started by somebody else."""
        ranks = {f"OMPI_MCA_{name}": value for name, value in self.mca.items()}
        launcher = {f"{_prefix(self.major)}{name}": value for name, value in self.runtime.items()}
        return ranks | launcher | dict(self.variables)

    @property
    def options(self) -> list[str]:
        """Everything as options of the launcher."""
        words = [part for name, value in self.mca.items() for part in ("--mca", name, value)]
        option = "--mca" if self.major < 5 else "--prtemca"
        words += [part for name, value in self.runtime.items() for part in (option, name, value)]
        for name, value in self.variables.items():
            words += ["-iface", value] if name == HYDRA_INTERFACE else ["-genv", name, value]
        return words


def _prefix(major: int) -> str:
    """Return how variables begin that Open MPI's launcher reads: from version 5 it is a project of its own, PRRTE."""
    return "OMPI_MCA_" if major < 5 else "PRTE_MCA_"


def transport(
    family: str,
    version: tuple[int, ...],
    bdp_bytes: float | None = None,
    interface: str = "",
    *,
    oversubscribed: bool = False,
    user: Mapping[str, str] | None = None,
    kernel: Kernel | None = None,
) -> Settings:
    """Derive the settings.

    Parameters
    ----------
    family, version : str, tuple of int
        Of the MPI library: ``"Open MPI", (5, 0)``.
    bdp_bytes : float, optional
        The largest round trip times rate among the paths between ranks; None: unknown, so no sizes are set.
    interface : str
        The one to use; empty: MPI chooses.
    oversubscribed : bool
        Whether ranks share cores, so that those that wait should leave theirs.
    user : mapping of str to str, optional
        Environment in which the user may have set something; that is left out.
    kernel : Kernel, optional
        Limits that decide on buffers; this machine's where left out.
    """
    kernel = read_kernel() if kernel is None else kernel
    major = version[0] if version else 5
    if family == OPEN_MPI:
        settings = _open_mpi(major, bdp_bytes, interface, oversubscribed, kernel)
    else:
        settings = _mpich(bdp_bytes, interface, oversubscribed)
    notes = _link_notes(bdp_bytes, kernel) if bdp_bytes else ()
    return _without(user or {}, settings, (*settings.notes, *notes))


def eager_bytes(bdp_bytes: float) -> int:
    """Return up to which size messages travel unannounced."""
    return min(max(_power_of_two(EAGER_FACTOR * bdp_bytes), EAGER_MIN), EAGER_MAX)


def buffer_bytes(bdp_bytes: float) -> int:
    """Return what a socket should take."""
    return max(BUFFER_FACTOR * eager_bytes(bdp_bytes), _power_of_two(WINDOW_FACTOR * bdp_bytes))


def _power_of_two(nbytes: float) -> int:
    return 1 << max(0, int(-(-nbytes // 1)) - 1).bit_length()


def _open_mpi(major: int, bdp_bytes: float | None, interface: str, oversubscribed: bool, kernel: Kernel) -> Settings:
    shared = "sm" if major >= 5 else "vader"
    # Looking for fabrics beyond shared memory and TCP costs every start a second.
    mca = {"pml": "ob1", "btl": f"self,{shared},tcp"}
    notes: list[str] = []
    if oversubscribed:
        mca["mpi_yield_when_idle"] = "1"
    if bdp_bytes:
        eager = str(eager_bytes(bdp_bytes))
        for name in ("eager_limit", "rndv_eager_limit", "max_send_size"):
            mca[f"btl_tcp_{name}"] = eager
        for way, name in (("w", "sndbuf"), ("r", "rcvbuf")):
            size, note = _buffer(way, bdp_bytes, kernel)
            if size:
                mca[f"btl_tcp_{name}"] = str(size)
            notes += [note] * bool(note)
    runtime: dict[str, str] = {}
    if interface:
        mca["btl_tcp_if_include"] = interface
    if interface and interface != LOOPBACK:
        runtime["prte_if_include" if major >= 5 else "oob_tcp_if_include"] = interface
    return Settings(major, mca, runtime, notes=tuple(notes))


def _buffer(way: str, bdp_bytes: float, kernel: Kernel) -> tuple[int, str]:
    """Choose the size of a socket's buffer: 0 leaves it to the kernel; and say where neither will do."""
    wanted, automatic = buffer_bytes(bdp_bytes), kernel.automatic.get(way) or 0
    explicit = kernel.explicit.get(way)
    granted = wanted if explicit is None else min(wanted, explicit)
    # What is asked for is the end of the kernel's own growing: only where it is not less.
    size = granted if granted == wanted or 2 * granted >= automatic else 0
    enough = WINDOW_FACTOR * bdp_bytes
    if (size or automatic / 2) >= enough:
        return size, ""
    wish = f"sysctl -w net.core.{way}mem_max={wanted}"
    what = f"net.core.{way}mem_max = {explicit} and net.ipv4.tcp_{way}mem's last = {automatic} bytes"
    return size, f"{what} are too little for {enough:,.0f} bytes under way; {wish} on every host"


def _link_notes(bdp_bytes: float, kernel: Kernel) -> tuple[str, ...]:
    if bdp_bytes <= INITIAL_WINDOW or not kernel.restarts:
        return ()
    return (
        f"net.ipv4.tcp_slow_start_after_idle = 1: after every pause a connection begins with {INITIAL_WINDOW:,} bytes "
        f"a round trip where {bdp_bytes:,.0f} fit; sysctl -w net.ipv4.tcp_slow_start_after_idle=0 on every host",
    )


def _mpich(bdp_bytes: float | None, interface: str, oversubscribed: bool) -> Settings:
    variables: dict[str, str] = {}
    if bdp_bytes:
        variables |= dict.fromkeys(MPICH_EAGER, str(eager_bytes(bdp_bytes)))
    if oversubscribed:
        variables["MPIR_CVAR_POLLS_BEFORE_YIELD"] = "1"
    if interface:
        # The launcher's, which sets that of the older device, too; and the newer device's.
        variables |= {HYDRA_INTERFACE: interface, "FI_TCP_IFACE": interface}
    return Settings(0, variables=variables)


def _without(user: Mapping[str, str], settings: Settings, notes: tuple[str, ...]) -> Settings:
    """Leave out what the user has set, and remember it."""
    launcher = _prefix(settings.major)
    return Settings(
        settings.major,
        {name: value for name, value in settings.mca.items() if f"OMPI_MCA_{name}" not in user},
        {name: value for name, value in settings.runtime.items() if f"{launcher}{name}" not in user},
        {name: value for name, value in settings.variables.items() if name not in user},
        tuple(f"{name}={user[name]}" for name in settings.environment if name in user),
        notes,
    )
