"""Text, character by character: a user's file, or the topics of Python's own help.

The last ``test_fraction`` of the characters are the test part. What lies before is cut into sections (the groups), and
every section into windows: each character but the first of a window is to be predicted from those before it.
"""

import codecs
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mpitrain.arrays import Ints
from mpitrain.config.schema import DataConfig
from mpitrain.data.dataset import NO_TARGET, Dataset, Samples, Split, find_held
from mpitrain.data.problems import stamp_of
from mpitrain.errors import DataError
from mpitrain.partition import bounds, split_sizes

try:
    from pydoc_data.topics import topics
except ImportError:  # some distributions leave it out
    topics = {}  # type: ignore[misc]

TOPICS = "pydoc_data.topics"
"""Module of the standard library whose texts, in the order of their names, stand in for a file."""

PIECE_BYTES = 1 << 20
CODES = 0x110000
"""Code points that Unicode has."""

_Codes = npt.NDArray[np.uint32]
_Starts = npt.NDArray[np.int64]


def open_text(config: DataConfig) -> Dataset:
    """Read and check the text once, and lay out its windows; no characters stay in memory before `Dataset.load`.

    Parameters
    ----------
    config : DataConfig
        ``path`` (empty: the topics), ``test_fraction``, ``stations`` (sections), ``window``, ``stride``.

    Raises
    ------
    DataError
        The file is missing, not UTF-8, or too short for its sections or its test part.
    """
    text = scan(str(Path(config.path).expanduser()) if config.path else "")
    window = config.window
    num_test = round(text.size * config.test_fraction)
    train = _train_windows(text, text.size - num_test, config)
    # Each test character is the target of one window. The last window is moved back to be a whole one, too, and skips
    # what the one before it has predicted.
    test = np.arange(text.size - num_test - 1, text.size - 1, window, dtype=np.int64)
    test[-1] = text.size - window - 1
    skipped = len(test) * window - num_test
    return Dataset(
        source=TextSource(text, window, {"train": np.concatenate(train), "test": test}, skipped),
        task="lm",
        input_shape=(window,),
        num_outputs=len(text.vocabulary),
        class_names=[chr(code) for code in text.vocabulary],
        feature_names=[],
        group_names=[f"section {section}" for section in range(len(train))],
        train_group_sizes=[len(starts) for starts in train],
        num_test=len(test),
        vocabulary=len(text.vocabulary),
        content=text.sha256,
    )


@dataclass(frozen=True)
class Text:
    """What one pass over a text found.

    Attributes
    ----------
    path : str
        File; empty for the topics.
    size : int
        Characters.
    vocabulary : (V,) uint32
        Ascending code points that occur.
    sha256 : str
        Hash of the bytes.
    """

    path: str
    size: int
    vocabulary: _Codes
    sha256: str

    @property
    def name(self) -> str:
        """What messages call it."""
        return self.path or TOPICS


def scan(path: str) -> Text:
    """Count the characters of a text and list the different ones; raises DataError as `open_text`."""
    characters = Characters(path)
    seen = np.zeros(CODES, np.bool_)
    size = 0
    for codes in characters:
        seen[codes] = True
        size += len(codes)
    return Text(path, size, np.flatnonzero(seen).astype(np.uint32), characters.sha256())


class Characters:
    """Iterates once over a text: (n,) uint32 arrays of code points.

    Raises
    ------
    DataError
        While iterating: the file cannot be read, or is not UTF-8.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._digest = hashlib.sha256()

    def sha256(self) -> str:
        """Hash the bytes that were read so far."""
        return self._digest.hexdigest()

    def __iter__(self) -> Iterator[_Codes]:
        decoder = codecs.getincrementaldecoder("utf-8")()
        taken = 0
        for piece in _pieces(self._path):
            self._digest.update(piece)
            begin = taken - len(decoder.getstate()[0])
            taken += len(piece)
            try:
                text = decoder.decode(piece, final=not piece)
            except UnicodeDecodeError as error:
                raise DataError(
                    f'data: "{self._path}": byte {begin + error.start}: expected UTF-8 text, got '
                    f"0x{error.object[error.start]:02x} ({error.reason}); save the file as UTF-8"
                ) from None
            yield np.frombuffer(text.encode("utf-32-le"), "<u4").astype(np.uint32, copy=False)


@dataclass(frozen=True)
class TokenBlock:
    """Windows of tokens in memory; those that overlap share their tokens.

    Attributes
    ----------
    index : (n,) int64
        Global indices, ascending.
    tokens : (R,) unsigned integers
        Positions in the vocabulary, in the smallest type that holds them.
    start : (n,) int64
        First token of each sample.
    window : int
        Tokens of a sample; one more is held, as the last target.
    skipped : (n,) int64
        Targets at the start of a sample that do not count: another sample has them.
    """

    index: Ints
    tokens: Ints
    start: Ints
    window: int
    skipped: Ints

    def take(self, indices: Ints) -> Samples:
        """Copy samples by global index, in the order asked for (IndexError where one is not in memory)."""
        position = find_held(self.index, indices)
        tokens = self.tokens[self.start[position][:, None] + np.arange(self.window + 1)]
        y = tokens[:, 1:].astype(np.int32)
        y[np.arange(self.window) < self.skipped[position][:, None]] = NO_TARGET
        return Samples(tokens[:, :-1], y)


class TextSource:
    """Reads the characters of any windows of the text.

    Parameters
    ----------
    text : Text
        What `scan` found.
    window : int
        Characters of a sample.
    starts : dict of (n,) int64
        First character of each window of both splits, ascending.
    skipped : int
        Leading targets of the last test window that do not count.
    """

    def __init__(self, text: Text, window: int, starts: dict[Split, _Starts], skipped: int) -> None:
        self._text, self._window, self._starts, self._skipped = text, window, starts, skipped

    def read(self, split: Split, indices: Ints) -> TokenBlock:
        """Read the text again, and keep the characters of these windows alone."""
        first = self._starts[split][indices]
        edges = np.zeros(self._text.size + 1, np.int32)
        edges[first] += 1
        edges[first + self._window + 1] -= 1
        keep = np.cumsum(edges[:-1]) > 0
        moved = np.cumsum(keep) - 1
        is_last = (split == "test") & (indices == len(self._starts[split]) - 1)
        return TokenBlock(indices, self._read_tokens(keep), moved[first], self._window, is_last * self._skipped)

    def _read_tokens(self, keep: npt.NDArray[np.bool_]) -> Ints:
        vocabulary, size = self._text.vocabulary, self._text.size
        token_of = np.zeros(CODES, np.min_scalar_type(len(vocabulary) - 1))
        token_of[vocabulary] = np.arange(len(vocabulary))
        kept, taken = [token_of[:0]], 0
        characters = Characters(self._text.path)
        for codes in characters:
            inside = codes[: size - taken]
            kept.append(token_of[inside[keep[taken : taken + len(inside)]]])
            taken += len(inside)
        if characters.sha256() != self._text.sha256:
            raise DataError(f'data: "{self._text.name}" changed while it was read; start again when it is complete')
        return np.concatenate(kept)


def _train_windows(text: Text, size: int, config: DataConfig) -> list[_Starts]:
    """First characters of the windows of each section; a window and its last target stay within the section."""
    if not 0 < size < text.size:
        raise DataError(
            f'data: "{text.name}": data.test_fraction = {config.test_fraction} of {text.size} characters leaves '
            f"{size} to train and {text.size - size} to test on; provide more text or change data.test_fraction"
        )
    span = config.window + 1
    sections = bounds(split_sizes(size, config.stations))
    shortest = size // config.stations
    if shortest < span:
        remedies = [f"set data.stations to at most {size // span}"] if size >= span else []
        remedies += [f"set data.window to at most {shortest - 1}"] if shortest > 1 else []
        raise DataError(
            f'data: "{text.name}": {size} characters to train on in {config.stations} sections of data.stations are '
            f"{shortest} a section, but a window and its last target take {span}; "
            f"{' or '.join(remedies) or 'provide more text'}"
        )
    return [np.arange(begin, end - span + 1, config.stride or config.window, dtype=np.int64) for begin, end in sections]


def _pieces(path: str) -> Iterator[bytes]:
    """Read the bytes in pieces; the last one, and only that, is empty."""
    if not path:
        if not topics:
            raise DataError(f"data: this Python has no {TOPICS}; set data.path to a text of your own")
        yield "".join(topics[name] for name in sorted(topics)).encode()
        yield b""
        return
    stamp_of(Path(path))
    try:
        with open(path, "rb") as file:
            while piece := file.read(PIECE_BYTES):
                yield piece
    except OSError as error:
        raise DataError(f'data: cannot read "{path}": {error.strerror}; correct data.path') from None
    yield b""
