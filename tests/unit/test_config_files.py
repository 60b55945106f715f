"""Configurations from files, whatever is in them."""

from pathlib import Path

import pytest

from mpitrain.config.load import load_config
from mpitrain.errors import ConfigError
from tests.reference.configs import message_of


def test_a_file_is_read(tmp_path):
    path = tmp_path / "grün.toml"
    path.write_text('[run]\nfolder = "läufe"\n', encoding="utf-8")
    resolved = load_config(path, ["train.steps=2"])
    assert (resolved.config.run.folder, resolved.config.train.steps) == ("läufe", 2)
    assert resolved.sources["run.folder"] == str(path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"[train\nsteps = 1", "is not TOML"),
        (b"[train]\nsteps = 1\nsteps = 2\n", "is not TOML"),
        (b"[train]\n[train]\n", "is not TOML"),
        (b"steps: 1\n", "is not TOML"),
        (b"\xff\xfe[\x00", "cannot read"),
        (b"[run]\nfolder = '\xe9'\n", "cannot read"),
        (None, "cannot read"),
        ("folder", "cannot read"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, content, reason):
    path = tmp_path / "run.toml"
    if content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=reason) as caught:
        load_config(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


DIGITS, BRACKETS = "1" * 5000, "[" * 5000 + "]" * 5000


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (DIGITS, "too many digits"),
        ("0x" + "f" * 5000, "at most 63 bits and a sign, got 20000"),
        (str(2**63), "at most 63 bits and a sign, got 64"),
        (str(-(2**63) - 1), "at most 63 bits and a sign"),
        (f'"{DIGITS}"', "out of range, got '111"),
        (DIGITS + ".0", "expected int"),
        (BRACKETS, "nested too deeply"),
        ("[" * 300 + "]" * 300, "nested too deeply"),
        ("{a = " * 500 + "1" + "}" * 500, "nested too deeply"),
        ("[" * 20 + "]" * 20, "nested too deeply"),
        ("2020-13-41", "expected int"),
        ('"' + "k" * 10**5 + '"', "… (100,002 characters)"),
        ('"a\\u0000b"', "NUL"),
    ],
)
def test_values_without_end(value, reason):
    """No traceback, no page of digits: from the file and from --set."""
    message = message_of(f"train.steps={value}")
    assert message.startswith("--set: train")
    assert reason in message
    assert len(message) < 300


@pytest.mark.parametrize(
    "content",
    [
        f"[train]\nsteps = {DIGITS}",
        f"[train]\nsteps = 0x{'f' * 5000}",
        f"[train]\nsteps = {BRACKETS}",
        f"[train]\nsteps = {'[' * 10**5}",
        f"a{'.a' * 5000} = 1",
        f"[{'a.' * 5000}a]\nb = 1",
        f"[train]\n{'k' * 10**5} = 1",
        '[run]\nfolder = "a\\u0000b"',
        '[train]\n"a\\nb" = 1',
        '["a\\nb"]\nc = 1',
    ],
    ids=range(10),
)
def test_files_without_end(tmp_path, content):
    path = tmp_path / "a\nb.toml"
    path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("text", ["a\0b", "a\udcffb"])
def test_text_that_no_file_system_or_terminal_takes(text):
    """Bytes of a command line that are no UTF-8 arrive as surrogates."""
    for override in (f"run.folder={text}", f"run.{text}=1", f"{text}.folder=1", f"optim.lr={text}"):
        message = message_of(override)
        assert message.startswith("--set: ")
        assert "expected text without NUL" in message or "expected UTF-8" in message
    with pytest.raises(ConfigError, match=r"cannot read .*a\?b"):
        load_config(Path(f"/nowhere/{text}"))
