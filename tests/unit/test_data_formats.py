"""One table in three formats: the same windows from each, and every way in which HDF5 and CSV files can be wrong."""

import os
from pathlib import Path

import h5py
import numpy as np
import pytest

from mpitrain.config.schema import DataConfig
from mpitrain.data import csv_file
from mpitrain.data.open import open_dataset
from mpitrain.data.table import Table
from mpitrain.errors import DataError

ROWS = 24
APPS = ["Netflix", "Download", "Amazon Prime", "Café"]


def columns():
    rows = np.arange(ROWS)
    power = -70.5 - rows
    power[5] = np.nan
    return {
        "rate": rows * 100,
        "power": power,
        "app": np.array(APPS)[rows // 6],
        "session": np.repeat(["a b", "c", "d"], 8),
    }


def write_npz(path):
    np.savez(path, **columns())


def write_h5(path):
    """Compressed, in chunks that no window fits, text of variable length and of fixed length."""
    with h5py.File(path, "w") as file:
        for name, values in columns().items():
            if values.dtype.kind == "U":
                kind = h5py.string_dtype() if name == "app" else "S4"
                texts = np.char.encode(values, "utf-8")
                file.create_dataset(name, data=texts.astype(object) if name == "app" else texts, dtype=kind)
            else:
                file.create_dataset(name, data=values, chunks=(5,), compression="gzip", shuffle=True)


def write_csv(path, delimiter=",", encoding="utf-8", end="\n"):
    table = columns()
    lines = [delimiter.join(f'"{name}"' for name in table)]
    for row in zip(*(values.tolist() for values in table.values()), strict=True):
        lines.append(delimiter.join("" if value != value else str(value) for value in row))
    path.write_bytes((end.join(lines) + end).encode(encoding))


def config(path, **changes):
    defaults = {
        "kind": "windows",
        "path": str(path),
        "x": "rate, power",
        "y": "app",
        "group": "session",
        "test_groups": ["c"],
        "window": 4,
        "missing": "zero",
    }
    return DataConfig(**(defaults | changes))


def opened(path, **changes):
    dataset = open_dataset(config(path, **changes), "classify", 0)
    dataset.load(np.arange(sum(dataset.train_group_sizes)), np.arange(dataset.num_test))
    return dataset


WRITERS = {
    "my table.npz": write_npz,
    "my table.h5": write_h5,
    "my table.HDF5": write_h5,
    "my table.csv": write_csv,
    "semicolons.csv": lambda path: write_csv(path, ";"),
    "tabs.csv": lambda path: write_csv(path, "\t"),
    "windows.csv": lambda path: write_csv(path, ";", "utf-8-sig", "\r\n"),
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_gives_the_same_windows(tmp_path, name):
    folder = tmp_path / "a folder"
    folder.mkdir()
    WRITERS[name](folder / name)
    dataset = opened(folder / name)
    assert dataset.class_names == sorted(APPS)
    assert dataset.feature_names == ["rate", "power"]
    assert (dataset.group_names, dataset.train_group_sizes, dataset.num_test) == (["a b", "d"], [2, 2], 2)
    train = dataset.train(np.arange(4))
    power = np.nan_to_num(columns()["power"], nan=0.0)
    rows = np.array([0, 4, 16, 20])[:, None] + np.arange(4)
    assert np.array_equal(train.x, np.stack([rows * 100, power[rows]], axis=2).astype(np.float32))
    assert train.y.tolist() == [sorted(APPS).index(APPS[row // 6]) for row in rows[:, 0]]
    with pytest.raises(DataError, match=r'"power": row 5.* got nan \(1 of 48'):
        opened(folder / name, missing="refuse")


def test_every_format_has_the_same_content(tmp_path):
    """So that ranks may read copies of other kinds, and a run may be resumed from one."""
    for name, writer in WRITERS.items():
        writer(tmp_path / name)
    assert len({opened(tmp_path / name).content for name in WRITERS}) == 1


def test_arrays_at_any_path_and_names_beside_them(tmp_path):
    path = tmp_path / "deep.h5"
    with h5py.File(path, "w") as file:
        radio = file.create_group("logs/radio")
        radio["x"] = np.arange(ROWS * 2.0).reshape(ROWS, 2)
        radio["columns"] = ["rsrp", "snr"]
        file["logs/app"] = np.arange(ROWS) // 6 % 2
        file["logs/app_names"] = ["video", "voice", "unused"]
        file["cell"] = np.arange(ROWS) // 8
        file["cell_names"] = np.array([b"north", b"south", b"west"])
    dataset = opened(path, x="/logs/radio/x", y="logs/app", group="cell", test_groups=["west"], missing="refuse")
    assert dataset.feature_names == ["rsrp", "snr"]
    assert dataset.class_names == ["video", "voice"]
    assert dataset.group_names == ["north", "south"]
    assert dataset.train(np.array([1])).x[0, 0].tolist() == [8, 9]
    assert opened(path, x="logs/radio/x", y="logs/app", group="cell", test_groups=[0], flags=["snr>=20"]).feature_names


def test_no_handle_stays_open(tmp_path):
    for name in ("my table.h5", "my table.csv", "my table.npz"):
        path = tmp_path / name
        WRITERS[name](path)
        dataset = opened(path)
        held = [os.path.realpath(handle) for handle in Path("/proc/self/fd").iterdir()]
        assert str(path) not in held
        assert dataset.num_test == 2


def test_text_may_begin_after_many_rows_of_numbers(tmp_path, monkeypatch):
    """A column is text if any of its fields is, though a chunk that was read before holds numbers alone."""
    monkeypatch.setattr(csv_file, "_CHUNK", 3)
    path = tmp_path / "late.csv"
    path.write_text(
        "id,n,m\n" + "".join(f"{name},{n},{n / 2}\n" for n, name in enumerate(["007", "8", "9", "10", "b", "12", "13"]))
    )
    table = Table(str(path))
    assert table.read("id", "group").tolist() == ["007", "8", "9", "10", "b", "12", "13"]
    assert table.read("n", "x").dtype == np.int64
    assert table.read("m", "x").tolist() == [n / 2 for n in range(7)]
    with pytest.raises(DataError, match=r'column "id": row 4 \(line 6\): expected a number, got "b" \(1 of 7 values\)'):
        table.read_numbers("id", "x", 1)


def test_a_wrong_field_after_many_rows_is_told_with_its_place(tmp_path, monkeypatch):
    monkeypatch.setattr(csv_file, "_CHUNK", 3)
    path = tmp_path / "late.csv"
    path.write_text(edited(9, "\0,1,0"))
    refused(path, ['column "rate": row 7 (line 9)', "a NUL character"], x="rate")
    path.write_text(edited(9, f"7,1,{10**19}"))
    refused(path, ['column "session"', "row 7 (line 9): got 1e+19"], x="rate")


def test_quoted_fields_may_hold_delimiters_and_lines(tmp_path):
    path = tmp_path / "quoted.csv"
    path.write_text('"rate, kbit/s";app\n1;"Net;\nflix"\n2;x\n\n\n')
    table = Table(str(path))
    assert table.read("rate, kbit/s", "x").tolist() == [1, 2]
    assert table.read("app", "y").tolist() == ["Net;\nflix", "x"]
    assert table.place(1) == "row 1 (line 4)"


def test_columns_of_a_csv_never_name_classes_or_groups(tmp_path):
    """Names of classes beside the labels are an array of their own length; a column has an entry a row."""
    path = tmp_path / "named.csv"
    rows = [f"{row},{row // 4 % 2},no{row},{row // 8},no{row}" for row in range(ROWS)]
    path.write_text("\n".join(["x,app,app_names,session,session_names", *rows]) + "\n")
    dataset = opened(path, x="x", test_groups=["1"])
    assert (dataset.class_names, dataset.group_names) == (["0", "1"], ["0", "2"])


GOOD = "rate,app,session\n" + "".join(f"{row},{row // 4 % 2},{row // 8}\n" for row in range(ROWS))


def edited(line, text):
    lines = GOOD.splitlines()
    lines[line - 1] = text
    return "\n".join(lines) + "\n"


BAD_CSV = {
    "empty": ("", "expected a header row", "got an empty file", "first line"),
    "blank first line": ("\n" + GOOD, "expected a header row", "got an empty first line"),
    "header only": ("rate,app,session\n", 'column "rate"', "got 0 rows", "fill the file"),
    "no header": (
        GOOD.partition("\n")[2],
        'column "0"',
        "expected one of this name, got several",
        "rename all but one",
    ),
    "missing column": (GOOD.replace("rate", "rote", 1), 'column "rate"', "['rote',", 'did you mean data.x = "rote"?'),
    "same name twice": (GOOD.replace("app", "rate", 1), 'column "rate"', "got several"),
    "short row": (edited(7, "5,1"), "row 5 (line 7): expected 3 fields as in the header, got 2", "','", "complete"),
    "long row": (edited(4, "2,3,1,0"), "row 2 (line 4): expected 3 fields as in the header, got 4", "quote a text"),
    "blank row": (edited(4, ""), "row 2 (line 4): expected 3 fields", "got an empty line"),
    "text in a number": (edited(9, "7 km,1,0"), 'column "rate"', 'row 7 (line 9): expected a number, got "7 km" (1 of'),
    "decimal comma": (edited(9, '"7,5",1,0'), 'row 7 (line 9): expected a number, got "7,5"', "with a point"),
    "digits with underscore": (edited(9, "7_000,1,0"), 'row 7 (line 9): expected a number, got "7_000"'),
    "missing number": (
        edited(9, ",1,0"),
        'column "rate"',
        "row 7 (line 9): expected a finite float32, got nan (1 of 24",
    ),
    "tab for a number": (edited(9, "\t,1,0"), 'column "rate"', "row 7 (line 9): expected a finite float32, got nan"),
    "spaces for a label": (edited(9, '7," ",0'), 'column "app"', "row 7 (line 9): expected a finite float32, got nan"),
    "spaces for a group": (edited(9, "7,1,\t "), 'column "session"', "row 7 (line 9): got nan"),
    "zeros in a number": (
        edited(9, "7\0,1,0"),
        'column "rate"',
        r"row 7 (line 9): expected a number or a text, got '7\x00' (a NUL",
    ),
    "zeros for a text": (edited(9, "7,1,\0\0"), 'column "session"', "row 7 (line 9)", "(a NUL character)"),
    "group beyond 64 bits": (
        edited(9, f"7,1,{2**63}"),
        'column "session"',
        "row 7 (line 9): got 9.22337203685477",
        "64-bit integers or texts",
    ),
    "infinite number": (edited(9, "-inf,1,0"), 'column "rate"', "row 7 (line 9)", "got -inf"),
    "missing label": (edited(9, "7,,0"), 'column "app"', "row 7 (line 9): expected a finite float32, got nan"),
    "label beyond 64 bits": (
        edited(9, f"7,{10**19},0"),
        'column "app"',
        "row 7 (line 9): expected a class 0, 1, …, got 1e+19 (3 different labels in 24 rows)",
        "model.task",
    ),
    "missing text label": (edited(9, "7,,0").replace(",0,", ",a,"), 'column "app"', "row 7 (line 9): expected a text"),
    "missing group": (edited(9, "7,1,"), 'column "session"', "row 7 (line 9): got nan", "data.group"),
    "open quote": (edited(9, '7,"1,0'), "line 9: not CSV (unexpected end of data)", "quotes"),
    "garbage after a quote": (edited(9, '7,"1"1,0'), "line 9: not CSV", "quotes"),
    "endless line": ("x" * 200_000, "line 1: a field has more than 131072 characters", "shorten the text"),
    "endless field": (edited(9, f"7,1,{'x' * 131073}"), "line 9: a field has more than 131072 characters"),
    "other encoding": (edited(9, "7,é,0").encode("latin-1"), "line 9: byte 61: expected UTF-8 text, got 0xe9", "UTF-8"),
    "UTF-16": (GOOD.encode("utf-16"), "line 1: byte 0: expected UTF-8 text, got 0xff", "save the file"),
}


@pytest.mark.parametrize("case", BAD_CSV)
def test_a_wrong_csv_is_told_with_place_and_remedy(tmp_path, case):
    content, *fragments = BAD_CSV[case]
    path = tmp_path / "bad data.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    refused(path, fragments, x="rate", test_groups=[1], missing="refuse")


def refused(path, fragments, **settings):
    with pytest.raises(DataError) as caught:
        opened(path, **settings)
    message = str(caught.value)
    assert all(fragment in message for fragment in [str(path), *fragments]), message
    assert ";" in message
    assert "\n" not in message


BAD_H5 = {
    "group for an array": (lambda _: {}, {"x": "radio"}, "got a group", "['radio/rsrp', 'radio/snr']"),
    "no such path": (lambda _: {}, {"x": "radio/rsrq"}, "not in the file", 'did you mean data.x = "radio/rsrp"?'),
    "compound": (lambda _: {"app": np.zeros(ROWS, [("a", "i4")])}, {}, 'array "app"', "expected numbers, got dtype [("),
    "one value": (lambda _: {"app": np.int64(3)}, {}, 'array "app"', "expected one value a row, got shape ()"),
    "no shape": (lambda _: {"app": h5py.Empty("f4")}, {}, 'array "app"', "an empty data set without a shape"),
    "short array": (lambda _: {"app": np.zeros(7, int)}, {}, 'expected 24 rows as in "radio/rsrp", got 7'),
    "text in a number": (
        lambda _: {"radio/snr": [f"{row}?" for row in range(ROWS)]},
        {},
        'row 0: expected a number, got "0?" (24',
    ),
    "other encoding": (
        lambda _: {"app": np.array([b"a"] * 9 + [b"Oslo\xf8"] * 15)},
        {},
        'array "app"',
        "row 9: expected UTF-8 text, got b'Oslo\\xf8' (byte 4 of it)",
    ),
    "label beyond the names": (
        lambda _: {"app_names": ["video"]},
        {},
        'array "app"',
        "row 6: expected a class 0 to 0 as the file names 1, got 1 (12 of 24 values)",
    ),
    "label beyond int64": (
        lambda _: {"app": np.array([1] * 23 + [2**64 - 1], np.uint64)},
        {},
        f"row 23: expected a class 0, 1, …, got {2**64 - 1} (2 different labels in 24 rows)",
    ),
    "link to nothing": (
        lambda _: {"lost": h5py.SoftLink("/gone")},
        {"x": "lost"},
        'array "lost": is a link to nothing (to "/gone")',
    ),
    "link to a lost file": (
        lambda _: {"lost": h5py.ExternalLink("lost.h5", "/snr")},
        {"y": "lost"},
        'array "lost": is a link to nothing (to "/snr" in the file "lost.h5")',
    ),
    "values in a lost file": (
        lambda folder: {"radio/snr": virtual(folder)},
        {},
        'array "radio/snr"',
        'its values lie in "lost.h5", which is missing',
    ),
}  # fmt: skip


def virtual(folder):
    layout = h5py.VirtualLayout((ROWS,), "f4")
    layout[:] = h5py.VirtualSource("lost.h5", "snr", (ROWS,))
    return layout


def write_radio(path, changes):
    arrays = {
        "radio/rsrp": np.arange(ROWS),
        "radio/snr": np.arange(ROWS) / 2,
        "app": np.arange(ROWS) // 6 % 2,
        "session": np.arange(ROWS) // 8,
    }
    with h5py.File(path, "w") as file:
        for name, values in (arrays | changes).items():
            if isinstance(values, h5py.VirtualLayout):
                file.create_virtual_dataset(name, values)
            else:
                file[name] = values


RADIO = {"x": "radio/rsrp, radio/snr", "test_groups": [1]}


@pytest.mark.parametrize("case", BAD_H5)
def test_a_wrong_hdf5_file_is_told_with_place_and_remedy(tmp_path, case):
    make, settings, *fragments = BAD_H5[case]
    path = tmp_path / "bad data.h5"
    write_radio(path, make(tmp_path))
    refused(path, fragments, **(RADIO | settings))


def test_links_to_nothing_beside_the_arrays_do_no_harm(tmp_path):
    links = {"gone": h5py.SoftLink("/x/y"), "radio/loop": h5py.SoftLink("/radio/loop"), "app2": h5py.SoftLink("/app")}
    write_radio(tmp_path / "links.h5", links | {"other": h5py.ExternalLink("lost.h5", "/x")})
    assert opened(tmp_path / "links.h5", **RADIO | {"y": "app2"}).class_names == ["0", "1"]


def test_a_damaged_hdf5_file_is_refused(tmp_path):
    path = tmp_path / "whole.h5"
    with h5py.File(path, "w") as file:
        for name, values in columns().items():
            if values.dtype.kind != "U":
                file.create_dataset(name, data=values, chunks=(24,), compression="gzip", fletcher32=True)
        file["app"], file["session"] = np.arange(ROWS) // 6 % 2, np.arange(ROWS) // 8
        place = file["power"].id.get_chunk_info(0).byte_offset
    content = path.read_bytes()
    for damaged in (b"", b"rate,power\n1,2\n", content[:100], content[: len(content) // 2]):
        path.write_bytes(damaged)
        refused(path, ["is not a whole HDF5 file", "copy it again"], test_groups=[1])
    path.write_bytes(content[: place + 8] + bytes(8) + content[place + 16 :])
    refused(path, ['array "power": cannot be read', "copy or write the file again"], test_groups=[1])


def test_another_format_is_refused_by_its_name(tmp_path):
    path = tmp_path / "table.parquet"
    path.write_bytes(b"PAR1")
    refused(path, ["expected a name that ends in .npz, .h5, .hdf5, .csv", "convert"])


@pytest.mark.parametrize("name", ["my table.csv", "my table.h5", "my table.npz"])
def test_a_file_that_changes_is_refused(tmp_path, name):
    """Between two arrays, or between the description of the windows and their rows."""
    path = tmp_path / name
    WRITERS[name](path)
    dataset = open_dataset(config(path), "classify", 0)
    table = Table(str(path))
    size = path.stat().st_size
    with path.open("ab") as file:
        file.write(b"1")
    expected = f"changed while it was read (from {size} to {size + 1} bytes"
    for use in (lambda: table.read("rate", "x"), lambda: dataset.load(np.arange(2), np.arange(1))):
        with pytest.raises(DataError) as caught:
            use()
        assert expected in str(caught.value)
    WRITERS[name](path)
    table = Table(str(path))
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    with pytest.raises(DataError, match="or only in time"):
        table.read("rate", "x")
    path.unlink()
    with pytest.raises(DataError, match="there is no file"):
        table.read("rate", "x")
