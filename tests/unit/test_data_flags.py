"""Comparisons as columns, and stations that are not the groups which windows must not cross."""

import os
from pathlib import Path

import numpy as np
import pytest

from mpitrain.config.flags import parse_flag
from mpitrain.config.load import load_config, resolve
from mpitrain.config.schema import DataConfig
from mpitrain.data.open import open_dataset
from mpitrain.errors import ConfigError, DataError

ROWS = 40
ROOT = Path(__file__).parents[2]
RACA = ROOT.parent / "shared" / "data" / "raca5g" / "raca5g_1hz.npz"


def write(folder, **changes):
    rows = np.arange(ROWS)
    arrays = {
        "speed": rows - 3.0,
        "mode": rows % 8,
        "y": rows % 3,
        "session": rows // 10,
        # Three cells, each visited several times and across sessions.
        "cell": np.repeat([2, 0, 2, 1, 0], [6, 13, 5, 8, 8]),
        "cell_names": np.array(["north", "south", "west"]),
    }
    np.savez(folder / "table.npz", **(arrays | changes))
    return folder / "table.npz"


def opened(path, **changes):
    defaults = {
        "kind": "windows",
        "path": str(path),
        "x": "speed, mode",
        "group": "session",
        "test_groups": [3],
        "window": 3,
    }
    dataset = open_dataset(DataConfig(**(defaults | changes)), "classify", 0)
    dataset.load(np.arange(sum(dataset.train_group_sizes)), np.arange(dataset.num_test))
    return dataset


@pytest.mark.parametrize(
    ("text", "column", "sign", "number"),
    [
        ("mode == 7", "mode", "==", 7),
        ("radio/snr<=-1.5e1", "radio/snr", "<=", -15),
        (" tx_errors downlink (%) > 0 ", "tx_errors downlink (%)", ">", 0),
        ("a<b >= 2", "a<b", ">=", 2),
        ("x!=0", "x", "!=", 0),
    ],
)
def test_a_comparison_is_read(text, column, sign, number):
    flag = parse_flag(text)
    assert (flag.text, flag.column, flag.sign, flag.number) == (text.strip(), column, sign, number)


@pytest.mark.parametrize("text", ["mode = 7", "mode", "== 7", "mode == five", "mode == nan", "mode < inf", "", "a ~ 3"])
def test_what_is_no_comparison_is_refused_with_the_configuration(text):
    with pytest.raises(ConfigError) as caught:
        resolve({"data": {"kind": "windows", "path": "x.npz", "flags": [text]}}, "test", [])
    assert repr(text) in str(caught.value)
    assert "== != <= >= < >" in str(caught.value)
    assert 'write for example "mode == 7"' in str(caught.value)


SIGNS = {
    "==": lambda v: v == 4,
    "!=": lambda v: v != 4,
    "<=": lambda v: v <= 4,
    ">=": lambda v: v >= 4,
    "<": lambda v: v < 4,
    ">": lambda v: v > 4,
}


@pytest.mark.parametrize("sign", SIGNS)
def test_a_flag_replaces_its_column(tmp_path, sign):
    dataset = opened(write(tmp_path), flags=[f"mode {sign} 4"])
    assert dataset.feature_names == ["speed", f"mode {sign} 4"]
    x = dataset.train(np.arange(9)).x
    assert np.array_equal(x[..., 1], SIGNS[sign]((x[..., 0] + 3) % 8).astype(np.float32))


def test_a_missing_value_is_compared_with_nothing(tmp_path):
    speed = np.arange(ROWS) - 3.0
    speed[4] = np.nan
    path = write(tmp_path, speed=speed)
    with pytest.raises(DataError, match=r'"speed": row 4: expected a finite float32, got nan \(1 of 80'):
        opened(path, flags=["speed != 0"])
    x = opened(path, flags=["speed != 0"], missing="zero").train(np.arange(2)).x
    assert x[..., 0].ravel().tolist() == [1, 1, 1, 0, 0, 1]


def test_flags_of_one_column_stand_side_by_side_and_are_named_like_columns(tmp_path):
    flags = ["mode == 1", "mode > 5"]
    dataset = opened(write(tmp_path), flags=flags, log1p=["*"], drop=["speed"])
    assert dataset.feature_names == flags
    assert dataset.train(np.array([0, 2])).x.reshape(-1, 2).T.tolist() == [[0, 1, 0, 0, 0, 0], [0, 0, 0, 1, 1, 0]]
    assert opened(write(tmp_path), flags=flags, active=["mode == 1"]).num_test == 1
    with pytest.raises(DataError, match='data.drop: there is no "mode"'):
        opened(write(tmp_path), flags=flags, drop=["mode"])


def test_a_flag_of_a_matrix(tmp_path):
    x = np.arange(ROWS * 2.0).reshape(ROWS, 2)
    path = write(tmp_path, x=x, columns=np.array(["speed", "mode"]))
    dataset = opened(path, x="x", flags=["speed >= 4"])
    assert dataset.feature_names == ["speed >= 4", "mode"]
    assert dataset.train(np.array([0])).x[0].tolist() == [[0, 1], [0, 3], [1, 5]]


def test_stations_own_the_windows_that_begin_with_them(tmp_path):
    """Windows stay within sessions and start at their beginnings; test_groups and skip_groups are sessions."""
    dataset = opened(write(tmp_path), station="cell", skip_groups=[2])
    cell = np.repeat([2, 0, 2, 1, 0], [6, 13, 5, 8, 8])
    starts = np.array([start for session in (0, 10) for start in range(session, session + 8, 3)])
    assert starts.tolist() == [0, 3, 6, 10, 13, 16]
    assert dataset.group_names == ["north", "west"]
    assert dataset.train_group_sizes == [int((cell[starts] == code).sum()) for code in (0, 2)] == [4, 2]
    train = dataset.train(np.arange(6))
    assert (train.x[:, 0, 0] + 3).tolist() == [6, 10, 13, 16, 0, 3]
    assert train.y.tolist() == [0, 1, 1, 1, 0, 0]
    assert (dataset.test(np.arange(3)).x[:, 0, 0] + 3).tolist() == [33, 36, 30]


def test_without_a_station_the_group_is_the_station(tmp_path):
    dataset = opened(write(tmp_path))
    assert (dataset.group_names, dataset.train_group_sizes) == (["0", "1", "2"], [3, 3, 3])


def test_the_job_of_the_phone_traces_sees_their_windows():
    """Counted apart from the package: windows of 30 rows from the start of each of the 83 sessions."""
    if not RACA.exists():
        reason = f"the phone traces are not beside the project: {RACA}"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
    config = load_config(ROOT / "jobs" / "configs" / "raca5g.toml", [f"data.path={RACA}"]).config
    dataset = open_dataset(config.data, config.model.task, 0)
    with np.load(RACA) as file:
        session, node, label, rate, mode = (file[name] for name in ("session", "node", "app", "dl_kbps", "mode"))
    begins = np.flatnonzero(np.diff(session, prepend=-1))
    lengths = np.diff([*begins, len(session)])
    starts = np.concatenate([b + 30 * np.arange(n // 30) for b, n in zip(begins, lengths, strict=True)])
    is_test = session[starts] % 5 == 0
    train, test = starts[~is_test], starts[is_test]
    assert (len(train), len(test)) == (4955, 1030) == (sum(dataset.train_group_sizes), dataset.num_test)
    assert dataset.train_group_sizes == np.unique(node[train], return_counts=True)[1].tolist()
    assert dataset.feature_names == ["dl_kbps", "ul_kbps", "rsrp_dbm", "snr_db", "cqi", "mode == 7"]
    assert dataset.class_names == ["Amazon_Prime", "Download", "Netflix"]
    dataset.load(np.arange(4955), np.arange(0))
    samples = dataset.train(np.arange(4955))
    rows = train[np.argsort(node[train], kind="stable")][:, None] + np.arange(30)
    assert np.array_equal(samples.y, label[rows[:, 0]])
    assert np.allclose(samples.x[..., 0], np.log1p(rate[rows]), rtol=1e-6)
    assert np.array_equal(samples.x[..., 5], mode[rows] == 7)
