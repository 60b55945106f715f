"""Tables of benchmarks: nothing is cut, however narrow the terminal is."""

import json
import os
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpitrain.bench import records
from mpitrain.bench.records import GAP, MARGIN, WIDTH, fold, show

ROWS = [
    {"codec": name, "source": "gaussian", **{f"some_number_{index}": 1000 * index + row for index in range(20)}}
    for row, name in enumerate(["int8:residual", "[bold]"])
]


@given(st.lists(st.integers(1, 60), min_size=1, max_size=20), st.integers(0, 5), st.integers(1, 200))
def test_columns_are_divided_and_none_is_lost(widths, labels, room):
    columns = {f"c{index}": width for index, width in enumerate(widths)}
    names = list(columns)
    repeated = names[:labels]
    parts = fold(columns, repeated, room)
    assert list(dict.fromkeys(name for part in parts for name in part)) == names
    for part in parts:
        assert part[0] == "c0"
        own = [name for name in part if name not in repeated and name != "c0"]
        size = MARGIN + sum(columns[name] + GAP for name in part)
        assert size <= room or len(own) <= 1


def test_what_fits_is_one_table():
    assert fold({"a": 10, "b": 20, "c": 30}, ["a"], MARGIN + 60 + 3 * GAP) == [["a", "b", "c"]]
    assert fold({"a": 10, "b": 20, "c": 30}, ["a"], MARGIN + 59 + 3 * GAP) == [["a", "b"], ["a", "c"]]


@pytest.mark.parametrize(("terminal", "columns", "most"), [(True, 60, 60), (True, 200, 200), (False, 60, WIDTH)])
def test_no_line_is_wider_than_the_terminal(monkeypatch, capsys, tmp_path, terminal, columns, most):
    monkeypatch.setattr(records.sys.stdout, "isatty", lambda: terminal, raising=False)
    monkeypatch.setattr(records.shutil, "get_terminal_size", lambda: os.terminal_size((columns, 24)))
    show("a title", ROWS, tmp_path / "rows.json")
    lines = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out).splitlines()
    assert lines[0].rstrip() == "a title"
    assert max(map(len, lines)) <= most
    words = [word for line in lines for word in line.split()]
    for row in ROWS:
        for name, value in row.items():
            assert (f"{value:,}" if isinstance(value, int) else value) in words, name
    assert json.loads((tmp_path / "rows.json").read_text()) == ROWS


def test_hidden_fields_are_in_the_file_alone(capsys, tmp_path):
    show("a title", [{"codec": "raw", "secret": 7}], tmp_path / "rows.json", hidden=["secret"])
    assert "secret" not in capsys.readouterr().out
    assert json.loads((tmp_path / "rows.json").read_text()) == [{"codec": "raw", "secret": 7}]
