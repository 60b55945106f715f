"""``mpitrain validate``: the record of a configuration, its warnings and its refusals; U05."""

import tomllib

import pytest

from mpitrain.cli.validate import main
from mpitrain.config.load import load_config


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("[optim]\nlr = 1e-2\neps = 1e-6\n[model]\nkind = 'mlp'\nheads = 2\n[parallel]\ndp = 3\n")
    return path


def test_every_value_is_shown_with_its_source(config, capsys):
    """U05: the same key in the file and in --set."""
    assert main(config, ["optim.lr=1e-4"], None) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert "lr = 0.0001  # --set" in lines
    assert f"eps = 1e-06  # {config}" in lines
    assert "weight_decay = 0.01  # default" in lines
    assert out == load_config(config, ["optim.lr=1e-4"]).to_toml()
    assert tomllib.loads(out)["optim"]["lr"] == 1e-4
    assert err == 'mpitrain: warning: model.heads is set, but model.kind = "mlp" does not read it\n'


def test_no_variable_sets_a_key(config, capsys, monkeypatch):
    """U05: one that looks as if it did is warned about; the fault hook is none of these."""
    monkeypatch.setenv("MPITRAIN_OPTIM_LR", "7")
    monkeypatch.setenv("MPITRAIN_FAULT", "stop:step=1")
    assert main(config, ["model.kind=transformer"], None) == 0
    out, err = capsys.readouterr()
    assert "lr = 0.01" in out
    assert err.splitlines() == [
        "mpitrain: warning: MPITRAIN_OPTIM_LR is set, but nothing reads it: configuration comes from the file and --set"
    ]


@pytest.mark.parametrize(
    ("overrides", "ranks", "words"),
    [
        (["optim.learing_rate=1"], None, "did you mean optim.lr?"),
        (["exchange.codec=int9"], None, "exchange.codec: expected one of"),
        (["exchange.codec=raw", "exchange.memory=delta"], None, "exchange.memory"),
        ([], 4, "parallel: dp*pp*tp = 3*1*1 = 3, but 4 ranks run"),
        (["parallel.pp=2", "parallel.tp=2"], 3, "dp*pp*tp = 3*2*2 = 12, but 3 ranks run; start 12 ranks"),
        (["model.kind=transformer", "model.heads=6", "model.d_model=12", "parallel.tp=4"], None, "tp = 1, 2, 3 or 6"),
    ],
)
def test_refusals(config, capsys, overrides, ranks, words):
    assert main(config, overrides, ranks) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("mpitrain: ")
    assert words in err
    assert len(err.splitlines()) == 1


def test_ranks_that_go_with_it(config):
    assert main(config, [], 3) == 0
    assert main(config, ["parallel.pp=2"], 6) == 0
    assert main(config.parent / "missing.toml", [], None) == 2
