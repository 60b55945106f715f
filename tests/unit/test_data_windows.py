"""Windows from a file: which ones there are, what they hold, and every way in which a file can be wrong."""

import os
from pathlib import Path

import numpy as np
import pytest

from mpitrain.config.schema import DataConfig
from mpitrain.data.dataset import combine_moments
from mpitrain.data.open import open_dataset
from mpitrain.errors import DataError

ROWS = 40
TRACTOR = Path(__file__).parents[3] / "shared" / "data" / "tractor" / "tractor_kpi_250ms.npz"


def arrays():
    """Three sites, of which the first comes back after the second: runs of 10, 8, 7, 15 rows."""
    site = np.repeat([0, 1, 0, 2], [10, 8, 7, 15]).astype(np.int16)
    return {
        "x": np.arange(ROWS * 2, dtype=np.float32).reshape(ROWS, 2),
        "columns": np.array(["rate", "delay"]),
        "y": (np.arange(ROWS) % 3).astype(np.int8),
        "site": site,
        "site_names": np.array(["north", "south", "west"]),
    }


def config(path, **changes):
    defaults = {"kind": "windows", "path": str(path), "group": "site", "test_groups": ["west"], "window": 4}
    return DataConfig(**(defaults | changes))


def write(folder, **changes):
    path = folder / "my data.npz"
    np.savez(path, **{name: array for name, array in (arrays() | changes).items() if array is not None})
    return path


def opened(path, task="classify", **changes):
    dataset = open_dataset(config(path, **changes), task, 0)
    dataset.load(np.arange(sum(dataset.train_group_sizes)), np.arange(dataset.num_test))
    return dataset


def first_rows(samples):
    return (samples.x[:, 0, 0] / 2).astype(int).tolist()


def test_windows_stay_within_runs_and_are_ordered_by_group(tmp_path):
    dataset = opened(write(tmp_path))
    assert dataset.group_names == ["north", "south"]
    assert dataset.train_group_sizes == [3, 2]
    assert dataset.feature_names == ["rate", "delay"]
    assert dataset.class_names == ["0", "1", "2"]
    assert dataset.input_shape == (4, 2)
    assert (dataset.num_outputs, dataset.num_test) == (3, 3)
    train, test = dataset.train(np.arange(5)), dataset.test(np.arange(3))
    assert first_rows(train) == [0, 4, 18, 10, 14]
    assert first_rows(test) == [25, 29, 33]
    assert np.array_equal(train.x[2], arrays()["x"][18:22])
    assert train.y.tolist() == [row % 3 for row in first_rows(train)]


def test_classes_may_have_gaps(tmp_path):
    """Up to 999 whatever the labels, and beyond it in proportion to them."""
    assert opened(write(tmp_path, y=np.full(ROWS, 999))).num_outputs == 1000
    x, site = np.zeros((400, 2)), np.arange(400) // 40
    path = write(tmp_path, x=x, y=np.arange(400) * 10, site=site, site_names=None)
    assert opened(path, test_groups=[0]).num_outputs == 396 * 10 + 1


def test_stride_below_the_window_overlaps_and_shares_rows(tmp_path):
    dataset = opened(write(tmp_path), stride=2)
    assert first_rows(dataset.train(np.arange(9))) == [0, 2, 4, 6, 18, 20, 10, 12, 14]
    assert np.array_equal(dataset.train(np.array([1])).x[0], arrays()["x"][2:6])
    # The last row of the odd run belongs to no window.
    assert len(dataset._blocks["train"].rows) == 24


def test_a_forecast_takes_the_rows_after_the_window(tmp_path):
    y = np.linspace(-1, 1, ROWS)
    dataset = opened(write(tmp_path, y=y), "forecast", horizon=3, stride=1)
    assert (dataset.num_outputs, dataset.class_names) == (3, [])
    train = dataset.train(np.arange(sum(dataset.train_group_sizes)))
    assert first_rows(train) == [0, 1, 2, 3, 18, 10, 11]
    assert train.y.dtype == np.float32
    assert np.array_equal(train.y, y.astype(np.float32)[np.array(first_rows(train))[:, None] + 4 + np.arange(3)])


def test_active_counts_windows_with_any_row_above_zero(tmp_path):
    x = arrays()["x"]
    x[:] = 0
    x[[3, 29], 0] = 1
    x[[14, 19], 1] = 2
    path = write(tmp_path, x=x)
    both = opened(path, active=["rate", "delay"])
    assert (both.train_group_sizes, both.group_names, both.num_test) == ([2, 1], ["north", "south"], 1)
    rate = opened(path, active=["rate"])
    assert (rate.train_group_sizes, rate.group_names) == ([1], ["north"])
    assert rate.train(np.array([0])).x[0, 3, 0] == 1


def test_groups_are_found_by_name_and_by_number_and_can_be_skipped(tmp_path):
    path = write(tmp_path)
    assert first_rows(opened(path, test_groups=[1]).test(np.arange(2))) == [10, 14]
    assert opened(path, skip_groups=["south"]).group_names == ["north"]
    sparse = write(tmp_path, site=np.repeat([7, 123456789012, 7, -1], [10, 8, 7, 15]), site_names=None)
    dataset = opened(sparse, test_groups=[-1])
    assert dataset.group_names == ["7", "123456789012"]
    text = write(tmp_path, site=np.repeat(["b", "a", "b", "c"], [10, 8, 7, 15]), site_names=None)
    assert opened(text, test_groups=["c"]).group_names == ["a", "b"]


def test_columns_may_be_arrays_of_their_own(tmp_path):
    path = write(tmp_path, rate=np.arange(ROWS) - 3, delay=np.full(ROWS, np.nan), x=None)
    dataset = opened(path, x="rate, delay", log1p=["rate"], missing="zero")
    assert dataset.feature_names == ["rate", "delay"]
    x = dataset.train(np.array([0])).x[0]
    assert x[:, 0] == pytest.approx([-np.log(4), -np.log(3), -np.log(2), 0])
    assert (x[:, 1] == 0).all()
    assert opened(path, x="rate").input_shape == (4, 1)


def test_log1p_of_all_columns_includes_the_forecast(tmp_path):
    path = write(tmp_path, y=np.full(ROWS, np.e - 1))
    for log1p in (["*"], ["rate", "y"]):
        dataset = opened(path, "forecast", log1p=log1p)
        assert dataset.train(np.array([0])).y == pytest.approx(1)
        assert dataset.train(np.array([0])).x[0, 1, 0] == pytest.approx(np.log(3))


def changed(name, place, value):
    return {name: np.concatenate([arrays()[name][:place], [value], arrays()[name][place + 1 :]])}


@pytest.mark.parametrize(
    "changes",
    [
        changed("x", 17, [34, 35.5]),
        changed("x", 17, [35, 34]),
        changed("y", 17, 0),
        changed("site", 17, 0),
        changed("columns", 1, "loss"),
        changed("site_names", 0, "east"),
        {"y_names": ["a", "b", "c"]},
        {"cell": np.zeros(ROWS, int)},
    ],
    ids=["a value", "two values swapped", "a label", "a group", "a column", "a group's name", "classes", "a station"],
)
def test_another_table_has_another_content(tmp_path, changes):
    """Even where its windows are as many, and all that is counted is the same."""
    base = {"cell": arrays()["site"].copy()}
    first = opened(write(tmp_path, **base), station="cell", stride=4).content
    assert len(first) == 64
    assert opened(write(tmp_path, **base, unused=np.zeros(3)), station="cell", stride=4).content == first
    assert opened(write(tmp_path, **base | changes), station="cell", stride=4).content != first


def test_content_is_of_the_columns_that_are_used_as_the_file_has_them(tmp_path):
    """A column dropped may differ, unless it says which windows are active; logarithms round on each machine."""
    path = write(tmp_path)
    first = opened(path, drop=["delay"]).content
    active = opened(path, drop=["delay"], active=["delay"]).content
    write(tmp_path, **changed("x", 17, [34, 35.5]))
    assert opened(path, drop=["delay"]).content == first
    assert opened(path, drop=["delay"], log1p=["rate"]).content == first
    assert opened(path, drop=["delay"], active=["delay"]).content != active
    y = np.linspace(-1, 1, ROWS)
    cases = [(y, ["y"]), (y, []), (y + 1, [])]
    forecasts = [opened(write(tmp_path, y=y), "forecast", log1p=log1p).content for y, log1p in cases]
    assert forecasts[0] == forecasts[1] != forecasts[2]


def test_a_rank_keeps_only_its_own_rows(tmp_path):
    whole = opened(write(tmp_path))
    part = open_dataset(config(tmp_path / "my data.npz"), "classify", 0)
    part.load(np.array([4, 1]), np.array([], np.int64))
    assert part.samples_read == 2
    assert len(part._blocks["train"].rows) == 8
    assert len(part.test(np.arange(0))) == 0
    assert np.array_equal(part.train(np.array([4, 1])).x, whole.train(np.array([4, 1])).x)
    with pytest.raises(IndexError, match="sample 0 was not loaded"):
        part.train(np.array([0]))


def test_moments_weigh_overlapping_windows_and_leave_constants_alone(tmp_path):
    x = arrays()["x"]
    x[:, 1] = 0.1
    x[:, 0] += 1e6
    whole = opened(write(tmp_path, x=x), stride=1)
    samples = whole.train(np.arange(sum(whole.train_group_sizes))).x.astype(np.float64)
    mean, scale = combine_moments(whole.moments())
    assert mean == pytest.approx(samples.mean((0, 1)), rel=1e-12)
    assert scale[0] == pytest.approx(samples[..., 0].std(), rel=1e-9)
    assert scale[1] == 1
    tables = []
    for indices in (np.arange(11), np.arange(11, 16)):
        part = open_dataset(config(tmp_path / "my data.npz", stride=1), "classify", 0)
        part.load(indices, indices[:0])
        tables.append(part.moments())
    assert np.array_equal(sum(tables), whole.moments())
    whole.standardize(mean, scale)
    assert whole.train(np.array([0])).x[..., 1] == pytest.approx(0, abs=1e-7)


def with_value(name, place, value, dtype=np.float64):
    array = arrays()[name].astype(dtype)
    array[place] = value
    return {name: array}


WRONG = {
    "no such array": ({"x": None}, {"x": "X"}, 'array "X"', "not in the file, which has ['columns'"),
    "near array": ({}, {"group": "sit"}, 'array "sit"', 'did you mean data.group = "site"?'),
    "text in x": ({"x": np.full((ROWS, 2), "a")}, {}, 'array "x"', 'row 0, column 0: expected a number, got "a" (80'),
    "digits as text": ({"x": np.full((ROWS, 2), "7")}, {}, 'array "x"', "expected numbers, got dtype <U1"),
    "objects in x": ({"x": np.full((ROWS, 2), None)}, {}, 'array "x"', "pickle", "numeric dtype"),
    "complex x": ({"x": np.zeros((ROWS, 2), complex)}, {}, 'array "x"', "expected numbers, got dtype complex128"),
    "3-D x": (
        {"x": np.zeros((ROWS, 2, 2))},
        {},
        'array "x"',
        "expected a matrix [rows, columns], got shape (40, 2, 2)",
    ),
    "2-D y": ({"y": np.zeros((ROWS, 1), int)}, {}, 'array "y"', "expected one value a row, got shape (40, 1)"),
    "short y": ({"y": np.zeros(39, int)}, {}, 'array "y"', 'expected 40 rows as in "x", got 39'),
    "short group": ({"site": np.zeros(3, int)}, {}, 'array "site"', 'expected 40 rows as in "x", got 3'),
    "short column": (
        {"a": np.zeros(4), "b": np.zeros(5)},
        {"x": "a,b"},
        'array "b"',
        'expected 4 rows as in "a", got 5',
    ),
    "NaN in x": (with_value("x", (17, 1), np.nan), {}, 'array "x"', "row 17", 'column "delay"', "got nan (1 of 80"),
    "Inf in x": (
        with_value("x", (slice(5, 8), 0), np.inf),
        {"missing": "zero"},
        'array "x"',
        'row 5, column "rate": expected a finite float32, got inf (3 of 80 values)',
        "remove these rows",
    ),
    "too large for float32": (with_value("x", (2, 0), 1e39), {}, 'row 2, column "rate"', "got 1e+39"),
    "NaN in y": (with_value("y", 6, np.nan), {}, 'array "y"', "row 6: expected a finite float32, got nan"),
    "fractional label": (with_value("y", 9, 1.5), {}, 'array "y"', "row 9: expected a class 0, 1, …, got 1.5", "task"),
    "negative label": (with_value("y", 8, -1), {}, 'array "y"', "row 8", "got -1.0 (1 of 40 values)", "from 0"),
    "times for labels": (
        {"y": 1_700_000_000 + np.arange(ROWS) // 2},
        {},
        'array "y"',
        "row 0: expected a class 0, 1, …, got 1700000000 (20 different labels in 40 rows)",
        'as text, or set model.task = "forecast"',
    ),
    "one class far off": (with_value("y", 6, 1000), {}, "row 6: expected a class 0, 1, …, got 1000.0 (4 different"),
    "unknown test group": ({}, {"test_groups": ["wets"]}, "data.test_groups", "north", 'did you mean "west"?'),
    "unknown test number": ({}, {"test_groups": [9]}, 'data.test_groups: there is no "9" among'),
    "unknown active column": ({}, {"active": ["rat"]}, "data.active", "['rate', 'delay']", 'did you mean "rate"?'),
    "unknown log1p column": ({}, {"log1p": ["y"]}, 'data.log1p: there is no "y"'),
    "no test groups": ({}, {"test_groups": []}, "leaves no test windows of 8", "['north', 'south', 'west']"),
    "only test groups": ({}, {"test_groups": [0, 1, 2]}, "leaves no training windows", "name groups"),
    "no group at all": ({}, {"group": "", "test_groups": []}, "leaves no test windows", "with data.group set"),
    "nothing active": ({"x": np.zeros((ROWS, 2))}, {"active": ["rate"]}, "windows of 0", "relax data.active"),
    "window too long": ({}, {"window": 16}, "16 rows a window", "one group has 15 rows", "data.window to at most 15"),
    "no rows": (
        {"x": np.zeros((0, 2)), "y": np.zeros(0, int), "site": np.zeros(0, int)},
        {},
        'array "x"',
        "expected rows and columns, got 0 rows",
    ),
    "float groups": ({"site": np.zeros(ROWS)}, {}, 'array "site"', "got dtype float64"),
    "broken groups": ({"site": np.arange(ROWS) / 2}, {}, "got dtype float64", "row 1: got 0.5"),
    "too few group names": ({"site_names": np.array(["a"])}, {}, 'array "site_names"', "got 1 names and code 1"),
    "too few column names": ({"columns": np.array(["a"])}, {}, 'array "columns"', "expected 2 names"),
    "same column name twice": (
        {"columns": np.array(["rate", "rate"])},
        {},
        'array "columns": expected one column "rate", got several',
        "once",
    ),
    "same column twice": (
        {"a": np.zeros(ROWS)},
        {"x": "a, y, a"},
        'array "a": expected one column "a", got several',
    ),
    "same group name twice": (
        {"site_names": np.array(["a", "a", "west"])},
        {},
        'array "site_names": expected one code a name of "site", got several for "a"',
    ),
    "too few class names": (
        {"y_names": np.array(["a", "b"])},
        {},
        'array "y"',
        "row 2: expected a class 0 to 1 as the file names 2, got 2 (13 of 40 values)",
    ),
    "nameless class": ({"y": np.full(ROWS, "")}, {}, 'array "y"', "row 0: expected a text, got nothing (40 of 40"),
    "nameless group": ({"site": np.full(ROWS, "")}, {}, 'array "site"', "row 0: expected a text, got nothing"),
    "unknown station": ({}, {"station": "sites"}, 'array "sites"', 'did you mean data.station = "site"?'),
    "short station": ({"cell": np.zeros(3, int)}, {"station": "cell"}, 'array "cell"', "expected 40 rows"),
    "flag of no column": ({}, {"flags": ["dealy > 3"]}, "data.flags", 'no "dealy" among', 'did you mean "delay"?'),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_table_is_told_with_place_and_remedy(tmp_path, case):
    changes, settings, *fragments = WRONG[case]
    path = write(tmp_path, **changes)
    with pytest.raises(DataError) as caught:
        opened(path, **settings)
    message = str(caught.value)
    assert all(fragment in message for fragment in fragments), message
    assert ";" in message
    assert "\n" not in message
    if "there is no" not in message:
        assert str(path) in message


def test_a_missing_file_is_told_with_its_path(tmp_path):
    path = tmp_path / "no such file.npz"
    for missing in (path, tmp_path):
        with pytest.raises(DataError, match="there is no file") as caught:
            opened(missing)
        assert f'"{missing}"' in str(caught.value)
        assert "set data.path" in str(caught.value)


def test_another_kind_of_file_is_refused(tmp_path):
    good = write(tmp_path).read_bytes()
    path = tmp_path / "other.npz"
    np.save(tmp_path / "one.npy", np.zeros(3))
    for content in (b"", b"rate,delay\n1,2\n", (tmp_path / "one.npy").read_bytes(), good[: len(good) // 2]):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"other\.npz.* is not an \.npz file.*numpy\.savez"):
            opened(path)


def test_a_damaged_array_is_refused(tmp_path):
    content = bytearray(write(tmp_path).read_bytes())
    place = content.index(b"x.npy") + 150
    content[place : place + 40] = bytes(40)
    path = tmp_path / "damaged.npz"
    path.write_bytes(bytes(content))
    with pytest.raises(DataError, match=r'damaged\.npz", array "x": cannot be read.*again'):
        opened(path)


def test_real_traces_give_the_published_windows():
    if not TRACTOR.exists():
        reason = f"the tractor traces are not beside the project: {TRACTOR}"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
    held_out = ["embb_3", "embb_05_18_a", "mmtc_3", "mmtc_05_18", "urll_11_18", "urllc_05_18"]
    settings = {
        "group": "trace",
        "window": 16,
        "test_groups": held_out,
        "skip_groups": ["null_cntrl"],
        "active": ["tx_pkts downlink", "rx_pkts uplink"],
        "log1p": ["*"],
    }
    dataset = opened(TRACTOR, **settings)
    assert dataset.class_names == ["embb", "mmtc", "urllc"]
    assert dataset.input_shape == (16, 17)
    assert len(dataset.group_names) == 21
    train = dataset.train(np.arange(sum(dataset.train_group_sizes)))
    test = dataset.test(np.arange(dataset.num_test))
    assert np.bincount(train.y).tolist() == [1242, 924, 759]
    assert np.bincount(test.y).tolist() == [223, 153, 368]
    assert round(100 * np.bincount(test.y).max() / len(test), 1) == 49.5
    assert opened(TRACTOR, **settings, stride=8).num_test == 1489
