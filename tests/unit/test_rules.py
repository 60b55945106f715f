import pytest

from mpitrain.config.load import resolve
from mpitrain.config.schema import ExchangeConfig, RuleConfig
from mpitrain.errors import ConfigError
from mpitrain.train.exchange import check_rules
from mpitrain.train.runfolder import RunFolder


def test_a_rule_for_no_tensor_is_refused():
    names = ["head.weight", "norm.gain"]
    check_rules(names, ExchangeConfig(rule=(RuleConfig(match="*.gain", codec="raw"),)))
    with pytest.raises(ConfigError, match=r"match = '\*.gian' fits no tensor; the model has head.weight, norm.gain"):
        check_rules(names, ExchangeConfig(rule=(RuleConfig(match="*.gian", codec="raw"),)))


def test_a_rule_may_need_the_memory_that_a_raw_codec_does_not():
    tree = {"exchange": {"codec": "raw", "rule": [{"match": "head.*", "codec": "int8"}]}}
    assert resolve(tree, "test", []).config.exchange.memory == "residual"
    assert resolve(tree, "test", ["exchange.memory=delta"]).config.exchange.memory == "delta"
    with pytest.raises(ConfigError, match="no error to remember"):
        resolve({"exchange": {"codec": "raw"}}, "test", ["exchange.memory=delta"])


def test_resume_and_overwrite_contradict_each_other(tmp_path):
    with pytest.raises(ConfigError, match="give one of them"):
        RunFolder(tmp_path).check_free(resume=True, overwrite=True)
