"""The page of all keys says what the schema says, and says it of every key."""

import typing
from pathlib import Path

import pytest

from mpitrain.config import schema
from mpitrain.config.reference import describe, meanings, readers, reference

PAGE = Path(__file__).resolve().parents[2] / "jobs" / "configs" / "reference.md"
SECTIONS = typing.get_type_hints(schema.Config) | {"exchange.rule": schema.RuleConfig}


def row_of(section, key):
    """Return the cells of a key."""
    title = "[[exchange.rule]]" if section == "exchange.rule" else f"[{section}]"
    part = reference().partition(f"## {title}\n")[2].partition("\n## ")[0]
    (row,) = [line for line in part.splitlines() if line.startswith(f"| `{key}` |")]
    return [cell.strip() for cell in row.strip("|").replace("\\|", "/").split(" | ")]


def test_the_page_in_the_repository_is_what_the_command_prints():
    assert PAGE.read_text(encoding="utf-8") == reference(), "run: mpitrain reference > jobs/configs/reference.md"


@pytest.mark.parametrize("section", SECTIONS)
def test_every_key_has_a_meaning_and_a_row(section):
    kind = SECTIONS[section]
    told = meanings(kind)
    for key in typing.get_type_hints(kind):
        assert told.get(key, "").endswith("."), f"{section}.{key} has no meaning in mpitrain/config/schema.py"
        name, value, default, meaning = row_of(section, key)
        assert name == f"`{key}`"
        assert value
        assert default
        assert meaning.startswith(told[key].replace("|", "/"))


@pytest.mark.parametrize(
    ("section", "key", "cells"),
    [
        ("optim", "kind", ['`"adamw"`, `"sgd"`', '`"adamw"`']),
        ("optim", "lr", ["number > 0", "`0.001`"]),
        ("optim", "beta1", ["number ≥ 0, < 1", "`0.9`"]),
        ("train", "steps", ["whole number ≥ 1", "`300`"]),
        ("model", "hidden", ["list of whole numbers ≥ 1", "`[128, 128]`"]),
        ("model", "d_ff", ["whole number ≥ 1", "left out"]),
        ("network", "max_message_mb", ["number ≥ 0.001, ≤ 2047", "`4.0`"]),
        ("run", "folder", ["text that is not empty", '`"runs/default"`']),
        ("run", "shared_fs", ["true, false", "`true`"]),
        ("exchange", "rule", ["list of tables, see below", "`[]`"]),
        ("exchange.rule", "match", ["text", "required"]),
        ("data", "skip_groups", ["list of whole numbers or text", "`[]`"]),
    ],
)
def test_values_and_defaults(section, key, cells):
    assert row_of(section, key)[1:3] == cells


def test_choices_that_read_a_key():
    assert readers("optim.beta1") == '`optim.kind = "adamw"`'
    assert readers("data.horizon") == '`model.task = "forecast"`'
    assert readers("optim.lr") == ""
    assert row_of("optim", "beta1")[3].endswith('Read with `optim.kind = "adamw"`.')
    assert describe(bool) == "true, false"


def test_precedence_and_environment_are_told():
    for words in ("wins over the file", "MPITRAIN_FAULT", "OMP_NUM_THREADS", "NUMBA_CACHE_DIR", "OMPI_MCA_"):
        assert words in reference()
