"""From a TOML file and ``--set`` overrides to a checked configuration that knows where each value came from."""

import copy
import difflib
import json
import re
import tomllib
import types
import typing
from dataclasses import dataclass
from pathlib import Path

import msgspec

from mpitrain.config.schema import Config
from mpitrain.config.validate import check_consistency, unread_keys, with_derived
from mpitrain.errors import ConfigError

Tree = dict[str, object]

ALIASES = {
    "learning_rate": "optim.lr",
    "epochs": "train.steps",
    "num_epochs": "train.steps",
    "max_steps": "train.steps",
    "num_layers": "model.layers",
    "num_heads": "model.heads",
    "hidden_size": "model.d_model",
    "optimizer": "optim.kind",
    "compression": "exchange.codec",
    "output_dir": "run.folder",
}
"""Names that other programs give to these keys: what a user is likely to try."""


@dataclass(frozen=True)
class Resolved:
    """A configuration, and the place (file or ``--set``) of every dotted key that is not a default."""

    config: Config
    sources: dict[str, str]

    def warnings(self) -> list[str]:
        """Name the keys that were set, but that the chosen kinds do not read."""
        unread = unread_keys(self.config)
        return [f"{key} is set, but {unread[key]} does not read it" for key in sorted(self.sources) if key in unread]

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
                    lines.append(f"{key} = {toml_value(value)}  # {_comment(source)}")
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
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config: cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"config: {path} is not TOML: {error}") from None
    return resolve(tree, str(path), overrides or [])


def resolve(tree: Tree, origin: str, overrides: list[str]) -> Resolved:
    """Check a parsed file with its overrides; ``origin`` names the file in messages and sources."""
    tree = copy.deepcopy(tree)
    sources = dict.fromkeys(_dotted_keys(tree), origin)
    for override in overrides:
        sources[_apply_override(tree, override)] = "--set"
    _refuse_unknown(tree, sources)
    config = _convert(tree, sources)
    check_consistency(config)
    return Resolved(with_derived(config), sources)


def _apply_override(tree: Tree, override: str) -> str:
    dotted, equals, text = override.partition("=")
    section, dot, key = dotted.strip().partition(".")
    if not (equals and section and dot and key):
        raise ConfigError(f"--set: expected section.key=value, got {override!r}")
    try:
        value: object = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    table = tree.setdefault(section, {})
    if not isinstance(table, dict):
        raise ConfigError(f"config: [{section}] must be a table, got {table!r}")
    table[key] = value
    return f"{section}.{key}"


def _refuse_unknown(tree: Tree, sources: dict[str, str]) -> None:
    known = _known_keys()
    dotted = [f"{section}.{key}" for section, keys in known.items() for key in keys]
    for section, table in tree.items():
        if section not in known:
            homes = [name for name in dotted if name.endswith(f".{section.replace('-', '_')}")]
            near = homes or difflib.get_close_matches(section, known, 1) or _near_key(section, dotted)
            raise ConfigError(f"{_origin(section, sources)}: unknown section or key {section!r}{_hint(near)}")
        if not isinstance(table, dict):
            raise ConfigError(f"{sources.get(section, 'config')}: [{section}] must be a table, got {table!r}")
        for key in table:
            if key not in known[section]:
                here = difflib.get_close_matches(key.replace("-", "_"), known[section], 1)
                near = [f"{section}.{here[0]}"] if here else _near_key(key, dotted)
                origin = sources.get(f"{section}.{key}", "config")
                raise ConfigError(f"{origin}: unknown key {section}.{key}{_hint(near)}")


def _origin(section: str, sources: dict[str, str]) -> str:
    """Name the place that mentions a section first."""
    return next((origin for key, origin in sources.items() if key.partition(".")[0] == section), "config")


def _near_key(key: str, dotted: list[str]) -> list[str]:
    """Find the key that was probably meant: the most alike name of any section, or of another program."""
    names = {name.partition(".")[2]: name for name in dotted} | ALIASES
    return [names[near] for near in difflib.get_close_matches(key.replace("-", "_").lower(), names, 1)]


def _hint(near: list[str]) -> str:
    return f"; did you mean {near[0]}?" if near else "; mpitrain reference lists the keys"


def _convert(tree: Tree, sources: dict[str, str]) -> Config:
    try:
        return msgspec.convert(tree, Config, strict=False)
    except msgspec.ValidationError as error:
        message, _, where = str(error).partition(" - at ")
        dotted = where.strip("`").removeprefix("$.")
        origin = sources.get(dotted.partition("[")[0], "config")
        got = _look_up(tree, dotted)
        choices = _choices(dotted)
        expected = f"expected one of {choices}" if choices else message[0].lower() + message[1:].partition(", got")[0]
        suffix = "" if got is None else f", got {got!r}"
        raise ConfigError(f"{origin}: {dotted}: {expected.replace('`', '')}{suffix}") from None


def _choices(dotted: str) -> str:
    """List the values of a key that takes one of a few words."""
    kind: object = Config
    for part in re.sub(r"\[\d+\]", "", dotted).split("."):
        kind = typing.get_type_hints(kind).get(part)
        kind = typing.get_args(kind)[0] if typing.get_origin(kind) in (tuple, typing.Union, types.UnionType) else kind
    words = typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()
    return ", ".join(json.dumps(word) for word in words)


def _look_up(tree: Tree, dotted: str) -> object:
    node: object = tree
    for part in re.findall(r"\w+", dotted):
        if isinstance(node, dict):
            node = node.get(part)
        elif isinstance(node, list) and part.isdigit():
            node = node[int(part)]
    return node


def _known_keys() -> dict[str, list[str]]:
    return {section: list(typing.get_type_hints(kind)) for section, kind in typing.get_type_hints(Config).items()}


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


def _comment(source: str) -> str:
    """Keep a source on its line."""
    return "".join(character if character.isprintable() else "?" for character in source)
