"""Files that an option names are tried before the work, and refused with a message."""

import pytest
import typer
from typer.testing import CliRunner

from mpitrain.cli.calling import Json
from mpitrain.comm.hints import RANK_HINTS
from mpitrain.comm.outputs import check_output, write_output
from mpitrain.errors import ConfigError


def test_a_look_leaves_nothing_behind(tmp_path):
    check_output(tmp_path / "new" / "file", "--json")
    assert list(tmp_path.iterdir()) == []
    write_output(tmp_path / "new" / "file", "old", "--json")
    check_output(tmp_path / "new" / "file", "--json")
    assert (tmp_path / "new" / "file").read_text() == "old"


def test_what_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").touch()
    for path, reason in {tmp_path: "Is a directory", tmp_path / "file" / "x": "Not a directory"}.items():
        for refuse in (check_output, lambda path, option: write_output(path, "", option)):
            with pytest.raises(ConfigError, match=f"^--out: cannot write {path}: ({reason}|File exists); name another"):
                refuse(path, "--out")


def test_commands_refuse_before_they_begin(tmp_path, monkeypatch):
    """Ranks go on: one that left before MPI has started would be waited for."""
    app = typer.Typer()
    begun = []

    @app.command()
    def command(json: Json = None):
        begun.append(json)

    for name in RANK_HINTS:
        monkeypatch.delenv(name, raising=False)
    result = CliRunner().invoke(app, ["--json", str(tmp_path)])
    assert (result.exit_code, begun) == (2, [])
    assert "--json: cannot write" in result.output
    assert CliRunner().invoke(app, []).exit_code == 0
    monkeypatch.setenv("PMI_RANK", "0")
    assert CliRunner().invoke(app, ["--json", str(tmp_path)]).exit_code == 0
    assert begun == [None, tmp_path]
