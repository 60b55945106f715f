"""Rules of the exchange that serve exactly the tensors they are meant for."""

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from mpitrain.config.load import toml_value
from mpitrain.config.schema import RuleConfig

NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
"""Part of a name that counts layers."""

SPECIAL = re.compile(r"[*?[]")
"""What a pattern does not take as it is."""


def make_rules(codecs: Mapping[str, str], names: Sequence[str]) -> list[RuleConfig]:
    """Write rules that give tensors their codecs, and fit no other tensor.

    Tensors that differ only in the number of their layer share a rule where all that it fits have the same codec.

    Parameters
    ----------
    codecs : mapping
        Codecs of the tensors that need a rule.
    names : list of str
        All tensors of the model.
    """
    rules: dict[str, str] = {}
    for name, codec in codecs.items():
        shared = NUMBER.sub("*", escaped(name))
        fitted = [other for other in names if fnmatchcase(other, shared)]
        alike = all(codecs.get(other) == codec for other in fitted)
        rules.setdefault(shared if alike and len(fitted) > 1 else escaped(name), codec)
    return [RuleConfig(match=match, codec=codec) for match, codec in rules.items()]


def escaped(name: str) -> str:
    """Write a pattern that fits this name alone."""
    return SPECIAL.sub(lambda found: f"[{found[0]}]", name)


def rules_toml(rules: Sequence[RuleConfig]) -> str:
    """Render rules as tables that can stand at the end of a configuration."""
    tables = [
        f"[[exchange.rule]]\nmatch = {toml_value(rule.match)}\ncodec = {toml_value(rule.codec)}\n" for rule in rules
    ]
    return "\n".join(tables)
