"""What does not go together: the one table of refusals, and the defaults that depend on other values."""

from collections.abc import Iterator
from itertools import pairwise

from msgspec import structs

from mpitrain.config.codec_names import KINDS, is_coarse, rank_of, rounds_at_random
from mpitrain.config.flags import parse_flag
from mpitrain.config.schema import (
    Config,
    DataConfig,
    ExchangeConfig,
    MemoryName,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    RunConfig,
)
from mpitrain.errors import ConfigError, count
from mpitrain.partition import split_widths, tensor_refusal


def refusal(
    collective: str, codec: str, memory: str, rounding: str = "nearest", signal: str = "gradient"
) -> str | None:
    """Say why a combination of answers is refused, or None where it works."""
    if collective == "native" and codec != "raw":
        return (
            f'exchange.collective = "native" is MPI\'s own float sum and carries codec "raw" only, got "{codec}"; '
            'set collective = "direct" or codec = "raw"'
        )
    if codec == "raw" and memory != "none":
        return f'exchange.memory = "{memory}" has no error to remember with codec "raw"; set memory = "none"'
    if memory == "delta" and is_coarse(codec) and (collective, signal) != ("direct", "momentum"):
        return (
            f'exchange.memory = "delta" with codec "{codec}" comes near only where what travels changes slowly and '
            'goes straight to its owner; set memory = "residual", or signal = "momentum" and collective = "direct"'
        )
    if rounding == "stochastic" and not rounds_at_random(codec):
        able = " or ".join(f'"{name}"' for name, kind in KINDS.items() if kind.stochastic)
        return f'exchange.rounding = "stochastic" needs codec {able}, got "{codec}"; set rounding = "nearest"'
    return None


def memory_of(exchange: ExchangeConfig) -> MemoryName:
    """Resolve the memory where it is left out: error feedback, unless every tensor travels raw."""
    return exchange.memory or ("residual" if _is_lossy(exchange) else "none")


def micro_batches_of(parallel: ParallelConfig, pp: int) -> int:
    """Resolve the number of micro-batches where it is left out, for a pipeline of ``pp`` stages."""
    return parallel.micro_batches or (MICRO_BATCHES_A_STAGE * pp if pp > 1 else 1)


def chunks_of(parallel: ParallelConfig, pp: int) -> int:
    """Resolve the number of pieces of the model that each of ``pp`` stages holds."""
    return (parallel.chunks or 2) if parallel.schedule == "interleaved" and pp > 1 else 1


def servers_of(exchange: ExchangeConfig) -> int:
    """Resolve the rows of the grid that serve, where their number is left out."""
    return int(needs_servers(exchange)) if exchange.servers is None else exchange.servers


def needs_servers(exchange: ExchangeConfig) -> bool:
    """Tell whether some ranks serve the others."""
    return exchange.when == "server" or exchange.collective == "server"


def factors(exchange: ExchangeConfig) -> list[str]:
    """List the codecs that sum matrices by their factors."""
    return [name for name in (exchange.codec, *(rule.codec for rule in exchange.rule)) if rank_of(name)]


def _is_lossy(exchange: ExchangeConfig) -> bool:
    return any(codec != "raw" for codec in (exchange.codec, *(rule.codec for rule in exchange.rule)))


MICRO_BATCHES_A_STAGE = 4
"""Default of micro-batches for each stage: a bubble of at most a fifth."""

MOST_HEADS = 1024
"""Up to where divisors of the model width are suggested."""

MODES = "staleness window aggregate late delay_compensation staleness_lr"
"""Keys of a server that not every mode reads."""

READ_BY: dict[str, dict[object, str]] = {
    "model.kind": {"transformer": "d_model layers heads d_ff causal", "mlp": "hidden"},
    "model.task": {
        "classify": "model.causal model.label_smoothing train.class_weights",
        "forecast": "model.causal data.horizon",
        "lm": "model.tied",
    },
    "data.kind": {
        "stations": "stations samples test_samples skew standardize clip",
        "windows": "path x y group station test_groups skip_groups flags drop active log1p missing standardize clip",
        "text": "path stations test_fraction",
    },
    "optim.kind": {"adamw": "beta1 beta2 eps", "sgd": "momentum nesterov"},
    "optim.schedule": {"constant": "", "cosine": "min_lr_ratio", "linear": "min_lr_ratio"},
    "parallel.schedule": {"1f1b": "", "afab": "", "interleaved": "chunks"},
    "parallel.memory": {"none": "", "delta": "reference_mb"},
    "exchange.when": {
        "sync": "collective segment_kb signal warmup_steps raw_last_steps reset_every",
        "local": "collective segment_kb h outer_lr outer_momentum fragments delay merge",
        "server": f"mode server_codec {MODES} dc_strength dc_decay optim.lr_scale",
    },
    "exchange.collective": {"direct": "segment_kb", "ring": "segment_kb", "server": "segment_kb", "native": ""},
    "exchange.mode": {
        "sync": "aggregate late",
        "ssp": "staleness aggregate late",
        "async": "window delay_compensation dc_strength dc_decay staleness_lr optim.lr_scale",
    },
    "exchange.delay_compensation": {
        "none": "",
        "fixed": "dc_strength",
        "adaptive": "dc_strength dc_decay",
    },
}
"""Keys (of the same section where none is named) that only some choices read."""

READ_BY_SPLIT = {
    "pp": "schedule chunks cuts codec gradient_codec memory reference_mb",
    "tp": "sequence tensor_codec",
}
"""Keys of [parallel] that are read only where an axis has more than one rank."""


def unread_keys(config: Config) -> dict[str, str]:
    """Name the keys that the choices of this configuration do not read, each with the choice that decides."""
    unread: dict[str, str] = {}
    for choice, readers in READ_BY.items():
        section, _, name = choice.partition(".")
        chosen = getattr(getattr(config, section), name)
        every, read = " ".join(readers.values()).split(), readers[chosen].split()
        for key in set(every) - set(read):
            unread[key if "." in key else f"{section}.{key}"] = f'{choice} = "{chosen}"'
    for axis, keys in READ_BY_SPLIT.items():
        if getattr(config.parallel, axis) == 1:
            unread |= {f"parallel.{key}": f"parallel.{axis} = 1" for key in keys.split()}
    if not factors(config.exchange):
        unread["exchange.factor_codec"] = f'exchange.codec = "{config.exchange.codec}"'
    return unread


def with_derived(config: Config) -> Config:
    """Fill in the values that follow from others where they are left out."""
    model, data, parallel = config.model, config.data, config.parallel
    return structs.replace(
        config,
        model=structs.replace(model, d_ff=model.d_ff or 4 * model.d_model),
        data=structs.replace(data, stride=data.stride or data.window),
        parallel=structs.replace(parallel, gradient_codec=parallel.gradient_codec or parallel.codec),
        exchange=structs.replace(
            config.exchange, memory=memory_of(config.exchange), servers=servers_of(config.exchange)
        ),
    )


def check_consistency(config: Config) -> None:
    """Refuse values that do not go together.

    Raises
    ------
    ConfigError
        Names the keys, their values and the remedy.
    """
    for text in config.data.flags:
        parse_flag(text)
    for reasons in (
        _of_exchange(config.exchange),
        _of_signal(config.exchange, config.optim),
        _of_servers(config.exchange, config.parallel),
        _of_model(config.model, config.data),
        _of_pipeline(config.parallel),
        _of_tensor(config.model, config.parallel),
        _of_run(config),
    ):
        for reason in reasons:
            raise ConfigError(reason)


def _of_exchange(exchange: ExchangeConfig) -> Iterator[str]:
    # A raw codec has nothing to remember, but the tensors of a rule may have.
    memory = "none" if exchange.codec == "raw" and _is_lossy(exchange) else memory_of(exchange)
    collective = "direct" if exchange.when == "server" else exchange.collective  # servers read no collective
    yield from _of_factors(exchange)
    if not rank_of(exchange.codec) and (
        reason := refusal(collective, exchange.codec, memory, exchange.rounding, exchange.signal)
    ):
        yield reason
    rules = [rule for rule in exchange.rule if rule.codec != "raw" and not rank_of(rule.codec)]
    if collective == "native" and rules:
        yield f'exchange.rule: collective "native" carries codec "raw" only, got "{rules[0].codec}"'
    way = "direct" if collective == "native" else collective  # what native cannot carry has been said
    for number, rule in enumerate(exchange.rule):
        if rule.codec != "raw" and (reason := refusal(way, rule.codec, memory_of(exchange), signal=exchange.signal)):
            yield f"exchange.rule[{number}]: {reason}"

    yield from _of_phases(exchange)


def _of_factors(exchange: ExchangeConfig) -> Iterator[str]:
    """Refuse what does not go together with sums of matrices by their factors."""
    for codec in factors(exchange)[:1]:
        if exchange.when != "sync":
            yield (
                f'exchange.codec "{codec}" sums matrices at every step, but exchange.when = "{exchange.when}" has '
                'no such sums; set exchange.when = "sync" or exchange.codec = "int4"'
            )
        if exchange.memory == "delta":
            yield (
                f'exchange.memory = "delta" predicts values, but codec "{codec}" sends factors of a matrix and needs '
                'the feedback of what they lose; set memory = "residual"'
            )
        if exchange.collective == "native" and exchange.factor_codec != "raw":
            yield (
                f'exchange.collective = "native" is MPI\'s own float sum and carries factors of codec "{codec}" raw '
                f'only, got exchange.factor_codec = "{exchange.factor_codec}"; set factor_codec = "raw" or '
                'collective = "direct"'
            )
        if (
            rank_of(exchange.codec)
            and exchange.rounding == "stochastic"
            and not rounds_at_random(exchange.factor_codec)
        ):
            yield (
                f'exchange.rounding = "stochastic" needs factors that can be rounded so, got exchange.factor_codec = '
                f'"{exchange.factor_codec}"; set factor_codec = "int8" or rounding = "nearest"'
            )


def _of_phases(exchange: ExchangeConfig) -> Iterator[str]:
    """Refuse what varies with the step where it cannot."""
    for key in ("warmup_steps", "raw_last_steps", "reset_every"):
        if getattr(exchange, key) and exchange.when != "sync":
            yield (
                f"exchange.{key} = {getattr(exchange, key)} is for exchanges at every step, but exchange.when = "
                f'"{exchange.when}" has one codec and memory from the first to the last; set exchange.{key} = 0'
            )
    if exchange.reset_every and memory_of(exchange) != "residual":
        yield (
            f"exchange.reset_every = {exchange.reset_every} zeroes residuals, but exchange.memory = "
            f'"{memory_of(exchange)}" has none; set exchange.memory = "residual" or exchange.reset_every = 0'
        )


def _of_signal(exchange: ExchangeConfig, optim: OptimConfig) -> Iterator[str]:
    """Refuse what another signal than the gradient cannot do."""
    if exchange.signal == "gradient":
        return
    if exchange.when != "sync":
        yield (
            f'exchange.signal = "{exchange.signal}" is for exchanges at every step, but exchange.when = '
            f'"{exchange.when}"; set exchange.signal = "gradient"'
        )
    if exchange.signal == "preconditioned":
        if optim.kind != "adamw":
            yield (
                'exchange.signal = "preconditioned" divides by the second moment of adamw, but optim.kind = '
                f'"{optim.kind}"; set optim.kind = "adamw" or exchange.signal = "gradient"'
            )
        return
    if optim.kind == "adamw" and not exchange.warmup_steps:
        yield (
            'exchange.signal = "momentum" with optim.kind = "adamw" freezes the second moment after '
            "exchange.warmup_steps = 0 steps, which have taught it nothing; set exchange.warmup_steps to a tenth of "
            'train.steps or more, or exchange.signal = "gradient"'
        )
    if optim.kind == "sgd" and (optim.nesterov or not optim.momentum):
        what = "nesterov = true looks ahead by" if optim.nesterov else "momentum = 0 leaves no"
        yield (
            f'exchange.signal = "momentum", but optim.{what} the momentum that should travel; set optim.momentum = 0.9 '
            'and optim.nesterov = false, or exchange.signal = "gradient"'
        )


def doubts(config: Config) -> Iterator[str]:
    """Say what is allowed, but hardly meant."""
    exchange, steps = config.exchange, config.train.steps
    uncompressed = exchange.warmup_steps + exchange.raw_last_steps
    if uncompressed and exchange.signal != "momentum" and not _is_lossy(exchange):
        yield 'exchange.warmup_steps and exchange.raw_last_steps change nothing with codec "raw"'
    elif uncompressed >= steps:
        yield (
            f"exchange.warmup_steps + exchange.raw_last_steps = {uncompressed} leave none of the train.steps = {steps} "
            f'to codec "{exchange.codec}"'
        )
    coarse = [name for name in (exchange.codec, *(rule.codec for rule in exchange.rule)) if is_coarse(name)]
    if coarse and memory_of(exchange) == "none":
        yield (
            f'exchange.memory = "none" lets codec "{coarse[0]}" lose for good what it does not send, always the same '
            'way; exchange.memory = "residual" sends it later'
        )


def _of_servers(exchange: ExchangeConfig, parallel: ParallelConfig) -> Iterator[str]:
    servers, inside = servers_of(exchange), parallel.pp * parallel.tp
    if needs_servers(exchange) and not servers:
        who = "when" if exchange.when == "server" else "collective"
        yield f'exchange.{who} = "server" needs servers, but exchange.servers = 0; set exchange.servers = 1'
    if servers and not needs_servers(exchange):
        yield (
            f"exchange.servers = {servers}, but nothing uses them; set exchange.when or exchange.collective = "
            '"server", or leave exchange.servers out'
        )
    if servers > 1 and inside > 1:
        yield (
            f"exchange.servers = {servers} for each of the parallel.pp * parallel.tp = {inside} parts of the model; "
            "a part of a model has one server: set exchange.servers = 1"
        )
    if exchange.when == "local" and exchange.delay and exchange.delay * exchange.fragments >= exchange.h:
        # A part that is under way for as long would be sent before the first step of the round in which it arrives.
        yield (
            f"exchange.delay = {exchange.delay} steps are not less than the {exchange.h} / {exchange.fragments} steps "
            "between two fragments; lower exchange.delay or exchange.fragments, or raise exchange.h"
        )
    if exchange.when == "local" and exchange.fragments > exchange.h:
        yield (
            f"exchange.fragments = {exchange.fragments} are more than the exchange.h = {exchange.h} steps of a "
            "round; at most one leaves after every step"
        )


def _of_model(model: ModelConfig, data: DataConfig) -> Iterator[str]:
    if model.kind == "transformer" and model.d_model % model.heads:
        divisors = [heads for heads in range(1, min(model.d_model, MOST_HEADS) + 1) if model.d_model % heads == 0]
        yield f"model.heads = {model.heads} does not divide model.d_model = {model.d_model}; use one of {divisors}"
    if data.kind == "windows" and not data.path:
        yield 'data.path is empty, but data.kind = "windows" reads a file; set data.path'
    if data.clip and not data.standardize:
        yield f"data.clip = {data.clip} bounds standardized values, but data.standardize = false; set one of them"
    if model.task == "lm" and data.kind != "text":
        yield (
            f'model.task = "lm" needs token data, but data.kind = "{data.kind}" has none; use "classify" or '
            '"forecast", or set data.kind = "text"'
        )
    if model.task != "lm" and data.kind == "text":
        yield f'data.kind = "text" has no targets for model.task = "{model.task}"; set model.task = "lm"'
    if model.task == "lm" and model.kind == "mlp":
        yield 'model.kind = "mlp" reads no tokens, but model.task = "lm"; set model.kind = "transformer"'


def _of_pipeline(parallel: ParallelConfig) -> Iterator[str]:
    needed = parallel.pp * chunks_of(parallel, parallel.pp) - 1
    ascending = all(a < b for a, b in pairwise(parallel.cuts))
    if parallel.pp > 1 and parallel.cuts and (len(parallel.cuts) != needed or not ascending):
        yield (
            f"parallel.cuts = {list(parallel.cuts)}, but {count(needed + 1, 'stage')} (pp times chunks) begin at "
            f"{count(needed, 'unit')} beside the first, in ascending order; `mpitrain plan` lists the units"
        )
    if parallel.pp > 1 and parallel.codec == "raw" and parallel.memory == "delta":
        yield (
            'parallel.memory = "delta" sends the change of an activation in few bytes, but parallel.codec = "raw" has '
            'no fewer; set parallel.codec = "int8" or parallel.memory = "none"'
        )


def _of_tensor(model: ModelConfig, parallel: ParallelConfig) -> Iterator[str]:
    if model.kind == "mlp":
        sizes = split_widths(model.hidden)
    else:
        sizes = {"model.heads": model.heads, "model.d_ff": model.d_ff or 4 * model.d_model}
    if reason := tensor_refusal(sizes, parallel.tp):
        yield reason
    if model.kind == "mlp" and parallel.tp > 1 and parallel.sequence:
        yield (
            'parallel.sequence = true splits time steps, but the layers of model.kind = "mlp" have none; '
            "set parallel.sequence = false"
        )


def _of_run(config: Config) -> Iterator[str]:
    train, run = config.train, config.run
    for key in ("target", "patience"):
        if getattr(train, key) is not None and not train.eval_every:
            yield f"train.{key} = {getattr(train, key):g} needs evaluations, but train.eval_every = 0; set it"
    if config.model.task == "classify" and train.target is not None and train.target > 1:
        yield f"train.target = {train.target:g} is beyond every accuracy; set it between 0 and 1"
    if run.time_limit_s is None and run.time_margin_s != RunConfig().time_margin_s:
        yield f"run.time_margin_s = {run.time_margin_s:g} is kept before run.time_limit_s, which is not set; set both"
