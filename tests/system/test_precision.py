"""`mpitrain sensitivity` as a user types it: the configuration that it writes trains, and sends what was promised."""

import json
import re
import sys
from collections import Counter

from mpitrain.config.plain import parse_toml
from mpitrain.errors import ExitCode, count
from tests.system.helpers import TINY, drive, execute, messages, rows, summary, train, write_config

LARGER = TINY.replace("hidden = [8]", "hidden = [64, 64]")
FAST = ["--steps", "1", "--samples", "2"]


def test_from_a_configuration_to_a_run(tmp_path):
    """Codecs of fixed size: what all ranks send in a step is known to the byte."""
    config, run = write_config(tmp_path, steps=2, text=LARGER)
    codecs = ["--codec", "int8", "--codec", "int4", "--codec", "int2"]
    wishes = ["-n", "3", "--ratio", "7", *codecs, *FAST, "--set", "exchange.segment_kb=1"]
    command = [sys.executable, "-m", "mpitrain", "sensitivity", config, *wishes]
    done = execute([*command, "--out", "new.toml", "--json", "found.json"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert messages(done) == []
    assert {path.name for path in tmp_path.iterdir()} == {"tiny.toml", "new.toml", "found.json"}, (
        "no run is left behind"
    )

    found = json.loads((tmp_path / "found.json").read_text())
    chosen = {record["tensor"]: record["codec"] for record in found if record["chosen"]}
    assert set(chosen.values()) > {"fp16"}
    payload = sum(record["payload_bytes"] for record in found if record["chosen"])
    values = sum(record["values"] for record in found if record["chosen"])
    assert values * 4 / payload >= 7
    for name, codec in chosen.items():
        assert re.search(rf"^ +{re.escape(name)} .* {codec} ", done.stdout, re.MULTILINE)

    trained = train(3, tmp_path / "new.toml")
    assert trained.returncode == 0, trained.stderr
    for codec, tensors in Counter(chosen.values()).items():
        assert f"{codec} for {count(tensors, 'tensor')}" in trained.stdout
    promised = int(re.search(r"with the rules: ([0-9,]+) bytes", done.stdout)[1].replace(",", ""))
    assert summary(run)["sent_bytes_total"] == 2 * promised
    assert len(rows(run)) == 2

    # From the weights of that run on, measured once: the rules are only printed. What travels otherwise is told.
    settings = ["--set", "train.init=run", "--steps", "0", "--samples", "1", "--ratio", "3.5", *codecs]
    settings += ["--set", "exchange.signal=preconditioned"]
    again = execute([*command[:5], *settings], cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert [line for line in messages(again) if "what is measured are gradients" in line]
    _, _, printed = again.stdout.partition("# append to ")
    rules = parse_toml(printed.partition("\n")[2])["exchange"]["rule"]
    assert {rule["match"] for rule in rules} <= {*chosen, "hidden.*.weight"}
    assert "± nan" not in again.stdout


def test_refusals(tmp_path):
    """Nothing is measured, or written, in vain."""
    config, _ = write_config(tmp_path, text=LARGER)
    (tmp_path / "mine.toml").write_text("mine")
    cases = {
        ("--out", "mine.toml"): "--out mine.toml is there already; replace it with --overwrite",
        ("--out", "/proc/new.toml"): "--out: cannot write /proc/new.toml",
        ("--ratio", "8", "--error", "0.1"): "--ratio and --error are different budgets",
        ("--loss-pct", "1", "--no-loss"): "--loss-pct needs the loss",
        ("--codec", "int9"): "did you mean int8?",
        ("-n", "3", "--set", "parallel.dp=2"): "start 2 ranks",
        ("--codec", "int8", *FAST): "take 6,496, which are 3.629 times less than float32",
        ("--set", 'exchange.rule=[{match = "*.no", codec = "int8"}]'): "fits no tensor",
        ("--set", "train.init=nowhere"): 'train.init = "nowhere" is not a run folder',
    }
    results = drive(tmp_path, [["sensitivity", str(config), *options] for options in cases], 1)
    for (result,), (options, words) in zip(results, cases.items(), strict=True):
        assert (result["code"], words in result["stderr"]) == (ExitCode.CONFIG, True), (options, result)
    assert (tmp_path / "mine.toml").read_text() == "mine"
