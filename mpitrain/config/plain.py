"""Text from outside as plain values: TOML with limits, and values as messages show them."""

import tomllib

from mpitrain.errors import ConfigError

Tree = dict[str, object]

MAX_DEPTH = 8
"""Tables and lists inside each other; no key needs more than three."""

MAX_SHOWN = 100


def parse_toml(text: str) -> Tree:
    """Parse TOML.

    Raises
    ------
    ValueError
        Says why it is none: the syntax, a number without end, or brackets without end.
    """
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("brackets or dotted keys are nested too deeply") from None
    except tomllib.TOMLDecodeError:
        raise
    except ValueError:  # Python's own limit to the digits of an integer, or a date that no calendar has
        raise ValueError("a number has too many digits, or a date does not exist") from None


def refuse_odd_values(value: object, where: str, origin: str, depth: int = 0) -> None:
    """Refuse what TOML or a command line can hold and no key can take.

    Raises
    ------
    ConfigError
        An integer that 64 bits do not hold, text that no file system takes, or deeper nesting than any key needs.
    """
    if depth > MAX_DEPTH:
        raise ConfigError(f"{origin}: {where.partition('.')[0]}: brackets are nested too deeply")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ConfigError(
            f"{origin}: {where}: expected an integer of at most 63 bits and a sign, got {value.bit_length()}"
        )
    if isinstance(value, str):
        _refuse_odd_text(value, where, origin)
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        _refuse_odd_text(str(key), printable(where) or "key", origin)
        refuse_odd_values(each, f"{where}.{key}" if where else str(key), origin, depth + 1)


def _refuse_odd_text(text: str, where: str, origin: str) -> None:
    if "\0" in text:
        raise ConfigError(f"{origin}: {where}: expected text without NUL characters, got {shown(text)}")
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ConfigError(f"{origin}: {where}: expected UTF-8, got {shown(text)}")


def shown(value: object) -> str:
    """Render a value for a message; a long one is cut."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}… ({len(text):,} characters)"


def printable(text: str) -> str:
    """Keep a name or a source on its line, and within it."""
    text = "".join(character if character.isprintable() else "?" for character in text)
    return text if len(text) <= 4 * MAX_SHOWN else text[: 4 * MAX_SHOWN] + "…"
