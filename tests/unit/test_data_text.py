"""Text: which characters are trained and tested on, what a rank keeps, and every way in which a file can be wrong."""

import hashlib
import math
import os
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pytest
from mpi4py import MPI

from mpitrain.collectives.base import Transport
from mpitrain.comm.grid import Axis
from mpitrain.config.schema import DataConfig
from mpitrain.data import text as text_module
from mpitrain.data.dataset import NO_TARGET
from mpitrain.data.open import open_dataset
from mpitrain.data.sampler import Sampler, split_test
from mpitrain.data.text import PIECE_BYTES, scan
from mpitrain.errors import DataError, ExitCode
from mpitrain.parallel.tensor import TensorParallel
from mpitrain.train.evaluate import score
from mpitrain.train.loss import TaskLoss

TEXT = "".join(chr(97 + (7 * i + i * i // 5) % 23) for i in range(200)) + "é语𝄞" * 5


def write(folder, content=TEXT):
    path = folder / "my text.txt"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def opened(path, **changes):
    config = DataConfig(**({"kind": "text", "path": str(path), "window": 8, "stations": 3} | changes))
    return open_dataset(config, "lm", 0)


def loaded(path, **changes):
    dataset = opened(path, **changes)
    dataset.load(np.arange(sum(dataset.train_group_sizes)), np.arange(dataset.num_test))
    return dataset


def spell(dataset, tokens):
    return "".join(dataset.class_names[token] for token in tokens)


def refusal_of(path, **changes):
    with pytest.raises(DataError) as caught:
        loaded(path, **changes)
    assert caught.value.exit_code == ExitCode.DATA == 3
    assert str(path) in str(caught.value)
    return str(caught.value)


# Windows.


def test_training_windows_are_the_text_itself_section_after_section(tmp_path):
    dataset = loaded(write(tmp_path))
    assert dataset.class_names == sorted(set(TEXT))
    assert dataset.vocabulary == dataset.num_outputs == len(set(TEXT))
    assert (dataset.task, dataset.input_shape, dataset.feature_names) == ("lm", (8,), [])
    train = len(TEXT) - round(len(TEXT) * 0.1)
    edges = [0, -(-train // 3), -(-2 * train // 3), train]
    starts = [range(a, b - 8, 8) for a, b in zip(edges, edges[1:], strict=False)]
    assert dataset.train_group_sizes == [len(section) for section in starts]
    assert dataset.group_names == ["section 0", "section 1", "section 2"]
    samples = dataset.train(np.arange(sum(dataset.train_group_sizes)))
    for x, y, start in zip(samples.x, samples.y, [s for section in starts for s in section], strict=True):
        assert spell(dataset, x) == TEXT[start : start + 8]
        assert spell(dataset, y) == TEXT[start + 1 : start + 9]


@pytest.mark.parametrize("stride", [1, 3, 8, 11])
def test_windows_overlap_by_the_stride_and_stay_in_their_section(tmp_path, stride):
    dataset = loaded(write(tmp_path), stride=stride, stations=1)
    train = len(TEXT) - round(len(TEXT) * 0.1)
    starts = range(0, train - 8, stride)
    samples = dataset.train(np.arange(len(starts)))
    assert dataset.train_group_sizes == [len(starts)]
    assert [spell(dataset, x) for x in samples.x] == [TEXT[s : s + 8] for s in starts]
    assert max(starts) + 8 < train  # the last target is no test character


@pytest.mark.parametrize("window", [1, 2, 3, 7, 20, 21, 22, 50])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_every_test_character_is_predicted_once_on_any_number_of_ranks(tmp_path, window, ranks):
    path = write(tmp_path)
    dataset = opened(path, window=window, stations=1)
    num_test = round(len(TEXT) * 0.1)
    predicted = []
    for rank in range(ranks):
        part = split_test(dataset.num_test, ranks, rank)
        dataset.load(np.arange(2), part)
        samples = dataset.test(part)
        for x, y in zip(samples.x, samples.y, strict=True):
            counts = y != NO_TARGET
            predicted += y[counts].tolist()
            assert x[1:][counts[:-1]].tolist() == y[:-1][counts[:-1]].tolist()
    assert spell(dataset, predicted) == TEXT[-num_test:]


def test_the_first_test_character_is_predicted_from_the_last_training_character(tmp_path):
    dataset = loaded(write(tmp_path))
    first = dataset.test(np.array([0]))
    begin = len(TEXT) - round(len(TEXT) * 0.1)
    assert spell(dataset, first.x[0]) == TEXT[begin - 1 : begin + 7]
    assert spell(dataset, first.y[0]) == TEXT[begin : begin + 8]


def test_without_a_path_the_topics_of_the_help_are_read():
    dataset = loaded("", window=64, stations=8)
    everything = "".join(topics[name] for name in sorted(topics))
    assert dataset.class_names == sorted(set(everything))
    assert dataset.content == hashlib.sha256(everything.encode()).hexdigest()
    assert spell(dataset, dataset.train(np.array([0])).x[0]) == everything[:64]
    last = dataset.test(np.array([dataset.num_test - 1]))
    assert spell(dataset, last.y[0][last.y[0] != NO_TARGET]) in everything
    assert everything.endswith(spell(dataset, last.x[0][1:]) + spell(dataset, last.y[0][-1:]))


def test_a_python_without_the_topics_is_told(monkeypatch):
    monkeypatch.setattr(text_module, "topics", {})
    with pytest.raises(DataError, match=r"this Python has no pydoc_data.topics; set data.path"):
        opened("")


# Memory.


def test_a_rank_keeps_the_characters_of_its_own_windows_alone(tmp_path):
    content = TEXT * 20
    path = write(tmp_path, content)
    for rank in range(3):
        dataset = opened(path)
        sampler = Sampler(dataset.train_group_sizes, 4, ranks=3, rank=rank, placement="station", seed=0)
        dataset.load(sampler.owned, split_test(dataset.num_test, 3, rank))
        held = dataset._blocks["train"].tokens
        assert held.dtype == np.uint8
        assert len(held) == 8 * len(sampler.owned) + 1
        assert len(held) < 0.34 * 0.9 * len(content)
        with pytest.raises(IndexError, match="was not loaded"):
            dataset.train(np.setdiff1d(np.arange(sum(dataset.train_group_sizes)), sampler.owned)[:1])
    assert dataset.samples_read == len(sampler.owned) + len(split_test(dataset.num_test, 3, 2))


@pytest.mark.parametrize(("letters", "dtype"), [(256, np.uint8), (257, np.uint16)])
def test_tokens_are_as_small_as_the_vocabulary_allows(tmp_path, letters, dtype):
    content = "".join(chr(0x4E00 + i) for i in range(letters)) * 2
    dataset = loaded(write(tmp_path, content), stations=1)
    samples = dataset.train(np.array([letters // 8]))
    assert samples.x.dtype == dtype
    start = letters // 8 * 8
    assert spell(dataset, samples.x[0]) == content[start : start + 8]
    assert samples.y.max() < letters


# Reading.


@pytest.mark.parametrize("shift", range(4))
def test_characters_that_lie_across_two_pieces_are_whole(tmp_path, monkeypatch, shift):
    monkeypatch.setattr(text_module, "PIECE_BYTES", 7)
    content = "a" * shift + TEXT + "é语𝄞" * 9
    dataset = loaded(write(tmp_path, content), stations=1)
    assert dataset.class_names == sorted(set(content))
    samples = dataset.train(np.arange(dataset.train_group_sizes[0]))
    assert "".join(spell(dataset, x) for x in samples.x) == content[: 8 * len(samples)]


def test_line_ends_are_kept(tmp_path):
    dataset = loaded(write(tmp_path, "one\r\ntwo\rthree\n" * 10))
    assert {"\r", "\n"} <= set(dataset.class_names)


@pytest.mark.parametrize("at", [0, 3, 11, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 5])
def test_bytes_that_are_not_utf8_are_told_with_their_place(tmp_path, at):
    message = refusal_of(write(tmp_path, b"a" * at + b"\xff" + b"b" * 300))
    assert f"byte {at}: expected UTF-8 text, got 0xff" in message
    assert "save the file as UTF-8" in message


@pytest.mark.parametrize("cut", [1, 2, 3])
@pytest.mark.parametrize("piece", [5, PIECE_BYTES])
def test_a_character_that_is_cut_off_is_told_with_its_place(tmp_path, monkeypatch, cut, piece):
    monkeypatch.setattr(text_module, "PIECE_BYTES", piece)
    message = refusal_of(write(tmp_path, ("a" * 301 + "𝄞").encode()[:-cut]))
    assert "byte 301: expected UTF-8 text, got 0xf0" in message


def test_empty_missing_and_unreadable_files(tmp_path):
    assert "of 0 characters leaves 0 to train and 0 to test on" in refusal_of(write(tmp_path, ""))
    os.mkfifo(tmp_path / "pipe")
    for other in (tmp_path / "nowhere.txt", tmp_path, tmp_path / "pipe", Path("/dev/zero")):
        assert f'there is no file "{other}"' in refusal_of(other)


def test_a_text_too_short_for_a_test_part_or_a_window(tmp_path):
    message = refusal_of(write(tmp_path, "abcd"), stations=1, window=1)
    assert "data.test_fraction = 0.1 of 4 characters leaves 4 to train and 0 to test on" in message
    message = refusal_of(write(tmp_path, "abcd"), stations=1, window=1, test_fraction=0.99)
    assert "leaves 0 to train and 4 to test on" in message


def test_sections_shorter_than_a_window_name_what_would_do(tmp_path):
    path = write(tmp_path, "ab" * 20)  # 36 to train on
    assert loaded(path, stations=4).train_group_sizes == [1, 1, 1, 1]
    message = refusal_of(path, stations=5)
    assert "36 characters to train on in 5 sections of data.stations are 7 a section" in message
    assert "take 9; set data.stations to at most 4 or set data.window to at most 6" in message
    assert loaded(path, stations=5, window=6).train_group_sizes == [1] * 5
    assert "set data.window to at most 35" in refusal_of(path, stations=1, window=36)
    assert refusal_of(path, stations=40, window=40).endswith("take 41; provide more text")


@pytest.mark.parametrize("change", ["other letters", "same letters", "longer", "shorter", "gone"])
def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path, change):
    path = write(tmp_path)
    dataset = opened(path)
    new = {"other letters": "Ω" + TEXT[1:], "same letters": TEXT[1] + TEXT[0] + TEXT[2:]}
    new |= {"longer": TEXT + "a", "shorter": TEXT[:-1]}
    if change == "gone":
        os.remove(path)
    else:
        write(tmp_path, new[change])
    with pytest.raises(DataError, match="there is no file" if change == "gone" else "changed while it was read"):
        dataset.load(np.arange(2), np.arange(1))


def test_the_same_text_has_the_same_content_and_another_one_has_not(tmp_path):
    path = write(tmp_path)
    first = scan(str(path))
    assert first.sha256 == hashlib.sha256(TEXT.encode()).hexdigest()
    assert first.size == len(TEXT)
    write(tmp_path, TEXT[1] + TEXT[0] + TEXT[2:])
    assert scan(str(path)).sha256 != first.sha256


# Loss: a mean over tokens.

OF_TOKENS = TaskLoss("lm", TensorParallel(Axis(MPI.COMM_SELF, "tensor"), Transport()), 7)


def test_d04_gradients_of_unequal_ranks_add_up_to_the_mean_over_all_tokens():
    rng = np.random.default_rng(0)
    logits, y = rng.standard_normal((5, 4, 7)), rng.integers(0, 7, (5, 4)).astype(np.int32)
    whole = OF_TOKENS(logits, y, 5)
    parts = [OF_TOKENS(logits[part], y[part], 5) for part in (slice(0, 4), slice(4, 5))]
    assert np.allclose(np.concatenate([part.dout for part in parts]), whole.dout, rtol=0, atol=1e-15)
    assert sum(part.weight for part in parts) == whole.weight == 20
    assert sum(part.loss_sum for part in parts) == pytest.approx(whole.loss_sum, rel=1e-14)
    probability = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    assert np.allclose(whole.dout, (probability - np.eye(7)[y]) / 20, rtol=0, atol=1e-15)


def test_d04_targets_that_do_not_count_leave_loss_weight_and_gradient():
    rng = np.random.default_rng(1)
    logits, y = rng.standard_normal((2, 4, 7)), rng.integers(0, 7, (2, 4)).astype(np.int32)
    y[1, :3] = NO_TARGET
    result = OF_TOKENS(logits, y, 2)
    log_p = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    expected = -sum(log_p[b, t, y[b, t]] for b in range(2) for t in range(4) if y[b, t] >= 0)
    assert result.weight == 5
    assert result.loss_sum == pytest.approx(expected, rel=1e-13)
    assert (result.dout[1, :3] == 0).all()
    assert (result.dout[1, 3] != 0).all()
    measured = score("lm", result.loss_sum, result.weight, result.metric_sum)
    assert measured.name == "bits_per_char"
    assert measured.loss == pytest.approx(expected / 5)
    assert measured.metric == pytest.approx(expected / 5 / math.log(2))


def test_a_rank_without_samples_has_no_loss():
    result = OF_TOKENS(np.zeros((0, 4, 7), np.float32), np.zeros((0, 4), np.int32), 3)
    assert (result.loss_sum, result.weight, result.dout.shape) == (0, 0, (0, 4, 7))
    assert score("lm", 0.0, 0.0, 0.0).metric == 0
