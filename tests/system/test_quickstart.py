"""The quickstart as a newcomer types it, up to the table at its end; only the installation is left out."""

import re
import shlex
import shutil
import sys

from tests.system.helpers import ROOT, execute, summary

COMMAND = """#!/bin/sh
printf '%s\\n' "$*" >>calls
exec {python} -m mpitrain "$@"
"""

NAMES = ("quickstart", "quickstart-raw")
TINY = ["model.kind=mlp", "model.hidden=[8]", "data.samples=80", "data.test_samples=10", "train.eval_every=0"]


def test_the_quickstart_compares_two_trainings(tmp_path):
    """Arguments reach both trainings, which differ in what travels alone; what the table says are their summaries."""
    shutil.copytree(ROOT / "jobs", tmp_path / "jobs")
    (tmp_path / "jobs" / "install.sh").write_text("")
    program = tmp_path / ".venv" / "bin" / "mpitrain"
    program.parent.mkdir(parents=True)
    program.write_text(COMMAND.format(python=shlex.quote(sys.executable)))
    program.chmod(0o755)
    settings = ["train.steps=2", "exchange.memory=delta", *TINY]
    options = [part for setting in settings for part in ("--set", setting)]
    done = execute(["bash", tmp_path / "jobs" / "quickstart.sh", "--ranks", "2", *options], cwd=tmp_path.parent)
    assert done.returncode == 0, done.stderr

    calls = (tmp_path / "calls").read_text().splitlines()
    assert [call.split()[0] for call in calls] == ["launch", "launch", "report"]
    assert all("--set train.steps=2" in call for call in calls[:2])
    raw, small = (summary(tmp_path / "runs" / name) for name in reversed(NAMES))
    assert [one[key] for one in (raw, small) for key in ("codec", "memory")] == ["raw", "none", "int8", "delta"]
    assert [one[key] for one in (raw, small) for key in ("steps", "ranks")] == [2, 2, 2, 2]

    table = done.stdout[done.stdout.rindex("run  ") :].splitlines()
    for line, name, what, told in zip(table[1:3], NAMES, ("int8+delta", "raw float32"), (small, raw), strict=True):
        assert line.startswith(name)
        result, sent = f"{told['metric']['value']:.4f}", f"{told['sent_bytes_total'] / 1000:.1f} kB"
        assert line.removeprefix(name).strip().startswith(what)
        assert [result, sent] == re.findall(r"0\.\d{4}|[\d.]+ kB", line)
    assert max(map(len, table[:3])) <= 80
    assert done.stdout.endswith("report: runs/quickstart/report.html\n")
    page = (tmp_path / "runs" / "quickstart" / "report.html").read_text(encoding="utf-8")
    assert "&quot;delta&quot;" in page, "among the settings that differ"
