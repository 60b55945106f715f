"""Text for a shell that must survive whatever a path or a setting holds."""

import re
import textwrap
from collections.abc import Iterable, Sequence

WIDTH = 120

PLAIN = re.compile(r"[A-Za-z0-9@%+=:,./_-]+")


def quote(text: str) -> str:
    """Quote a word where the shell would not leave it as it is.

    In double quotes, with a backslash before what means something in them: single ones around a dollar sign look like
    a mistake to shellcheck.
    """
    return text if PLAIN.fullmatch(text) else '"' + re.sub(r'([\\$"`])', r"\\\1", text) + '"'


def path_text(text: str) -> str:
    """Keep a relative path from being taken for an option."""
    return f"./{text}" if text.startswith("-") else text


def assignment(name: str, text: str) -> str:
    """Set a variable of the script."""
    return f"{name}={quote(text)}"


def options(overrides: Iterable[str]) -> list[str]:
    """Write ``section.key=value`` items as quoted options."""
    return [word for item in overrides for word in ("--set", quote(item))]


def array(name: str, words: Sequence[str]) -> list[str]:
    """Set an array of the script to words that are quoted already, on several lines where one would be too long.

    An option stays on one line with its value.
    """
    one = f"{name}=({' '.join(words)})"
    if len(one) <= WIDTH:
        return [one]
    rows: list[str] = []
    for word, before in zip(words, ["", *words], strict=False):
        if before.startswith("--") and not word.startswith("--"):
            rows[-1] += f" {word}"
        else:
            rows.append(f"    {word}")
    return [f"{name}=(", *rows, ")"]


def comment(text: str) -> list[str]:
    """Write a comment, in lines that are not too long."""
    lines = textwrap.wrap(_printable(text), WIDTH - 2, break_long_words=False, break_on_hyphens=False)
    return [f"# {line}" for line in lines]


def verbatim(lines: Iterable[str]) -> list[str]:
    """Write lines as a comment, indented and as they are."""
    return [f"#     {_printable(line)}".rstrip() for line in lines]


def _printable(text: str) -> str:
    """Keep a comment on its line: what does not print becomes a question mark."""
    return "".join(character if character.isprintable() else "?" for character in text)


REFUSE = 'refuse() { echo "$2" >&2; exit "$1"; }'
"""The function of a script that does it."""


def refuse(message: str, code: int) -> str:
    """Write what says a message, the inside of double quotes, and leaves."""
    return f'refuse {code} "{message}"'
