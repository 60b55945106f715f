"""Text for a shell that must survive whatever a path holds."""

import shlex
import textwrap
from collections.abc import Iterable, Sequence

WIDTH = 120


def quote(text: str) -> str:
    """Quote a word where the shell would not leave it as it is."""
    return shlex.quote(text)


def path(text: str) -> str:
    """Quote a path, which no program may take for an option."""
    return quote(f"./{text}" if text.startswith("-") else text)


def assignment(name: str, text: str) -> str:
    """Set a variable of the script."""
    return f"{name}={quote(text) if text else ''}"


def array(name: str, words: Sequence[str]) -> list[str]:
    """Set an array of the script, a pair of words a line where one line is too long."""
    one = f"{name}=({' '.join(map(quote, words))})"
    if len(one) <= WIDTH and "\n" not in one:
        return [one]
    pairs = [words[start : start + 2] for start in range(0, len(words), 2)]
    return [f"{name}=(", *(f"    {' '.join(map(quote, pair))}" for pair in pairs), ")"]


def comment(text: str) -> list[str]:
    """Write a comment in lines that are not too long; what does not print becomes a question mark."""
    text = "".join(character if character.isprintable() else "?" for character in text)
    return [f"# {line}" for line in textwrap.wrap(text, WIDTH - 2, break_long_words=False, break_on_hyphens=False)]


def verbatim(lines: Iterable[str]) -> list[str]:
    """Write lines as a comment that keeps their indent."""
    return [f"#     {''.join(c if c.isprintable() else '?' for c in line)}" for line in lines]


def refuse(message: str, code: int) -> str:
    """Say something and leave; ``message`` is the inside of double quotes."""
    return f'{{ echo "{message}" >&2; exit {code}; }}'
