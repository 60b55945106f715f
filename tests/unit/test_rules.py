from contextlib import nullcontext

import numpy as np
import pytest

from mpitrain.codecs.memory import Delta
from mpitrain.codecs.registry import CODECS, make_codec
from mpitrain.config.codec_names import KINDS, rounds_at_random
from mpitrain.config.load import resolve
from mpitrain.config.schema import ExchangeConfig, RuleConfig
from mpitrain.errors import ConfigError
from mpitrain.train.buckets import check_rules
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


def test_the_configuration_knows_the_codecs():
    """Names and abilities in config/ are those of codecs/, which lies above it."""
    assert set(CODECS) == set(KINDS)
    for name in CODECS:
        with nullcontext() if rounds_at_random(name) else pytest.raises(ConfigError):
            make_codec(name, stochastic=True)


def test_resume_and_overwrite_contradict_each_other(tmp_path):
    with pytest.raises(ConfigError, match="give one of them"):
        RunFolder(tmp_path).check_free(resume="newest", overwrite=True)


def test_a_wire_that_is_too_short_is_refused():
    for name in CODECS:
        codec, x = make_codec(name), np.ones(300, np.float32)
        with pytest.raises(ValueError, match="or more, got"):
            codec.encode(x, np.zeros(codec.max_nbytes(300) - 1, np.uint8))


@pytest.mark.parametrize("name", ["int8", "int4", "fp16"])
def test_delta_forgets_what_overflows(name):
    """Beside the largest float32 a prediction may overflow; the step is rejected, and the next ones are not."""
    memory, largest = Delta(make_codec(name), 4), np.finfo(np.float32).max
    wire, rejected = np.zeros(memory.max_nbytes(4), np.uint8), []
    for value in (3e38, largest, 1, 1):
        bad = memory.encode(np.full(4, value, np.float32), wire, None, key=0, first=0)[1]
        rejected.append(bad > 0)
        (memory.rollback if bad else memory.commit)()
        assert np.isfinite(memory.reference.current).all()
    assert rejected[2:] == [False, False]
