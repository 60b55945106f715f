"""Job scripts: what they ask for, what survives in them, and what is refused before anything is written."""

import json
import math
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpitrain.cli.launch import ring_remarks
from mpitrain.cli.main import app
from mpitrain.comm.family import MPICH
from mpitrain.comm.network import read_network
from mpitrain.comm.transport import eager_bytes
from mpitrain.config.load import load_config
from mpitrain.errors import ConfigError
from mpitrain.jobs import command, shell
from mpitrain.jobs.sweep import MAX_TASKS, points
from mpitrain.jobs.wall import Pace, check_wall, find_pace, format_time, parse_time, warning_s
from mpitrain.jobs.wishes import Scheduler, Wishes
from mpitrain.jobs.writer import Origin, write_job

ROOT = Path(__file__).resolve().parents[2]
NASTY = 'it\'s "a" $HOME `x` \\ & ü;\n* (1)'
MPIRUN = Scheduler.MPIRUN
MINIMAL = "[model]\nkind = 'mlp'\n"


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(MINIMAL)
    return path


def configuration(*overrides):
    return load_config(ROOT / "jobs" / "configs" / "quickstart.toml", list(overrides)).config


def written(config, *overrides, origin=None, **wishes):
    folder = config.parent
    origin = origin or Origin(
        folder, str(folder / "bin" / "python"), str(folder / "bin" / "mpirun"), command="mpitrain"
    )
    return write_job(config, list(overrides), Wishes(**wishes), origin)


def lines(job):
    return job.text.splitlines()


def topology(folder, *sites, name="net.toml"):
    """Write a star around the first site; every site is the text of its table."""
    text = "[defaults]\nrate_mbps = 100\ndelay_ms = 5\n"
    for number, site in enumerate(sites):
        text += f'[[site]]\nname = "s{number}"\n{site}\n'
    for number in range(1, len(sites)):
        text += f'[[link]]\nbetween = ["s0", "s{number}"]\n'
    path = folder / name
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 1800),
        ("1:30", 90),
        ("02:00:00", 7200),
        ("100:00:00", 360_000),
        ("1-0", 86_400),
        ("1-1:30", 91_800),
        ("2-03:04:05", 183_845),
    ],
)
def test_times_are_read_as_sbatch_reads_them(text, seconds):
    assert parse_time(text) == seconds


@given(st.integers(1, 10**8))
def test_times_are_written_as_they_are_read(seconds):
    assert parse_time(format_time(seconds)) == seconds


@pytest.mark.parametrize(
    "text", ["", "1h", "-5", "1:2:3:4", "1-", "²", "1.5", "9" * 30, "99999-0", " 5", "0", "0:00:00"]
)
def test_what_is_no_time(text):
    with pytest.raises(ConfigError, match="job: --time: "):
        parse_time(text)


def test_an_interval_that_does_not_fit():
    """60 s are kept to save and stop; 100 steps of 36.01 s do not fit into the 3,600 s before, those of 36 s do."""
    config = configuration()
    check_wall(config, 3660, 60, Pace(36.0, "--step-s"))
    with pytest.raises(ConfigError) as caught:
        check_wall(config, 3660, 60, Pace(36.01, "--step-s"))
    assert str(caught.value) == (
        "job: --time 01:01:00, less 60 s to save and stop, is 3600 s, shorter than the 100 steps of 36.01 s (--step-s) "
        "up to a checkpoint; set checkpoint.every = 99 or less, or give it 01:01:01 or more"
    )
    check_wall(config, 3660, 60, None)
    check_wall(configuration("checkpoint.every=0"), 3660, 60, Pace(1e6, "--step-s"))
    check_wall(configuration("checkpoint.every=1000", "train.steps=100"), 3660, 60, Pace(36.0, "--step-s"))


def test_a_limit_of_the_run_itself_counts_too():
    config = configuration("run.time_limit_s=110")
    check_wall(config, 7200, 60, Pace(1.0, "--step-s"))
    with pytest.raises(ConfigError, match=r"run\.time_limit_s = 110, less run\.time_margin_s, is 100 s, shorter than"):
        check_wall(config, 7200, 60, Pace(1.01, "--step-s"))


def test_a_wall_time_without_time():
    with pytest.raises(ConfigError, match=r"job: --time 00:01:00 leaves no time to train: 60 s .* more than 00:01:00"):
        check_wall(configuration(), 60, 60, None)


def test_a_step_that_no_wall_time_holds_has_one_remedy():
    with pytest.raises(ConfigError, match="up to a checkpoint; give it "):
        check_wall(configuration(), 120, 60, Pace(61.0, "--step-s"))


def test_the_warning_grows_with_the_step():
    config = configuration()
    assert warning_s(config, None) == 60
    assert warning_s(config, Pace(100.5, "")) == 302
    assert warning_s(configuration("run.time_limit_s=900", "run.time_margin_s=90"), None) == 90


def test_the_pace_of_an_earlier_run(tmp_path):
    """The median of its last 20 steps; nobody's word where it says nothing sound."""
    rows = [{"step_s": 50.0}] * 100 + [{"step_s": second} for second in (1.0,) * 9 + (3.0,) + (2.0,) * 10]
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert find_pace(None, tmp_path) == Pace(2.0, f"the median of the last steps in {metrics}")
    assert find_pace(0.5, tmp_path) == Pace(0.5, "--step-s")
    for text in ("", '{"step_s": 0.0}\n', '{"step_s": null}\n', '{"step": 1}\n', '{"step_s": 1.0'):
        metrics.write_text(text)
        assert find_pace(None, tmp_path) is None
    assert find_pace(None, tmp_path / "nowhere") is None


def test_points_of_a_sweep():
    """Each with each, the last key fastest."""
    assert points([]) == []
    assert points(["train.seed=0,1", "exchange.codec = int8, int4"]) == [
        ("train.seed=0", "exchange.codec=int8"),
        ("train.seed=0", "exchange.codec=int4"),
        ("train.seed=1", "exchange.codec=int8"),
        ("train.seed=1", "exchange.codec=int4"),
    ]
    assert len(points([f"train.seed={','.join(map(str, range(MAX_TASKS)))}"])) == MAX_TASKS


@pytest.mark.parametrize(
    ("sweeps", "words"),
    [
        (["train.seed"], "expected section.key=VALUE,VALUE"),
        (["train.seed=1,,2"], "expected section.key=VALUE,VALUE"),
        (["train.seed=1,1"], "given twice"),
        (["train.seed=1", "train.seed=2"], "given twice"),
        (["run.folder=a,b"], "leave run.folder out"),
        ([f"train.seed={','.join(map(str, range(40)))}", f"optim.lr={','.join(map(str, range(26)))}"], "1040 tasks"),
    ],
)
def test_sweeps_that_are_refused(sweeps, words):
    with pytest.raises(ConfigError, match="job: --sweep: ") as caught:
        points(sweeps)
    assert words in str(caught.value)


def test_a_point_that_is_no_configuration_is_refused(config):
    with pytest.raises(ConfigError, match=r"exchange\.codec: expected one of"):
        written(config, ranks=2, sweep=("exchange.codec=int8,int9",))


@pytest.mark.parametrize(
    ("overrides", "wishes", "directives"),
    [
        ([], {"ranks": 3}, {"nodes": "3", "ntasks-per-node": "1", "ntasks": "3"}),
        ([], {"ranks": 5, "per_node": 2}, {"nodes": "3", "ntasks-per-node": "2", "ntasks": "5"}),
        (["parallel.dp=3", "parallel.pp=2"], {}, {"nodes": "3", "ntasks-per-node": "2", "ntasks": "6"}),
        (
            ["parallel.dp=2", "parallel.pp=2", "exchange.when=server"],
            {},
            {"nodes": "3", "ntasks-per-node": "2", "ntasks": "6"},
        ),
        ([], {"ranks": 2, "time": "90"}, {"time": "01:30:00", "signal": "B:USR1@60"}),
        ([], {"ranks": 2, "step_s": 30.0}, {"time": "02:00:00", "signal": "B:USR1@90"}),
        ([], {"ranks": 2, "sweep": ("train.seed=0,1,2",)}, {"array": "0-2", "output": "mpitrain-run-%A-%a.log"}),
        ([], {"ranks": 2, "out": Path("a b/nasty 'n%j.sbatch")}, {"output": "mpitrain-nasty-n-j-%j.log"}),
    ],
)
def test_what_slurm_is_asked_for(config, overrides, wishes, directives):
    job = written(config, *overrides, **wishes)
    found = dict(
        line.removeprefix("#SBATCH --").partition("=")[::2] for line in lines(job) if line.startswith("#SBATCH")
    )
    assert directives.items() <= found.items()
    assert {"requeue": "", "open-mode": "append", "cpus-per-task": "1"}.items() <= found.items()
    first = next(number for number, line in enumerate(lines(job)) if not line.startswith("#"))
    assert not any(line.startswith("#SBATCH") for line in lines(job)[first:]), "sbatch does not read on"


def test_sites_with_different_slots(tmp_path, config):
    """Ranks are put on nodes one by one; the table says where the server is."""
    net = topology(tmp_path, "slots = 1", "slots = 0", "slots = 2", "slots = 3")
    job = written(config, "exchange.when=server", topology=net)
    assert "slots=(1 2 3)" in lines(job)
    assert "#SBATCH --nodes=3" in lines(job)
    assert "#SBATCH --ntasks-per-node=3" in lines(job)
    assert not any(line.startswith("#SBATCH --ntasks=") for line in lines(job))
    assert 'mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")' in lines(job)
    assert any(line.startswith('launch=("$mpirun" -n "$ranks" --host "$hosts"') for line in lines(job))
    assert any(line.split()[1:] == ["s3", "3", "3-5", "(5", "serves)"] for line in lines(job))


def test_sites_with_hosts(tmp_path, config):
    net = topology(tmp_path, 'host = "n7"', 'host = "n3"')
    job = written(config, topology=net)
    assert "#SBATCH --nodelist=n7,n3" in lines(job)
    assert "nodes=(n7 n3)" in lines(job)
    half = topology(tmp_path, 'host = "n7"', "")
    with pytest.raises(ConfigError, match="site s1 has no host, but others have; give one to all or to none"):
        written(config, topology=half)


def test_emulated_sites_need_no_address(tmp_path, config):
    """`launch --emulate` takes such a topology, too, and makes up all sites under their names."""
    half = topology(tmp_path, 'host = "n7"', "")
    job = written(config, topology=half, emulate=True, scheduler=MPIRUN)
    assert [line.split() for line in job.job.table()[1:]] == [["s0", "1", "0"], ["s1", "1", "1"]]
    assert "n7" not in job.text


@pytest.mark.parametrize("network", ["10.0.0.0/8", "fd00::/64"])
def test_a_network_instead_of_an_interface(config, network):
    text = written(config, ranks=2, interface=network, scheduler=MPIRUN).text
    assert f" --interface {network}" in text


def test_mpich_cannot_choose_nodes_under_slurm(tmp_path, config):
    """Tried: its launcher gives the slots of one node to another. Slurm itself can."""
    mpich = Origin(config.parent, "/p", "/m", family=MPICH, version=(5, 0), command="")
    net = topology(tmp_path, "", "slots = 2", "")
    with pytest.raises(ConfigError, match="job: MPICH's launcher fills Slurm's nodes .* add --launcher srun"):
        written(config, topology=net, origin=mpich)
    assert "srun --mpi=pmi2 " in written(config, topology=net, origin=mpich, srun=True).text
    assert written(config, topology=net, origin=mpich, scheduler=MPIRUN).job.ranks == 4


def test_transport_follows_the_topology(tmp_path, config):
    """100 Mbit/s and 10 ms from s1 over s0 to s2: 250,000 bytes a round trip; what is set already wins."""
    net = topology(tmp_path, "", "", "")
    text = written(config, topology=net, interface="eth7").text
    assert "250,000 bytes" in text
    for name, value in {"btl_tcp_eager_limit": eager_bytes(250_000), "btl_tcp_if_include": "eth7"}.items():
        assert f'export OMPI_MCA_{name}="${{OMPI_MCA_{name}:-{value}}}"' in text
    assert 'export PRTE_MCA_prte_if_include="${PRTE_MCA_prte_if_include:-eth7}"' in text
    assert "eager_limit" not in written(config, ranks=3).text
    assert "sndbuf" not in text, "a kernel that grants less would also stop growing them by itself"
    assert "rcvbuf" not in text
    folder = config.parent
    mpich = Origin(folder, "/p", "/m", family=MPICH, version=(4, 3), command="")
    text = written(config, topology=net, interface="eth7", origin=mpich).text
    assert "OMPI" not in text
    assert 'export HYDRA_IFACE="${HYDRA_IFACE:-eth7}"' in text
    assert 'launch=("$mpirun" -n "$ranks" -ppn 1)' in text


@pytest.mark.parametrize(
    ("overrides", "wishes", "message"),
    [
        ([], {}, "job: nothing says how many ranks; give -n, --topology, or parallel.dp"),
        (["parallel.dp=2", "parallel.pp=2"], {"ranks": 3}, r"parallel: dp\*pp\*tp = 2\*2\*1 = 4, but 3 ranks run"),
        (["exchange.when=server"], {"ranks": 1}, r"parallel: \(dp \+ exchange.servers\)\*pp\*tp"),
        ([], {"ranks": 4, "topology": True}, r"4 ranks, but 3 slots \(3 < 4\)"),
        ([], {"emulate": True, "ranks": 2}, "job: --emulate makes up the sites of a topology; add --topology"),
        ([], {"emulate": True, "topology": True}, "job: --emulate makes up hosts on one machine, not under Slurm"),
        ([], {"emulate": True, "topology": True, "scheduler": MPIRUN, "interface": "e"}, "job: --interface: emulated"),
        ([], {"ranks": 1, "scheduler": MPIRUN, "sweep": ("train.seed=1",)}, "job: --sweep makes an array of Slurm"),
        ([], {"ranks": 1, "scheduler": MPIRUN, "srun": True}, "job: --launcher srun is of Slurm"),
        ([], {"topology": True, "per_node": 2}, "job: --per-node and the slots of --topology"),
        ([], {"ranks": 2, "interface": "eth0; rm"}, "job: --interface: expected a name such as eth0, got "),
        ([], {"ranks": 2, "interface": "10.0.0.0/8"}, "job: --interface: expected a name such as eth0, got "),
        ([], {"ranks": 2, "interface": "x/8", "scheduler": MPIRUN}, "expected a name such as eth0 or a network such"),
        ([], {"ranks": 2, "variables": ("A B=1",)}, "job: --env: expected NAME=VALUE"),
        ([], {"ranks": 2, "variables": ("A",)}, "job: --env: expected NAME=VALUE"),
        ([], {"ranks": 2, "time": "1"}, "job: --time 00:01:00 leaves no time to train"),
        ([], {"ranks": 2, "time": "10", "step_s": 7.0}, "job: --time 00:10:00, less 60 s .* set checkpoint.every = 77"),
        ([], {"ranks": 2, "time": "10", "step_s": 0.0}, "job: --step-s: expected more than 0"),
        ([], {"ranks": 2, "time": "10", "step_s": math.nan}, "job: --step-s: expected more than 0"),
    ],
)
def test_refusals(tmp_path, config, overrides, wishes, message):
    if wishes.get("topology"):
        wishes = wishes | {"topology": topology(tmp_path, "", "", "")}
    with pytest.raises(ConfigError, match=message) as caught:
        written(config, *overrides, **wishes)
    assert "\n" not in str(caught.value)


CHAIN = "[defaults]\nrate_mbps = 100\ndelay_ms = 5\n" + "".join(
    [f'[[site]]\nname = "{name}"\n' for name in "abcd"]
    + [f'[[link]]\nbetween = ["{one}", "{other}"]\n' for one, other in ("ca", "ad", "db")]
)


def test_a_better_order_of_a_ring_is_noted(tmp_path, config):
    """By the job, and by launch beside its table; other collectives do not go around."""
    net = tmp_path / "net.toml"
    net.write_text(CHAIN)
    (note,) = written(config, "exchange.collective=ring", topology=net, step_s=1.0).notes
    assert note.endswith("takes 40 ms; with the sites in the order b, d, a, c, 30 ms")
    assert not written(config, topology=net, step_s=1.0).notes
    assert ring_remarks(config, ["exchange.collective=ring"], read_network(net), 4) == [f"# note: {note}"]
    assert ring_remarks(config, [], read_network(net), 4) == []
    assert ring_remarks(config, ["exchange.collective=ring"], read_network(), 4) == []


def test_an_unknown_pace_is_said(config):
    (note,) = written(config, ranks=2).notes
    assert note.startswith("how long a step takes is not known")
    assert not written(config, ranks=2, step_s=1.0).notes
    assert not written(config, "checkpoint.every=0", ranks=2).notes
    assert not written(config, ranks=2, scheduler=MPIRUN).notes


def test_paths_below_the_folder_are_relative(tmp_path, config):
    """So that a project can be moved, or seen elsewhere by the nodes; a script finds the folder from its own."""
    elsewhere = Origin(tmp_path / "other", "/usr/bin/python3", str(tmp_path / "other" / "mpirun"), command="")
    text = written(config, ranks=2, origin=elsewhere).text
    assert f"\nconfig={config}\npython=/usr/bin/python3\nmpirun=./mpirun\n" in text
    assert "\nconfig=run.toml\npython=bin/python\nmpirun=bin/mpirun\n" in written(config, ranks=2).text
    for out, folder in (("a/b/s.sh", '"$(dirname -- "$0")/../.."'), ("s.sh", '"$(dirname -- "$0")"')):
        text = written(config, ranks=2, scheduler=MPIRUN, out=tmp_path / out).text
        assert f"cd -- {folder} || exit" in text
    for out in (None, Path("/elsewhere/s.sh")):
        assert f"cd -- {tmp_path} || exit" in written(config, ranks=2, scheduler=MPIRUN, out=out).text


@given(st.text(st.characters(blacklist_characters="\0", blacklist_categories=["Cs"]), max_size=30))
def test_any_text_survives_the_shell(text):
    command = f"printf '%s\\0' {shell.quote(text)}"
    words = subprocess.run(["bash", "-c", command], capture_output=True, check=True)
    assert words.stdout.decode() == text + "\0"


def tools(folder, recorder):
    """Make stand-ins that write down their arguments and one variable, and end well."""
    folder.mkdir(parents=True)
    for name in ("mpirun", "python", "srun", "scontrol"):
        stub = folder / name
        answer = "echo n1; echo n2; echo n3; echo n4; exit" if name == "scontrol" else ""
        stub.write_text(f'#!/bin/bash\n{answer}\nprintf "%s\\0" "$FOO" "$0" "$@" >"{recorder}-{name}"\n')
        stub.chmod(0o755)


def check_script(path):
    subprocess.run(["bash", "-n", path], check=True)
    if shutil.which("shellcheck"):
        found = subprocess.run(["shellcheck", path], capture_output=True, text=True, check=False)
        assert found.returncode == 0, found.stdout


@pytest.mark.parametrize("srun", [False, True])
@pytest.mark.parametrize("sweep", [(), ("optim.lr=1e-3,2e-3",)])
@pytest.mark.parametrize("sites", [(), ("", "slots = 2", "")])
def test_spaces_and_quotes_survive_slurm(tmp_path, srun, sweep, sites):
    """Whatever paths, settings and variables hold, the launcher gets it; shellcheck finds nothing."""
    folder = tmp_path / NASTY
    record = tmp_path / "record"
    tools(folder / "b in", record)
    config = folder / "-c'o\"n fig.toml"
    config.write_text(MINIMAL)
    origin = Origin(folder, str(folder / "b in/python"), str(folder / "b in/mpirun"), command=f"mpitrain {NASTY}")
    value = "a 'b$c\" \\"
    job = written(
        config,
        f"data.path={value}",
        origin=origin,
        topology=topology(folder, *sites, name="t o'p.toml") if sites else None,
        ranks=None if sites else 3,
        variables=(f"FOO={value}",),
        sweep=sweep,
        srun=srun,
    )
    script = folder / "s.sbatch"
    script.write_text(job.text)
    check_script(script)
    environment = {"PATH": f"{folder / 'b in'}:/usr/bin:/bin", "SLURM_SUBMIT_DIR": str(folder), "SLURM_NTASKS": "3"}
    environment |= {"SLURM_JOB_NODELIST": "n[1-4]", "SLURM_JOB_NUM_NODES": "3", "SLURM_ARRAY_TASK_ID": "1"}
    command = ["bash", script, "--set", f"train.init={value}"]
    result = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    got = (tmp_path / f"record-{'srun' if srun else 'mpirun'}").read_text().split("\0")[:-1]
    ranks = "4" if sites else "3"
    assert got[0] == value
    assert ("--ntasks=" + ranks if srun else ranks) in got
    after = got[got.index("b in/python") + 1 :]
    point = ["--set", "optim.lr=2e-3", "--set", 'run.folder="runs/default/task-1"'] if sweep else []
    assert after == [
        *("-m", "mpitrain", "train", "./-c'o\"n fig.toml", "--resume", "auto"),
        *("--set", f"data.path={value}", "--set", f"train.init={value}", *point),
    ]
    assert srun or got[got.index("FOO") - 1 : got.index("FOO") + 1] == ["-x", "FOO"]
    if sites and not srun:
        assert got[got.index("--host") + 1] == "n1:1,n2:2,n3:1"


def test_spaces_and_quotes_survive_workstation(tmp_path):
    folder = tmp_path / NASTY
    record = tmp_path / "record"
    tools(folder / "b in", record)
    config = folder / "-c'o\"n fig.toml"
    config.write_text(MINIMAL)
    net = topology(folder, "", "", name="t o'p.toml")
    origin = Origin(folder, str(folder / "b in/python"), "", command="")
    value = "a 'b$c\" \\"
    wishes = {"topology": net, "emulate": True, "variables": (f"FOO={value}",), "time": "30"}
    script = folder / "jo bs" / "s.sh"
    script.parent.mkdir()
    script.write_text(written(config, origin=origin, scheduler=MPIRUN, out=script, **wishes).text)
    check_script(script)
    subprocess.run(["bash", script, "--set", f"data.path={value}"], env={"PATH": "/usr/bin:/bin"}, check=True)
    got = [word for word in (tmp_path / "record-python").read_text().split("\0")[2:-1] if word != "--allow-root"]
    assert got == [
        *("-m", "mpitrain", "launch", "./-c'o\"n fig.toml", "-n", "2", "--resume", "auto", "--topology", "t o'p.toml"),
        *("--emulate", "--env", f"FOO={value}", "--set", "run.time_limit_s=1800", "--set", f"data.path={value}"),
    ]


SHIPPED = [path for path in sorted((ROOT / "jobs").glob("*.s*")) if "mpitrain job" in path.read_text()]


def test_some_are_shipped():
    names = {path.stem for path in SHIPPED}
    assert names >= {"workstation", "emulated", "star", "ring", "chain", "tree", "hybrid", "sweep", "srun"}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_shipped_scripts_are_what_the_command_in_them_writes(path, monkeypatch):
    """And can be started, and pass shellcheck."""
    text = path.read_text()
    check_script(path)
    assert path.stat().st_mode & 0o111
    (line,) = [line for line in text.splitlines() if line.startswith("#     mpitrain job ")]
    words = shlex.split(line.removeprefix("#"))
    found = []
    origin = Origin(ROOT, str(ROOT / ".venv/bin/python"), str(ROOT / ".venv/bin/mpirun"), command=shlex.join(words))
    monkeypatch.setattr(command, "_origin", lambda: origin)
    monkeypatch.setattr(command, "_write", lambda out, text, overwrite: found.append((out, text)))
    monkeypatch.chdir(ROOT)
    assert app(words[1:], standalone_mode=False) == 0
    assert found == [(path.relative_to(ROOT), text)]


def test_another_file_is_not_replaced(tmp_path):
    path = tmp_path / "folder" / "s.sh"
    for _ in range(2):
        command._write(path, "one", overwrite=False)
    assert path.stat().st_mode & 0o777 == 0o755
    with pytest.raises(ConfigError, match=r"job: --out .* is there already; replace it with --overwrite"):
        command._write(path, "two", overwrite=False)
    assert path.read_text() == "one"
    command._write(path, "two", overwrite=True)
    assert path.read_text() == "two"
    assert [each.name for each in path.parent.iterdir()] == ["s.sh"]
    with pytest.raises(ConfigError, match="job: --out .*: Is a directory"):
        command._write(path.parent, "two", overwrite=True)
    assert len(list(tmp_path.iterdir())) == 1
    with pytest.raises(ConfigError, match="job: --out .*: File exists; name another file"):
        command._write(path / "below", "two", overwrite=False)


@pytest.mark.parametrize(
    ("variables", "ranks"),
    [
        ({"SLURM_NTASKS": "3", "SLURM_JOB_NUM_NODES": "3", "SLURM_NTASKS_PER_NODE": "1"}, "3"),
        ({"SLURM_NNODES": "2", "SLURM_NTASKS_PER_NODE": "2"}, "4"),
        ({"SLURM_NTASKS": "5", "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS_PER_NODE": "2"}, None),
        ({"SLURM_NTASKS": "5", "SLURM_JOB_NUM_NODES": "2"}, "5"),
    ],
)
def test_ranks_follow_the_allocation(tmp_path, config, variables, ranks):
    """S05: also where tasks are only known by node; more ranks than slots are refused before anything starts."""
    tools(tmp_path / "bin", tmp_path / "record")
    script = tmp_path / "s.sbatch"
    script.write_text(written(config, ranks=3).text)
    environment = {"PATH": "/usr/bin:/bin", "SLURM_SUBMIT_DIR": str(tmp_path)} | variables
    result = subprocess.run(["bash", script], env=environment, capture_output=True, text=True, check=False)
    if ranks is None:
        assert result.returncode == 5
        assert result.stderr.startswith("5 ranks, but 4 slots: ask for more")
        assert not (tmp_path / "record-mpirun").exists()
    else:
        assert result.returncode == 0, result.stderr
        got = (tmp_path / "record-mpirun").read_text().split("\0")
        assert got[got.index("-n") + 1] == ranks


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        (lambda folder: (folder / "run.toml").unlink(), 2, "there is no run.toml; submit this from the folder"),
        (lambda folder: (folder / "bin/mpirun").unlink(), 2, "there is no bin/mpirun; submit this"),
        (lambda folder: None, 5, "there is no interface nope0 on "),
    ],
)
def test_what_a_script_refuses(tmp_path, config, change, code, words):
    """M19: the interface is looked for on the node, and those that exist are listed."""
    tools(tmp_path / "bin", tmp_path / "record")
    script = tmp_path / "s.sbatch"
    script.write_text(written(config, ranks=3, interface="nope0").text)
    change(tmp_path)
    environment = {"PATH": "/usr/bin:/bin", "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_NTASKS": "3"}
    result = subprocess.run(["bash", script], env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == code
    assert result.stderr.startswith(words)
    assert code != 5 or "/sys/class/net/lo" in result.stderr
    assert not (tmp_path / "record-mpirun").exists()


def test_srun_without_its_plugin(tmp_path, config):
    """A plugin that is listed may lack its library: it is tried."""
    tools(tmp_path / "bin", tmp_path / "record")
    (tmp_path / "bin" / "srun").write_text('#!/bin/bash\n[ "$1" = --mpi=pmix ] && exit 1\ntouch started\n')
    script = tmp_path / "s.sbatch"
    script.write_text(written(config, ranks=3, srun=True).text)
    environment = {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin", "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_NTASKS": "3"}
    result = subprocess.run(["bash", script], env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 5
    assert result.stderr.startswith("Slurm cannot start MPI here (srun --mpi=pmix): every process would train alone")
    assert not (tmp_path / "started").exists()
