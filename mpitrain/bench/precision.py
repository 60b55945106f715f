"""From what was measured of every tensor and codec to the rules of an exchange that keeps to a budget."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from mpitrain.bench.allocation import (
    Choice,
    allocate_bytes,
    allocate_error,
    fewest_bytes,
    smallest_error,
)
from mpitrain.bench.sensitivity import Effect
from mpitrain.bench.tensor_rules import make_rules
from mpitrain.config.codec_names import parse_codec
from mpitrain.config.load import Resolved, resolve, toml_value
from mpitrain.config.plain import Tree
from mpitrain.config.schema import ExchangeConfig, RuleConfig
from mpitrain.errors import ConfigError
from mpitrain.params import ParamSpec
from mpitrain.train.buckets import FLOAT32_BYTES, codec_of

DEFAULT_CODECS = (
    *("fp16", "int8", "ecq-4", "int4", "ecq-3", "ecq-2.5", "ecq-2", "int2", "ecq-1.5", "ecq-1", "sign", "topk-100"),
)
SMALL_CODEC = "fp16"
DEFAULT_RATIO = 10.0
PERCENT = 100

Effects = Mapping[tuple[str, str], Effect]
"""By tensor and codec."""


@dataclass(frozen=True)
class Budget:
    """What must be kept to; exactly one is given.

    Attributes
    ----------
    ratio : float
        How often float32 is as large as the payload of a gradient, at least.
    bytes_per_value : float
        Payload of a gradient over its values, at most.
    error : float
        Squared error of the preconditioned update over its square, at most.
    loss_pct : float
        What a step may lose of the test loss, in percent of it: the sum of the tensors' upper bounds.
    """

    ratio: float | None = None
    bytes_per_value: float | None = None
    error: float | None = None
    loss_pct: float | None = None

    def __post_init__(self) -> None:
        given = [name for name, value in vars(self).items() if value is not None]
        if len(given) > 1:
            names = " and ".join(f"--{name.replace('_', '-')}" for name in given)
            raise ConfigError(f"sensitivity: {names} are different budgets; give one of them")
        if not given:
            object.__setattr__(self, "ratio", DEFAULT_RATIO)

    def payload(self, values: int) -> float | None:
        """Return the bytes that a gradient of so many values may take; None where they are not what is bounded."""
        if self.ratio is not None:
            return FLOAT32_BYTES * values / self.ratio
        return None if self.bytes_per_value is None else self.bytes_per_value * values

    def __str__(self) -> str:
        if self.ratio is not None:
            return f"{self.ratio:g} times less than float32"
        if self.bytes_per_value is not None:
            return f"{self.bytes_per_value:g} bytes a value"
        return f"an error of {self.error:g}" if self.error is not None else f"{self.loss_pct:g} % of the loss"


def usable_codecs(tree: Tree, origin: str, overrides: list[str], asked: Sequence[str]) -> tuple[list[str], list[str]]:
    """Choose the codecs that rules of this configuration may name.

    Returns
    -------
    codecs, notes : list of str
        Why the others of the default list are left out.

    Raises
    ------
    ConfigError
        A codec that was asked for and is unknown or cannot be, or none that can.
    """
    for name in asked:
        try:
            parse_codec(name)
        except ConfigError as error:
            raise ConfigError(f"sensitivity: --codec: {error}") from None
    found, refused = [], {}
    for name in dict.fromkeys(asked or DEFAULT_CODECS):
        try:
            with_rules(tree, origin, overrides, [RuleConfig(match="*", codec=name)])
            found.append(name)
        except ConfigError as error:
            refused[name] = str(error)
    if refused and (asked or not found):
        name = next(iter(refused))
        raise ConfigError(f"sensitivity: no rule can have codec {name}: {refused[name]}")
    return found, [f"codec {name} is left out: {reason}" for name, reason in refused.items()]


def with_rules(tree: Tree, origin: str, overrides: list[str], rules: Sequence[RuleConfig]) -> Resolved:
    """Check a configuration with these rules behind its own; raises ConfigError."""
    own = resolve(tree, origin, overrides).config.exchange.rule
    tables = [f"{{match = {toml_value(rule.match)}, codec = {toml_value(rule.codec)}}}" for rule in (*own, *rules)]
    return resolve(tree, origin, [*overrides, f"exchange.rule=[{', '.join(tables)}]"] if tables else overrides)


def settled(specs: Sequence[ParamSpec], exchange: ExchangeConfig) -> dict[str, tuple[str, str]]:
    """Name the tensors whose codec is not to be chosen: their codec, and why."""
    fixed: dict[str, tuple[str, str]] = {}
    for spec in specs:
        if any(fnmatchcase(spec.name, rule.match) for rule in exchange.rule):
            fixed[spec.name] = (codec_of(spec, exchange), "rule of CONFIG")
        elif spec.small:
            fixed[spec.name] = (SMALL_CODEC, "small")
    if len(fixed) == len(specs):
        raise ConfigError(
            "sensitivity: there is no tensor to choose a codec for: the exchange.rule tables and the small tensors are "
            "all of the model; take the rules out of the configuration"
        )
    return fixed


def choose_codecs(
    candidates: Mapping[str, Sequence[str]], effects: Effects, budget: Budget, *, values: int, loss: float
) -> dict[str, str]:
    """Choose a codec for every tensor by reverse water-filling.

    Parameters
    ----------
    candidates : mapping
        Codecs of every tensor; of those that are settled, one.
    values : int
        Elements of the whole model.
    loss : float
        Of the test samples, which ``budget.loss_pct`` refers to.

    Raises
    ------
    ConfigError
        A budget that cannot be kept to, with the smallest that can.
    """
    by_loss = budget.loss_pct is not None
    options = [
        [_choice(effects[name, codec], by_loss=by_loss) for codec in codecs] for name, codecs in candidates.items()
    ]
    payload = budget.payload(values)
    if payload is not None:
        chosen = allocate_bytes(options, payload)
        least = fewest_bytes(options)
        refusal = (
            f"{payload:,.0f} bytes a gradient, but the codecs to choose from and those that are settled take "
            f"{least:,.0f}, which are {FLOAT32_BYTES * values / least:.4g} times less than float32 and "
            f"{least / values:.4g} bytes a value"
        )
    else:
        bound = budget.error if budget.error is not None else (budget.loss_pct or 0.0) / PERCENT * loss
        chosen = allocate_error(options, bound)
        least = smallest_error(options)
        smallest = f"{PERCENT * least / loss:.3g} % of the loss" if by_loss else f"an error of {least:.3g}"
        refusal = f"{budget}, but with the best codecs of all it is {smallest}"
    if chosen is None:
        raise ConfigError(f"sensitivity: the budget is {refusal}; raise it, or add a --codec")
    return {name: codecs[index] for (name, codecs), index in zip(candidates.items(), chosen, strict=True)}


def rules_for(chosen: Mapping[str, str], specs: Sequence[ParamSpec], exchange: ExchangeConfig) -> list[RuleConfig]:
    """Write the rules that give every tensor its codec, behind those of ``exchange``.

    Small tensors have none where they would travel as chosen without.
    """
    ruled = [spec for spec in specs if not any(fnmatchcase(spec.name, rule.match) for rule in exchange.rule)]
    needed = {
        spec.name: chosen[spec.name]
        for spec in ruled
        if not (spec.small and codec_of(spec, exchange) == chosen[spec.name])
    }
    return make_rules(needed, [spec.name for spec in specs])


def _choice(effect: Effect, *, by_loss: bool) -> Choice:
    return Choice(effect.nbytes, effect.loss_bound if by_loss else effect.share)
