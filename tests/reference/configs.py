"""Short ways to a configuration, and to what is said where it is refused."""

import tomllib

import pytest

from mpitrain.config.load import resolve
from mpitrain.errors import ConfigError, ExitCode


def from_text(text, *overrides):
    return resolve(tomllib.loads(text), "run.toml", list(overrides))


def config_of(*overrides):
    return resolve({}, "run.toml", list(overrides)).config


def message_of(*overrides, text=""):
    with pytest.raises(ConfigError) as caught:
        from_text(text, *overrides)
    assert caught.value.exit_code == ExitCode.CONFIG == 2
    assert "\n" not in str(caught.value)
    return str(caught.value)
