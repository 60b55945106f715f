"""The settings of MPI's transport, from the link to the words on a command line; no MPI is started."""

import pytest

from mpitrain.comm import transport as module
from mpitrain.comm.family import Library, library
from mpitrain.comm.transport import (
    Kernel,
    Settings,
    buffer_bytes,
    eager_bytes,
    kernel_findings,
    read_kernel,
    transport,
    user_settings,
)

MIB = 2**20
ROOMY = Kernel({"w": 16 * MIB, "r": 16 * MIB}, {"w": 4 * MIB, "r": 6 * MIB})
ORDINARY = Kernel({"w": 212992, "r": 212992}, {"w": 4 * MIB, "r": 6 * MIB}, restarts=True)
"""A machine as most distributions set it up."""

STAR = 250_000
"""Bandwidth-delay product of 100 Mbit/s and 10 ms each way."""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Open MPI v5.0.11", ("Open MPI", (5, 0, 11))),
        ("Open MPI v4.1.4, package: Debian OpenMPI", ("Open MPI", (4, 1, 4))),
        ("MPICH Version:      5.0.2", ("MPICH", (5, 0, 2))),
        ("MPICH Version:\t4.0.2", ("MPICH", (4, 0, 2))),
        ("Intel(R) MPI Library 2021.11 for Linux* OS", ("Intel MPI", (2021, 11))),
        ("Some MPI", ("", ())),
    ],
)
def test_libraries_are_told_apart(text, expected):
    found = library(text)
    assert (found.family, found.version, found.name) == (*expected, text)
    assert found.open_mpi == (expected[0] == "Open MPI")


@pytest.mark.parametrize(
    ("bdp", "eager", "buffer"),
    [
        (1, MIB, 2 * MIB),
        (2**17, MIB, 2 * MIB),
        (2**17 + 1, 2 * MIB, 4 * MIB),
        (STAR, 2 * MIB, 4 * MIB),
        (MIB, 4 * MIB, 8 * MIB),
        (12_500_000, 4 * MIB, 32 * MIB),
    ],
)
def test_sizes_follow_from_the_link(bdp, eager, buffer):
    assert (eager_bytes(bdp), buffer_bytes(bdp)) == (eager, buffer)
    assert eager >= min(4 * bdp, 4 * MIB)
    assert buffer >= 2 * bdp


def test_open_mpi_5():
    settings = transport("Open MPI", (5, 0, 11), STAR, "eth0", oversubscribed=True, kernel=ROOMY)
    assert settings.mca == {
        "pml": "ob1",
        "btl": "self,sm,tcp",
        "mpi_yield_when_idle": "1",
        "btl_tcp_eager_limit": "2097152",
        "btl_tcp_rndv_eager_limit": "2097152",
        "btl_tcp_max_send_size": "2097152",
        "btl_tcp_sndbuf": "4194304",
        "btl_tcp_rcvbuf": "4194304",
        "btl_tcp_if_include": "eth0",
    }
    assert settings.runtime == {"prte_if_include": "eth0"}
    assert settings.options[:6] == ["--mca", "pml", "ob1", "--mca", "btl", "self,sm,tcp"]
    assert settings.options[-3:] == ["--prtemca", "prte_if_include", "eth0"]
    assert settings.environment["OMPI_MCA_btl_tcp_sndbuf"] == "4194304"
    assert settings.environment["PRTE_MCA_prte_if_include"] == "eth0"
    assert len(settings.environment) == 10
    assert (settings.kept, settings.notes) == ((), ())


def test_open_mpi_4_has_other_names():
    settings = transport("Open MPI", (4, 1, 4), STAR, "eth0", oversubscribed=True, kernel=ROOMY)
    five = transport("Open MPI", (5, 0), STAR, "eth0", oversubscribed=True, kernel=ROOMY)
    assert settings.mca == five.mca | {"btl": "self,vader,tcp"}
    assert settings.options[-3:] == ["--mca", "oob_tcp_if_include", "eth0"]
    assert settings.environment["OMPI_MCA_oob_tcp_if_include"] == "eth0"
    assert not any(name.startswith("PRTE_") for name in settings.environment)


def test_mpich():
    settings = transport("MPICH", (4, 2), STAR, "eth0", oversubscribed=True, kernel=ORDINARY)
    assert settings.environment == {
        "MPIR_CVAR_CH3_EAGER_MAX_MSG_SIZE": "2097152",
        "FI_OFI_RXM_SAR_LIMIT": "2097152",
        "MPIR_CVAR_POLLS_BEFORE_YIELD": "1",
        "HYDRA_IFACE": "eth0",
        "FI_TCP_IFACE": "eth0",
    }
    words = settings.options
    assert words[words.index("-iface") + 1] == "eth0"
    assert words[-3:] == ["-genv", "FI_TCP_IFACE", "eth0"]
    assert "HYDRA_IFACE" not in words
    assert settings.mca == settings.runtime == {}


@pytest.mark.parametrize("bdp", [None, 0])
def test_unknown_links_keep_the_sizes_of_the_library(bdp):
    assert transport("Open MPI", (5, 0), bdp, kernel=ROOMY) == Settings(5, {"pml": "ob1", "btl": "self,sm,tcp"})
    assert transport("MPICH", (4, 2), bdp, kernel=ROOMY).environment == {}


def test_what_the_user_has_set_is_left_out_and_told():
    user = {
        "OMPI_MCA_btl": "self,tcp",
        "OMPI_MCA_btl_tcp_sndbuf": "0",
        "PRTE_MCA_prte_if_include": "wlan0",
        "FI_TCP_IFACE": "wlan0",
    }
    settings = transport("Open MPI", (5, 0), STAR, "eth0", user=user, kernel=ROOMY)
    assert not {"btl", "btl_tcp_sndbuf"} & settings.mca.keys()
    assert settings.mca["btl_tcp_rcvbuf"] == "4194304"
    assert settings.runtime == {}
    assert settings.kept == (
        "OMPI_MCA_btl=self,tcp",
        "OMPI_MCA_btl_tcp_sndbuf=0",
        "PRTE_MCA_prte_if_include=wlan0",
    )
    assert "FI_TCP_IFACE" not in transport("MPICH", (4, 2), STAR, "eth0", user=user).environment


def test_files_of_the_user_count_as_set(tmp_path):
    for folder in (".openmpi", ".prte"):
        (tmp_path / folder).mkdir()
    text = "# mine\nbtl_tcp_sndbuf = 100  # small\n\nbtl=self,tcp\nnonsense\n"
    (tmp_path / ".openmpi" / "mca-params.conf").write_text(text)
    (tmp_path / ".prte" / "mca-params.conf").write_text("prte_if_include = eth9\n")
    environment = {"HOME": str(tmp_path), "OMPI_MCA_btl": "self,sm"}
    assert user_settings(environment) == environment | {
        "OMPI_MCA_btl_tcp_sndbuf": "100",
        "PRTE_MCA_prte_if_include": "eth9",
    }
    assert user_settings({"HOME": "/nowhere"}) == {"HOME": "/nowhere"}


def buffers(kernel, bdp=STAR):
    settings = transport("Open MPI", (5, 0), bdp, kernel=kernel)
    return settings.mca.get("btl_tcp_sndbuf"), settings.mca.get("btl_tcp_rcvbuf"), settings.notes


def test_small_limits_leave_buffers_to_the_kernel_that_grows_further_by_itself():
    assert buffers(ORDINARY)[:2] == (None, None)
    (note,) = buffers(ORDINARY)[2]
    assert "tcp_slow_start_after_idle=0" in note
    assert "14,600 bytes a round trip where 250,000 fit" in note


def test_limits_that_are_enough_are_asked_for():
    """Not all that is wanted, but as much as the kernel would take by itself."""
    assert buffers(Kernel({"w": 2 * MIB, "r": 4 * MIB}, {"w": 4 * MIB, "r": 6 * MIB})) == (
        str(2 * MIB),
        str(4 * MIB),
        (),
    )
    assert buffers(Kernel()) == (str(4 * MIB), str(4 * MIB), ())


def test_limits_that_are_too_small_either_way_are_told():
    send, receive, notes = buffers(ORDINARY, bdp=12_500_000)
    assert (send, receive) == (None, None)
    assert len(notes) == 3
    assert notes[0] == (
        "net.core.wmem_max = 212992 and net.ipv4.tcp_wmem's last = 4194304 bytes are too little for 25,000,000 bytes "
        "under way; sysctl -w net.core.wmem_max=33554432 on every host"
    )
    assert "net.core.rmem_max=33554432" in notes[1]


def test_short_links_need_no_notes():
    assert transport("Open MPI", (5, 0), 14_600, kernel=ORDINARY).notes == ()
    assert transport("MPICH", (4, 2), 14_601, kernel=ORDINARY).notes != ()


def test_limits_are_read_from_the_kernel(tmp_path):
    net = tmp_path / "proc" / "sys" / "net"
    (net / "core").mkdir(parents=True)
    (net / "ipv4").mkdir()
    for name, text in {
        "core/wmem_max": "212992\n",
        "core/rmem_max": "100\n",
        "ipv4/tcp_wmem": "4096\t16384\t4194304\n",
        "ipv4/tcp_slow_start_after_idle": "1\n",
    }.items():
        (net / name).write_text(text)
    assert read_kernel(tmp_path) == Kernel({"w": 212992, "r": 100}, {"w": 4194304, "r": None}, restarts=True)
    (net / "ipv4" / "tcp_congestion_control").write_text("bbr\n")
    assert not read_kernel(tmp_path).restarts
    assert read_kernel(tmp_path / "nowhere") == Kernel({"w": None, "r": None}, {"w": None, "r": None})


def test_this_machine_is_asked_where_nothing_is_given(monkeypatch):
    monkeypatch.setattr(module, "read_kernel", lambda: ROOMY)
    assert transport("Open MPI", (5, 0), STAR).mca["btl_tcp_sndbuf"] == "4194304"


def test_library_is_a_plain_tuple():
    assert Library("MPICH", (4,), "MPICH") == ("MPICH", (4,), "MPICH")


def test_doctor_tells_how_long_a_link_can_be_filled():
    (found,) = kernel_findings(ORDINARY)
    assert str(found) == (
        "sockets keep 1.0 MB under way, enough for 100 Mbit/s with a round trip of 84 ms; after a pause they begin "
        "with 14.6 kB (net.ipv4.tcp_slow_start_after_idle = 1)"
    )
    assert "pause" not in str(kernel_findings(ROOMY)[0])
    assert kernel_findings(Kernel()) == []
