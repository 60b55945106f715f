"""Names of codecs, as configurations, rules, cells and the library write them: ``int8``, ``topk-100``, ``ecq-20dB``.

Known here and not in `mpitrain.codecs`, so that a configuration is checked without the kernels.
"""

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from mpitrain.config.plain import shown
from mpitrain.errors import ConfigError


@dataclass(frozen=True)
class Parameter:
    """A number that may follow a name, behind a dash.

    Attributes
    ----------
    option : str
        Argument of the codec's constructor.
    letter : str
        Stands for the number where the form is shown.
    unit : str
        What follows the number.
    least, most : float
        Bounds.
    whole : bool
        Whether it is a whole number.
    """

    option: str
    letter: str
    unit: str
    least: float
    most: float
    whole: bool = False

    @property
    def form(self) -> str:
        """What follows the dash."""
        return self.letter + self.unit

    @property
    def range(self) -> str:
        """Which numbers there may be."""
        return f"{'whole ' * self.whole}{self.letter} from {self.least:g} to {self.most:,.15g}"

    def read(self, text: str) -> float | None:
        """Read what follows the dash; None where it has another form or is out of bounds."""
        found = re.fullmatch(rf"([0-9]{{1,9}}{'' if self.whole else r'(?:[.][0-9]{1,9})?'}){self.unit}", text)
        number = float(found[1]) if found else -1.0
        if not self.least <= number <= self.most:
            return None
        return int(number) if self.whole else number


@dataclass(frozen=True)
class CodecKind:
    """What a configuration must know of a codec.

    Attributes
    ----------
    parameters : tuple of Parameter
        One of them may follow the name.
    stochastic : bool
        Whether it can round at random.
    coarse : bool
        Whether most of a value is lost: so biased that it needs a feedback of what was lost.
    """

    parameters: tuple[Parameter, ...] = ()
    stochastic: bool = False
    coarse: bool = False


KINDS: dict[str, CodecKind] = {
    "raw": CodecKind(),
    "fp16": CodecKind(),
    "bf16": CodecKind(),
    "int8": CodecKind(stochastic=True),
    "int4": CodecKind(stochastic=True),
    "int2": CodecKind(coarse=True),
    "sign": CodecKind(coarse=True),
    "topk": CodecKind((Parameter("one_in", "N", "", 2, 100_000, whole=True),), coarse=True),
    "ecq": CodecKind((Parameter("bits", "BITS", "", 0.1, 7), Parameter("snr_db", "X", "dB", 1, 40))),
    "int8-rans": CodecKind(stochastic=True),
    "int4-rans": CodecKind(stochastic=True),
    "int2-rans": CodecKind(coarse=True),
}
"""Codecs of values, by name; behind the dash of the last ones stands their entropy coder."""

LOW_RANK = "lowrank"
DEFAULT_RANK = 4

TENSOR_KINDS: dict[str, CodecKind] = {
    **KINDS,
    LOW_RANK: CodecKind((Parameter("rank", "R", "", 1, 64, whole=True),), coarse=True),
}
"""What may carry a tensor: codecs of its values, and ways to sum it as a matrix."""

ALIASES = {
    "fp32": "raw",
    "float32": "raw",
    "none": "raw",
    "half": "fp16",
    "float16": "fp16",
    "bfloat16": "bf16",
    "1bit": "sign",
    "onebit": "sign",
    "randomk": "topk",
    "ternary": "int2",
    "powersgd": "lowrank",
}
"""What other programs call them."""


@dataclass(frozen=True)
class CodecChoice:
    """A name, taken apart.

    Attributes
    ----------
    kind : str
        Key of `KINDS`, the ``wire_id`` of the codec.
    options : mapping of str to number
        Arguments of its constructor.
    """

    kind: str
    options: Mapping[str, float] = field(default_factory=dict)


def parse_codec(name: object) -> CodecChoice:
    """Take a name apart.

    Raises
    ------
    ConfigError
        What was expected, what was got, and the nearest name; not where: that is the caller's to say.
    """
    choice = _choice(name, KINDS) if isinstance(name, str) else None
    if choice is None and isinstance(name, str) and _choice(name, TENSOR_KINDS):
        raise ConfigError(
            f"expected one of {', '.join(forms())}, got {shown(name)}, which carries matrices and no other values; it "
            "is for exchange.codec and exchange.rule"
        )
    if choice is None:
        raise ConfigError(_refusal(name, KINDS))
    return choice


def parse_tensor_codec(name: object) -> CodecChoice:
    """Take the name of a codec for tensors apart, which may be ``lowrank-R``; raises ConfigError like `parse_codec`."""
    choice = _choice(name, TENSOR_KINDS) if isinstance(name, str) else None
    if choice is None:
        raise ConfigError(_refusal(name, TENSOR_KINDS))
    return choice


def rank_of(name: str) -> int | None:
    """Return the rank of the factors as which a matrix is summed; None where its values are."""
    choice = parse_tensor_codec(name)
    return int(choice.options.get("rank", DEFAULT_RANK)) if choice.kind == LOW_RANK else None


def kind_of(name: str) -> str:
    """Return the name without its parameter; raises ConfigError like `parse_codec`."""
    return parse_tensor_codec(name).kind


def rounds_at_random(name: str) -> bool:
    """Tell whether a codec has stochastic rounding."""
    return TENSOR_KINDS[kind_of(name)].stochastic


def is_coarse(name: str) -> bool:
    """Tell whether a codec needs a feedback of what it loses."""
    return TENSOR_KINDS[kind_of(name)].coarse


def forms(kinds: Mapping[str, CodecKind] = KINDS) -> list[str]:
    """List the ways to write each name."""
    return [form for name, kind in kinds.items() for form in (name, *(f"{name}-{p.form}" for p in kind.parameters))]


def bounds(kinds: Mapping[str, CodecKind] = KINDS) -> str:
    """Say between what the numbers of the forms must be."""
    return ", ".join(parameter.range for kind in kinds.values() for parameter in kind.parameters)


def _choice(name: str, kinds: Mapping[str, CodecKind]) -> CodecChoice | None:
    if name in kinds:
        return CodecChoice(name)
    kind, _, rest = name.partition("-")
    if kind not in kinds:
        return None
    for parameter in kinds[kind].parameters:
        number = parameter.read(rest)
        if number is not None:
            return CodecChoice(kind, {parameter.option: number})
    return None


def _refusal(name: object, kinds: Mapping[str, CodecKind]) -> str:
    got = f", got {shown(name)}"
    if not isinstance(name, str):
        return f"expected one of {', '.join(forms(kinds))}{got}"
    near = next(_near(name, kinds), "")
    hint = f"; did you mean {near}?" if near else ""
    kind, dash, _ = name.partition("-")
    if kind not in kinds or not dash:
        return f"expected one of {', '.join(forms(kinds))}{got}{hint}"
    expected = [kind, *(f"{kind}-{parameter.form} ({parameter.range})" for parameter in kinds[kind].parameters)]
    return f"expected {' or '.join(expected)}{got}{hint if near != kind else ''}"


def _near(name: str, kinds: Mapping[str, CodecKind]) -> Iterator[str]:
    """Yield what was probably meant, the likeliest first."""
    word = re.sub(r"[^a-z0-9.]", "", name.lower())
    for kind, known in kinds.items():
        rest = word.removeprefix(kind)
        if rest != word:
            written = [kind] if not rest else [f"{kind}-{rest.removesuffix('db')}{p.unit}" for p in known.parameters]
            in_db = rest.endswith("db")
            yield from (form for form in written if _choice(form, kinds) and form.endswith("dB") == in_db)
    if ALIASES.get(word) in kinds:
        yield ALIASES[word]
    yield from difflib.get_close_matches(word, kinds, 1)
