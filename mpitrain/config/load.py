"""From a TOML file and ``--set`` overrides to a checked configuration that knows where each value came from."""

import copy
import json
import re
import tomllib
import types
import typing
from dataclasses import dataclass
from pathlib import Path

import msgspec

from mpitrain.config.codec_names import parse_codec, parse_tensor_codec
from mpitrain.config.plain import Tree, parse_toml, printable, refuse_odd_values, shown
from mpitrain.config.schema import CodecName, Config, TensorCodecName
from mpitrain.config.unknown import refuse_unknown
from mpitrain.config.validate import check_consistency, doubts, unread_keys, with_derived
from mpitrain.errors import ConfigError


@dataclass(frozen=True)
class Resolved:
    """A configuration, and the place (file or ``--set``) of every dotted key that is not a default."""

    config: Config
    sources: dict[str, str]

    def warnings(self) -> list[str]:
        """Name the keys that were set, but that the chosen kinds do not read, and what else is hardly meant."""
        unread = unread_keys(self.config)
        ignored = [f"{key} is set, but {unread[key]} does not read it" for key in sorted(self.sources) if key in unread]
        return [*ignored, *doubts(self.config)]

    def lines(self) -> list[str]:
        """List every value as ``section.key = value``, without its source: equal for equal configurations."""
        return [
            f"{section}.{key} = {json.dumps(value)}"
            for section, values in _plain(self.config).items()
            for key, value in values.items()
        ]

    def to_toml(self) -> str:
        """Render every value that is read, with its source as a comment; the text loads to the same configuration."""
        lines: list[str] = []
        unread = unread_keys(self.config)
        for section, values in _plain(self.config).items():
            tables = {key: value for key, value in values.items() if key == "rule"}
            lines += ["", f"[{section}]"]
            for key, value in values.items():
                source = self.sources.get(f"{section}.{key}", "default")
                if key not in tables and value is not None and f"{section}.{key}" not in unread:
                    lines.append(f"{key} = {toml_value(value)}  # {printable(source)}")
            for key, items in tables.items():
                for item in typing.cast(list[Tree], items):
                    lines += ["", f"[[{section}.{key}]]", *(f"{k} = {toml_value(v)}" for k, v in item.items())]
        return "\n".join(lines[1:]) + "\n"


def load_config(path: Path, overrides: list[str] | None = None) -> Resolved:
    """Read and check a configuration.

    Parameters
    ----------
    path : Path
        TOML file.
    overrides : list of str
        ``section.key=value``; they win over the file. Values are read as TOML, else taken as text.

    Raises
    ------
    ConfigError
        Unreadable file, unknown or misspelt key, wrong type or range, or values that do not go together.
    """
    return resolve(read_config(path), printable(str(path)), overrides or [])


def read_config(path: Path) -> Tree:
    """Parse a TOML file; raises ConfigError where it cannot be read."""
    origin = printable(str(path))
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # a path with a NUL character, or bytes that are no UTF-8
        raise ConfigError(f"config: cannot read {origin}: {getattr(error, 'strerror', None) or error}") from None
    try:
        return parse_toml(text)
    except ValueError as error:
        raise ConfigError(f"config: {origin} is not TOML: {printable(str(error))}") from None


def resolve(tree: Tree, origin: str, overrides: list[str]) -> Resolved:
    """Check a parsed file with its overrides; ``origin`` names the file in messages and sources."""
    refuse_odd_values(tree, "", origin)
    tree = copy.deepcopy(tree)
    sources = dict.fromkeys(_dotted_keys(tree), origin)
    for override in overrides:
        sources[_apply_override(tree, override)] = "--set"
    refuse_unknown(tree, sources)
    config = _convert(tree, sources)
    check_consistency(config)
    return Resolved(with_derived(config), sources)


def _apply_override(tree: Tree, override: str) -> str:
    dotted, equals, text = override.partition("=")
    section, dot, key = dotted.strip().partition(".")
    if not (equals and section and dot and key):
        raise ConfigError(f"--set: expected section.key=value, got {shown(override)}")
    try:
        value = parse_toml(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    except ValueError as error:
        raise ConfigError(f"--set: {printable(dotted)}: {error}") from None
    refuse_odd_values({section: {key: value}}, "", "--set")
    table = tree.setdefault(section, {})
    if not isinstance(table, dict):
        raise ConfigError(f"config: [{section}] must be a table, got {shown(table)}")
    table[key] = value
    return f"{section}.{key}"


def _convert(tree: Tree, sources: dict[str, str]) -> Config:
    try:
        config = msgspec.convert(tree, Config, strict=False)
        _check_codecs(_plain(config), "", sources)
    except msgspec.ValidationError as error:
        message, _, where = str(error).partition(" - at ")
        dotted = where.strip("`").removeprefix("$.")
        origin = _origin(dotted, sources)
        got = _look_up(tree, dotted)
        if _is_codec(dotted):
            _check_codec(got, dotted, sources)
        choices = _choices(dotted)
        expected = f"expected one of {choices}" if choices else message[0].lower() + message[1:].partition(", got")[0]
        suffix = "" if got is None else f", got {shown(got)}"
        raise ConfigError(f"{origin}: {dotted}: {expected.replace('`', '')}{suffix}") from None
    return config


def _check_codecs(node: object, dotted: str, sources: dict[str, str]) -> None:
    """Refuse codecs that there are not, wherever the configuration names one."""
    if isinstance(node, dict):
        for key, value in node.items():
            _check_codecs(value, f"{dotted}.{key}" if dotted else str(key), sources)
    elif isinstance(node, list | tuple):
        for index, value in enumerate(node):
            _check_codecs(value, f"{dotted}[{index}]", sources)
    elif isinstance(node, str) and _is_codec(dotted):
        _check_codec(node, dotted, sources)


def _check_codec(name: object, dotted: str, sources: dict[str, str]) -> None:
    try:
        (parse_tensor_codec if _type_of(dotted) == TensorCodecName else parse_codec)(name)
    except ConfigError as error:
        raise ConfigError(f"{_origin(dotted, sources)}: {dotted}: {error}") from None


def _origin(dotted: str, sources: dict[str, str]) -> str:
    return sources.get(dotted.partition("[")[0], "config")


def _is_codec(dotted: str) -> bool:
    return _type_of(dotted) in (CodecName, TensorCodecName)


def _choices(dotted: str) -> str:
    """List the values of a key that takes one of a few words."""
    kind = _type_of(dotted)
    words = typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()
    return ", ".join(json.dumps(word) for word in words)


def _type_of(dotted: str) -> object:
    """Return the type of a key; of one that may be left out, or of a list, the type of what is given."""
    kind: object = Config
    for part in re.sub(r"\[\d+\]", "", dotted).split("."):
        kind = typing.get_type_hints(kind, include_extras=True).get(part)
        kind = typing.get_args(kind)[0] if typing.get_origin(kind) in (tuple, typing.Union, types.UnionType) else kind
    return kind


def _look_up(tree: Tree, dotted: str) -> object:
    node: object = tree
    for part in re.findall(r"\w+", dotted):
        if isinstance(node, dict):
            node = node.get(part)
        elif isinstance(node, list) and part.isdigit():
            node = node[int(part)]
    return node


def _dotted_keys(tree: Tree) -> list[str]:
    inner = [f"{section}.{key}" for section, table in tree.items() if isinstance(table, dict) for key in table]
    return [*tree, *inner]


def _plain(config: Config) -> dict[str, Tree]:
    return typing.cast(dict[str, Tree], msgspec.to_builtins(config))


def toml_value(value: object) -> str:
    """Render a plain value as TOML."""
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # which JSON allows and TOML does not
