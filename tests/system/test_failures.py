"""What happens when a rank raises, dies, or sees NaN: everyone ends, or everyone goes on alike."""

import re

from mpitrain.errors import ExitCode
from tests.system.helpers import gone, messages, rows, summary, train, write_config


def test_one_rank_raises(tmp_path):
    """M01: 4 ranks, rank 2 raises at step 3."""
    config, run = write_config(tmp_path)
    result = train(4, config, fault="raise:rank=2,step=3,message=broken on purpose")
    assert result.returncode == ExitCode.INTERNAL, result.stderr
    assert gone(str(config), 15)
    assert result.stderr.count("Traceback (most recent call last)") == 1
    assert "mpitrain: rank 2, step 3: " in result.stderr
    assert result.stderr.count("broken on purpose") == 1
    assert not (run / "summary.json").exists()


def test_no_summary_without_everyone(tmp_path):
    """M03: a rank that fails after the last step fails the run; the same run without the fault is complete."""
    config, run = write_config(tmp_path, steps=2)
    result = train(2, config, fault="raise_end:rank=1")
    assert result.returncode == ExitCode.INTERNAL
    assert "rank 1, step 2" in result.stderr
    assert not (run / "summary.json").exists()
    result = train(2, config, "--overwrite")
    assert result.returncode == 0, result.stderr
    assert summary(run)["steps"] == 2
    assert summary(run)["replicas_identical"] is True
    assert len(rows(run)) == 2


def test_nonfinite_gradients_are_skipped_everywhere(tmp_path):
    """C03: NaN on rank 1 at step 4, infinity on rank 2 at step 6."""
    config, run = write_config(tmp_path, steps=8)
    result = train(3, config, "--set", "exchange.codec=int8", fault="nan:rank=1,step=4;inf:rank=2,step=6")
    assert result.returncode == 0, result.stderr
    assert [row["skipped"] for row in rows(run)] == [0, 0, 0, 1, 1, 2, 2, 2]
    assert [row["step"] for row in rows(run) if row["grad_norm"] is None] == [4, 6]
    assert summary(run)["replicas_identical"] is True
    assert all(0 <= row["loss"] < 1e6 for row in rows(run))
    warnings = messages(result)
    assert len(warnings) == 2, warnings
    assert re.match(r"mpitrain: rank 1: step 4 skipped on all ranks: the gradient of \S+ is not finite", warnings[0])
    assert re.match(r"mpitrain: rank 2: step 6 skipped on all ranks: the gradient of \S+ is not finite", warnings[1])


def test_too_many_skips(tmp_path):
    """The run counts as diverged, with its own code, and names a tensor."""
    config, run = write_config(tmp_path)
    tensor = "hidden.0.weight"
    result = train(2, config, "--set", "train.max_skips=1", fault=f"nan:rank=1,tensor={tensor}")
    assert result.returncode == ExitCode.DIVERGED
    assert not (run / "summary.json").exists()
    last = messages(result)[-1]
    assert "2 steps in a row had gradients that are not finite" in last
    assert any(tensor in line for line in messages(result)), result.stderr
