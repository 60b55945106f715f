"""`mpitrain bench step` as a user types it, where torch is not installed: it says so, and measures our steps alone."""

import json
import sys

from tests.system.helpers import environment_without, execute

TINY = ["model.layers=1", "model.d_model=8", "model.d_ff=16", "data.window=4", "data.samples=60", "data.test_samples=8"]


def test_without_torch(tmp_path):
    settings = [part for setting in TINY for part in ("--set", setting)]
    cells = ["--cell", "raw", "--cell", "int8", "--rounds", "1", "--steps", "2", "--json", "records.json"]
    command = [sys.executable, "-m", "mpitrain", "bench", "step", "-n", "2", *settings, *cells]
    done = execute(command, cwd=tmp_path, env=environment_without(tmp_path, "torch"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("pip install torch==2.13.0") == 1
    assert "torch cannot be imported on rank 0 (torch is blocked by a test)" in done.stdout
    records = json.loads((tmp_path / "records.json").read_text())
    assert [record["layout"] for record in records] == ["dp=2 direct raw", "dp=2 direct int8"]
    for record in records:
        assert record["ms"] > 0
        assert record["exposed_ms"] == record["ms"] - record["alone_ms"]
        assert record["peer"] is record["peer_ms"] is None
    assert records[0]["sent_bytes"] > 1.8 * records[1]["sent_bytes"]
    assert {path.name for path in tmp_path.iterdir()} == {"records.json", "stub"}, "a bench leaves no run behind"
