"""The page of a topology's keys says what the schema and the table of profiles say, and says it of every key."""

import typing
from pathlib import Path

import pytest
import typer

from mpitrain.cli.main import Page
from mpitrain.cli.main import reference as command
from mpitrain.config.reference import meanings
from mpitrain.config.reference import reference as config_reference
from mpitrain.topology.profiles import PROFILES
from mpitrain.topology.reference import reference
from mpitrain.topology.schema import LinkKeys, LinkTable, SiteTable, TopologyTable
from mpitrain.topology.unknown import ALIASES

PAGE = Path(__file__).resolve().parents[2] / "jobs" / "topologies" / "reference.md"
TABLES = {"Top level": TopologyTable, "[[site]]": SiteTable, "[[link]]": LinkTable}


def rows(title):
    part = reference().partition(f"## {title}\n")[2].partition("\n## ")[0]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in part.splitlines() if line[:1] == "|"]
    return {name.strip("`"): rest for name, *rest in cells[2:]}


def test_the_page_in_the_repository_is_what_the_command_prints():
    told = "run: mpitrain reference topology > jobs/topologies/reference.md"
    assert PAGE.read_text(encoding="utf-8") == reference(), told


@pytest.mark.parametrize(("page", "text"), [(Page.CONFIG, config_reference()), (Page.TOPOLOGY, reference())])
def test_the_command_prints_either_page(page, text, capsys):
    with pytest.raises(typer.Exit) as caught:
        command(page)
    assert caught.value.exit_code == 0
    assert capsys.readouterr().out == text


@pytest.mark.parametrize("title", TABLES)
def test_every_key_has_a_meaning_and_a_row(title):
    kind = TABLES[title]
    told, found = meanings(kind), rows(title)
    assert set(found) == set(typing.get_type_hints(kind)) == set(told)
    for key, (value, default, meaning) in found.items():
        assert value
        assert default
        assert meaning == told[key]
        assert meaning.endswith(".")


def test_values_and_defaults():
    assert rows("[[site]]")["slots"][:2] == ["whole number ≥ 0, ≤ 4096", "`1`"]
    assert rows("[[link]]")["rate_mbps"][:2] == ["number ≥ 0.001, ≤ 1e+06", "left out"]
    assert rows("[[link]]")["outages_s"][0] == "list of lists of numbers ≥ 0"
    assert next(iter(rows("[[link]]"))) == "between"
    assert rows("Top level")["site"][1] == "required"


def test_every_profile_has_a_row():
    assert list(rows("Profiles")) == list(PROFILES)
    assert rows("Profiles")["leo-highway"][:4] == ["218.3, 395", "14.9, 32.7", "5.222, 0.709, 0.752", "0.9%, 3.8 s"]
    assert rows("Profiles")["private-5g-edge"] == ["", "", "", "", "14.4", "1.9", "0", "DETERMINISTIC6G"]


def test_names_of_other_programs_lead_to_keys():
    keys = set(typing.get_type_hints(LinkTable)) | set(typing.get_type_hints(SiteTable)) | {"[[site]]", "[[link]]"}
    for word, meant in ALIASES.items():
        assert word not in typing.get_type_hints(LinkKeys)
        assert all(name in keys for name in meant.partition(",")[0].split(" or "))
