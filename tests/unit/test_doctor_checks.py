"""What is found on machines of every kind, shown to the checks by fake files, limits and programs."""

import errno
import os
import resource
from pathlib import Path
from types import SimpleNamespace

import pytest

from mpitrain.comm import folders, interfaces, machine
from mpitrain.comm.interfaces import Interface, interface_findings, list_interfaces
from mpitrain.comm.machine import Finding, Level

OK, WARN, FAIL = Level
MIB = 2**20


def levels(findings):
    return [finding.level for finding in findings]


def write(root, texts):
    for path, text in texts.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


def test_a_finding_is_one_line():
    assert str(Finding(OK, "all is well")) == "all is well"
    assert str(Finding(WARN, "it is late", "go home")) == "it is late; go home"


# Shared memory, case M21.


def disk(free):
    return lambda path: SimpleNamespace(f_bavail=free // 4096, f_frsize=4096)


def test_shared_memory_of_one_mebibyte():
    """M21: warned with path, free and needed size."""
    shared, temporary = machine.shared_memory_findings(4, disk(MIB), {"TMPDIR": "/scratch"})
    assert levels([shared, temporary]) == [WARN, WARN]
    assert shared.what == "/dev/shm has 1.0 MB free, 4 ranks need 67.1 MB"
    assert "--shm-size=68m" in shared.remedy
    assert "OMPI_MCA_btl=self,tcp" in shared.remedy
    assert temporary.what == "/scratch has 1.0 MB free, 4 ranks need 3.0 MB"
    assert "TMPDIR" in temporary.remedy


def test_shared_memory_is_compared_with_the_ranks():
    """64 MiB, as containers have: enough for four ranks, whose segments fill it, and not for five."""
    assert levels(machine.shared_memory_findings(4, disk(64 * MIB), {})) == [OK, OK]
    assert levels(machine.shared_memory_findings(5, disk(64 * MIB), {})) == [WARN, OK]
    assert levels(machine.shared_memory_findings(5, disk(64 * MIB - 1), {"OMPI_MCA_btl": "sm,self"})) == [WARN, OK]
    one = machine.shared_memory_findings(1, disk(MIB), {})[0]
    assert one.what == "/dev/shm has 1.0 MB free, 1 rank needs 16.8 MB"


def test_shared_memory_that_is_not_used_or_elsewhere():
    """Where Open MPI is told to do without, or to use another folder, that is what is looked at."""
    (only,) = machine.shared_memory_findings(4, disk(0), {"OMPI_MCA_btl": "self,tcp", "TMP": "/t"})
    assert only.what.startswith("/t has 0.0 MB free")
    asked = []
    machine.shared_memory_findings(
        4, lambda path: asked.append(path) or disk(0)(path), {"OMPI_MCA_btl_sm_backing_directory": "/big"}
    )
    assert asked == ["/big", "/tmp"]


def test_shared_memory_that_does_not_exist():
    def missing(path):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    found = machine.shared_memory_findings(2, missing, {})
    assert levels(found) == [WARN, WARN]
    assert found[0].what == "/dev/shm cannot be used: No such file or directory; 2 ranks need 33.6 MB"


# Cores, memory, limits.


def topology(*siblings):
    return {f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": s for cpu, s in enumerate(siblings)}


def test_hyper_threads_share_a_core(tmp_path):
    write(tmp_path, topology("0,2", "1,3", "0,2", "1,3"))
    assert machine.physical_cores({0, 1, 2, 3}, tmp_path) == 2
    assert machine.physical_cores({0, 2}, tmp_path) == 1
    assert machine.physical_cores({0, 1, 2}, tmp_path / "nowhere") == 3
    found = machine.core_findings(3, {0, 1, 2, 3}, root=tmp_path)
    assert levels(found) == [WARN]
    assert found[0].what == "2 cores for 3 ranks (affinity: 4 processors)"


@pytest.mark.parametrize(
    ("texts", "quota"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "max 100000\n"}, None),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "150000 100000\n"}, 1.5),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/cpu.max": "400000 100000",
                "sys/fs/cgroup/a/cpu.max": "50000 100000",
            },
            0.5,
        ),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "200000 100000"}, 2.0),
        (
            {
                "proc/self/cgroup": "2:cpu,cpuacct:/box\n1:memory:/box\n",
                "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_quota_us": "300000\n",
                "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            },
            3.0,
        ),
    ],
)
def test_quota_of_the_control_group(tmp_path, texts, quota):
    assert machine.cpu_quota(write(tmp_path, texts)) == quota


def test_cores_against_ranks_and_threads(tmp_path):
    assert levels(machine.core_findings(2, {0, 1}, root=tmp_path)) == [OK]
    assert levels(machine.core_findings(3, {0, 1}, root=tmp_path)) == [WARN]
    found = machine.core_findings(2, {0, 1}, threads=4, root=tmp_path)
    assert levels(found) == [OK, WARN]
    assert str(found[1]) == "4 BLAS threads a rank make 8 on 2 cores; set OMP_NUM_THREADS=1"
    write(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "100000 100000"})
    (crowded,) = machine.core_findings(2, {0, 1}, root=tmp_path)
    assert crowded.level == WARN
    assert "of whose time 1 cores' are granted" in crowded.what


@pytest.mark.parametrize(
    ("texts", "level", "words"),
    [
        ({"proc/meminfo": "MemTotal: 9 kB\nMemAvailable:  2000000 kB\n"}, OK, "2.0 GB of memory available"),
        ({"proc/meminfo": "MemAvailable:  400000 kB\n"}, WARN, "409.6 MB of memory available, 2 ranks take 500.0 MB"),
        (
            {
                "proc/meminfo": "MemAvailable:  2000000 kB\n",
                "proc/self/cgroup": "0::/x\n",
                "sys/fs/cgroup/x/memory.max": "300000000\n",
            },
            WARN,
            "300.0 MB of memory granted by the control group",
        ),
        (
            {
                "proc/meminfo": "MemAvailable:  2000000 kB\n",
                "proc/self/cgroup": "3:memory:/x\n",
                "sys/fs/cgroup/memory/x/memory.limit_in_bytes": "9223372036854771712\n",
            },
            OK,
            "available",
        ),
    ],
)
def test_memory(tmp_path, texts, level, words):
    (found,) = machine.memory_findings(2, write(tmp_path, texts))
    assert found.level == level
    assert words in found.what


def test_memory_that_nobody_tells(tmp_path):
    assert machine.memory_findings(2, tmp_path) == []


def test_limits():
    endless = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    tight = {resource.RLIMIT_NOFILE: (95, 95), resource.RLIMIT_AS: (2 * 10**9, 2 * 10**9)}
    assert levels(machine.limit_findings(4, lambda which: endless)) == [OK]
    files_limit, space = machine.limit_findings(4, tight.get)
    assert str(files_limit).endswith("a launcher of 4 ranks needs 96; ulimit -n 96")
    assert "2.0 GB (ulimit -v)" in space.what
    assert levels([files_limit, space]) == [WARN, WARN]
    assert levels(machine.limit_findings(4, (tight | {resource.RLIMIT_NOFILE: (96, 96)}).get)) == [OK, WARN]


# Folders.

MOUNTS = "/dev/a / ext4 rw 0 0\nserver:/x /home/x nfs4 rw 0 0\ntmpfs /home/x/a\\040b tmpfs rw 0 0\n"


def test_file_systems(tmp_path):
    write(tmp_path, {"proc/mounts": MOUNTS})
    assert folders.file_system(Path("/opt/y"), tmp_path) == ("ext4", "/")
    assert folders.file_system(Path("/home/x/y"), tmp_path) == ("nfs4", "/home/x")
    assert folders.file_system(Path("/home/xy"), tmp_path) == ("ext4", "/")
    assert folders.file_system(Path("/home/x/a b/c"), tmp_path) == ("tmpfs", "/home/x/a b")
    assert folders.file_system(Path("/"), tmp_path / "nowhere") == ("unknown", "/")


def test_a_run_folder_is_tried_and_left_as_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr(folders.os, "statvfs", disk(10**10))
    found = folders.run_folder_findings(tmp_path / "runs" / "a", named=True)
    assert set(levels(found)) == {OK}
    assert not list(tmp_path.iterdir())
    assert f"run folder {tmp_path}/runs/a" in found[0].what


def test_a_run_folder_with_little_room(tmp_path, monkeypatch):
    monkeypatch.setattr(folders.os, "statvfs", disk(5 * 10**6))
    found = folders.run_folder_findings(tmp_path, named=True)
    assert levels(found)[0] == WARN
    assert "5.0 MB free" in found[0].what


@pytest.mark.parametrize(("named", "level"), [(True, FAIL), (False, WARN)])
def test_a_run_folder_that_cannot_be_written(tmp_path, monkeypatch, named, level):
    def refuse(**_):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(folders.tempfile, "TemporaryFile", refuse)
    (found,) = folders.run_folder_findings(tmp_path, named=named)
    assert found.level == level
    assert "cannot be written: Permission denied; set run.folder" in str(found)


def test_a_run_folder_on_a_network_disk_without_locks(tmp_path):
    def refuse(file, how):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    home, root = tmp_path / "home", tmp_path / "root"
    home.mkdir()
    write(root, {"proc/mounts": f"server:/x {home} nfs4 rw 0 0\n"})
    found = folders.run_folder_findings(home, named=True, lock=refuse, root=root)
    told = [str(finding) for finding in found if finding.level == WARN]
    assert any("does not lock files: No locks available; export HDF5_USE_FILE_LOCKING=FALSE" in text for text in told)
    assert any(f"(nfs4 at {home}) is on a network file system" in text for text in told)
    assert any("run.shared_fs = false" in text for text in told)


# Interfaces.

LO = Interface("lo", "127.0.0.1", up=True, loopback=True)
ETH = Interface("eth1", "10.0.0.2", up=True)
WLAN = Interface("wlan0", "192.168.1.2", up=True)
DOWN = Interface("eth2", "", up=False)
DOCKER = Interface("docker0", "172.17.0.1", up=True, internal=True)


def test_interfaces_of_a_machine(tmp_path):
    def card(name, flags, state):
        return {f"sys/class/net/{name}/flags": flags, f"sys/class/net/{name}/operstate": state}

    texts = card("lo", "0x9", "unknown") | card("eth1", "0x1003", "up") | card("eth2", "0x1003", "down")
    write(tmp_path, texts | card("docker0", "0x1003", "up") | card("lan", "0x1003", "up"))
    (tmp_path / "sys/class/net/lan/bridge").mkdir()
    (tmp_path / "sys/class/net/bonding_masters").write_text("")
    found = list_interfaces(tmp_path, {"lo": "127.0.0.1", "eth1": "10.0.0.2", "docker0": "172.17.0.1", "lan": ""}.get)
    by_name = {each.name: each for each in found}
    assert sorted(by_name) == ["docker0", "eth1", "eth2", "lan", "lo"]
    assert {name for name, each in by_name.items() if each.up} == {"lo", "eth1", "docker0", "lan"}
    assert {name for name, each in by_name.items() if each.internal} == {"docker0", "lan"}
    assert by_name["lo"].loopback
    assert list_interfaces(tmp_path / "nowhere") == []


def test_the_address_of_the_loopback_interface():
    assert interfaces.ipv4_address("lo") == "127.0.0.1"
    assert interfaces.ipv4_address("none at all") == ""


@pytest.mark.parametrize(
    ("present", "level", "words"),
    [
        ([LO, ETH], OK, "network: eth1 10.0.0.2"),
        ([LO, ETH, DOWN], OK, "eth2 no IPv4 address (down)"),
        ([LO, DOCKER, ETH], WARN, "export OMPI_MCA_btl_tcp_if_include=eth1"),
        ([ETH, WLAN], WARN, "export OMPI_MCA_btl_tcp_if_include=eth1"),
        ([LO, DOCKER], OK, "1 interface of containers"),
        ([LO], WARN, "no interface; none is up"),
        ([], WARN, "no interface; none is up"),
    ],
)
def test_choice_of_an_interface(present, level, words):
    (found,) = interface_findings(present, {})
    assert found.level == level
    assert words in str(found)


@pytest.mark.parametrize(
    ("value", "level"), [("eth1", OK), ("10.0.0.0/24", OK), ("eth7", FAIL), ("eth1,eth7", FAIL), ("eth1,wlan0", OK)]
)
def test_an_interface_that_was_chosen(value, level):
    (found,) = interface_findings([LO, ETH, WLAN, DOCKER], {"OMPI_MCA_btl_tcp_if_include": value})
    assert found.level == level
    assert f"OMPI_MCA_btl_tcp_if_include={value}" in found.what
    assert ("eth7" in str(found)) == (level == FAIL)


def test_an_interface_that_was_excluded():
    (found,) = interface_findings([LO, ETH, WLAN], {"OMPI_MCA_btl_tcp_if_exclude": "lo,docker0"})
    assert found.level == OK
