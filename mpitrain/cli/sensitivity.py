"""``mpitrain sensitivity``: which tensors bear which codec, and the rules that follow from it under a budget.

JSON is a list of flat records, one for every tensor and codec: ``tensor codec values payload_bytes error share moved
loss_change loss_change_error chosen``. Error and share are squared errors of the preconditioned update, over the square
of the tensor's and of the whole update; moved is in squared units of the weights.
"""

import json
import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec import structs

from mpitrain.bench.precision import (
    PERCENT,
    Budget,
    Effects,
    choose_codecs,
    rules_for,
    settled,
    usable_codecs,
    with_rules,
)
from mpitrain.bench.records import Record, show
from mpitrain.bench.sensitivity import Effect, Probe, effect_of
from mpitrain.bench.tensor_rules import rules_toml
from mpitrain.collectives.predicted import Sent
from mpitrain.comm.grid import Comm, ProcessGrid
from mpitrain.comm.outputs import write_output
from mpitrain.comm.runtime import Position, fail, finish, start
from mpitrain.config.load import Resolved, read_config, resolve
from mpitrain.config.plain import printable
from mpitrain.config.schema import Config, RuleConfig
from mpitrain.errors import ConfigError, LaunchError, count
from mpitrain.params import ParamSpec
from mpitrain.partition import GridShape
from mpitrain.train.buckets import FLOAT32_BYTES, check_rules
from mpitrain.train.layouts import Costs

DEFAULT_REPLICAS = 4
"""Of the run whose bytes are told, where neither the command nor the configuration says."""

ERRORS = "error %: squared error of a tensor's preconditioned update, in % of its square; of all %: of the whole one's"
LOSSES = "loss change: of {} test samples, by one step with only this tensor coded{}"
CERTAINTY = ", plus or minus two standard errors; {} of {} include 0"


@dataclass(frozen=True)
class Request:
    """What was asked for.

    Attributes
    ----------
    config : Path
    overrides : list of str
    codecs : list of str
        To choose from; empty for the default ones.
    budget : Budget
    ranks : int or None
        Of the run, for what it will send.
    steps, samples : int
        Taken before anything is measured, and measured.
    with_loss : bool
        Whether the loss is measured, too.
    """

    config: Path
    overrides: list[str]
    codecs: list[str]
    budget: Budget
    ranks: int | None
    steps: int
    samples: int
    with_loss: bool


@dataclass(frozen=True)
class Found:
    """What was measured, and chosen.

    Attributes
    ----------
    candidates : mapping
        Codecs of every tensor; one where it is settled.
    effects : mapping
        Of them.
    chosen : mapping of str to str
        Codec of every tensor.
    reasons : mapping of str to str
        Why those that are settled are.
    rules : list of RuleConfig
    """

    candidates: Mapping[str, Sequence[str]]
    effects: Effects
    chosen: Mapping[str, str]
    reasons: Mapping[str, str]
    rules: Sequence[RuleConfig]


def main(
    config: Path,
    overrides: list[str],
    *,
    codecs: list[str],
    budget: Mapping[str, float | None],
    ranks: int | None,
    steps: int,
    samples: int,
    with_loss: bool,
    out: Path | None,
    overwrite: bool,
    output: Path | None,
) -> int:
    """Measure on one rank, print tables and rules, and write the configuration with them to ``out``."""
    try:
        world = start()
        if world.Get_size() > 1:
            error = LaunchError("sensitivity: one rank measures everything; start it without a launcher")
            error.agreed = True
            raise error
        request = Request(config, overrides, codecs, Budget(**budget), ranks, steps, samples, with_loss)
        _check(request, out, overwrite=overwrite)
        _run(request, world, out, output)
        finish()
    except BaseException as failure:  # whatever it is, it has its exit code
        fail(failure, Position())
    return 0


def _check(request: Request, out: Path | None, *, overwrite: bool) -> None:
    """Refuse what cannot be done, or would be lost, before anything is measured."""
    if request.budget.loss_pct is not None and not (request.with_loss and request.samples > 1):
        raise ConfigError("sensitivity: --loss-pct needs the loss of two samples or more; leave out --no-loss")
    if out and out.exists() and not overwrite:
        raise ConfigError(
            f"sensitivity: --out {out} is there already; replace it with --overwrite, or name another file"
        )


def _run(request: Request, world: Comm, out: Path | None, output: Path | None) -> None:
    tree, origin = read_config(request.config), printable(str(request.config))
    resolved = resolve(tree, origin, request.overrides)
    codecs, notes = usable_codecs(tree, origin, request.overrides, request.codecs)
    if resolved.config.exchange.when == "local":
        notes.append('exchange.when = "local" sends changes of weights, but what is measured are gradients')
    if (signal := resolved.config.exchange.signal) != "gradient":
        notes.append(f'exchange.signal = "{signal}" sends something else, but what is measured are gradients')
    for note in (*resolved.warnings(), *notes):
        print(f"mpitrain: warning: {note}", file=sys.stderr)
    shape = _shape(resolved.config, request.ranks)
    with ProcessGrid(world, GridShape(1)) as grid:
        steps = request.steps + 2 * request.samples
        probe = Probe(resolved.config, grid, steps=steps, with_loss=request.with_loss)
        try:
            sent = {
                "raw": _sent(_raw(resolved.config), probe, shape),
                "as it was": _sent(resolved.config, probe, shape),
            }
            found = _find(request, probe, resolved.config, codecs)
            written = with_rules(tree, origin, request.overrides, found.rules)
            together = [probe.measure_together(written.config.exchange) for _ in range(request.samples)]
            sent["with the rules"] = _sent(written.config, probe, shape)
        finally:
            probe.close()
    specs = probe.parts.params.layout.specs
    _show(request, found, specs)
    _sum_up(request, found, effect_of(together), specs, num_tested=probe.num_tested)
    _tell_sent(sent, shape)
    if output:
        write_output(output, json.dumps(_records(found, specs), indent=1) + "\n", "--json")
    for warning in (each for each in written.warnings() if each not in resolved.warnings()):
        print(f"mpitrain: warning: {warning}", file=sys.stderr)
    _write(request, found, written, out)


def _find(request: Request, probe: Probe, config: Config, codecs: Sequence[str]) -> Found:
    """Train for a while, measure, and choose."""
    specs = probe.parts.params.layout.specs
    check_rules([spec.name for spec in specs], config.exchange)
    fixed = settled(specs, config.exchange)
    candidates = {spec.name: [fixed[spec.name][0]] if spec.name in fixed else codecs for spec in specs}
    for _ in range(request.steps):
        probe.advance()
    rounds = [probe.measure(candidates) for _ in range(request.samples)]
    effects = {key: effect_of([samples[key] for samples in rounds]) for key in rounds[0]}
    sizes = {spec.name: spec.size for spec in specs}
    loss = probe.loss() if request.budget.loss_pct is not None else math.nan
    chosen = choose_codecs(candidates, effects, request.budget, values=sum(sizes.values()), loss=loss)
    reasons = {name: why for name, (_, why) in fixed.items()}
    return Found(candidates, effects, chosen, reasons, rules_for(chosen, specs, config.exchange))


def _shape(config: Config, ranks: int | None) -> GridShape:
    """Settle the grid of the run."""
    parallel, servers = config.parallel, config.exchange.servers or 0
    if ranks is None:
        ranks = ((parallel.dp or DEFAULT_REPLICAS) + servers) * parallel.pp * parallel.tp
    return GridShape.fit(ranks, parallel.dp, parallel.pp, parallel.tp, servers)


def _raw(config: Config) -> Config:
    """Send everything raw, with the rest as it is."""
    raw = structs.replace(config.exchange, codec="raw", rule=(), memory="none", rounding="nearest", reset_every=0)
    return structs.replace(config, exchange=raw)


def _sent(config: Config, probe: Probe, shape: GridShape) -> Sent:
    """Predict what all ranks send along the data axis in a step; raises ConfigError, DataError."""
    return Costs(config, probe.parts.dataset).of(shape).axes["data"].configured


def _show(request: Request, found: Found, specs: Sequence[ParamSpec]) -> None:
    """Print what every codec does to every tensor, and what was chosen."""
    title = f"{request.config.stem}: squared error of the preconditioned update, in % of the tensor's own square"
    rows: list[Record] = [
        {"tensor": name} | {codec: _percent(found.effects[name, codec].relative) for codec in codecs}
        for name, codecs in found.candidates.items()
        if name not in found.reasons
    ]
    show(title, rows)
    total = sum(spec.size for spec in specs)
    chosen = sorted(specs, key=lambda spec: spec.name in found.reasons)  # what was chosen first
    show(f"chosen for {request.budget}", [_chosen(spec, found, total) for spec in chosen])


def _chosen(spec: ParamSpec, found: Found, total: int) -> Record:
    effect = found.effects[spec.name, found.chosen[spec.name]]
    record: Record = {
        "tensor": spec.name,
        "shape": "x".join(map(str, spec.shape)),
        "values_%": PERCENT * spec.size / total,
        "codec": found.chosen[spec.name],
        "why": found.reasons.get(spec.name, ""),
        "bits": 8 * effect.nbytes / spec.size,
        "error_%": _percent(effect.relative),
        "of_all_%": _percent(effect.share),
    }
    return record if math.isnan(effect.loss) else record | {"loss_change": _interval(effect)}


def _sum_up(request: Request, found: Found, together: Effect, specs: Sequence[ParamSpec], *, num_tested: int) -> None:
    """Print what the choices come to: as tensors alone, and as the exchange that will carry them."""
    values = sum(spec.size for spec in specs)
    chosen = [found.effects[item] for item in found.chosen.items()]
    print(ERRORS)
    if request.with_loss:
        unclear = sum(abs(effect.loss) <= 2 * effect.loss_error for effect in chosen)
        certainty = CERTAINTY.format(unclear, len(chosen)) if request.samples > 1 else ""
        print(LOSSES.format(num_tested, certainty))
    alone = Effect(
        nbytes=math.fsum(effect.nbytes for effect in chosen),
        share=math.fsum(effect.share for effect in chosen),
        relative=math.nan,
        moved=math.fsum(effect.moved for effect in chosen),
        loss=math.nan,
        loss_error=math.nan,
    )
    where = f"steps {request.steps + 1} to {request.steps + request.samples}"
    print(f"tensor by tensor, {where}: {_payload(alone, values)}")
    print(_single(found, alone.nbytes))
    loss = f", loss change {_interval(together)}" if request.with_loss else ""
    print(f"together in buckets, the {count(request.samples, 'step')} after: {_payload(together, values)}{loss}")


def _payload(effect: Effect, values: int) -> str:
    ratio, bits = FLOAT32_BYTES * values / effect.nbytes, 8 * effect.nbytes / values
    return (
        f"{effect.nbytes:,.0f} bytes a gradient, {bits:.3g} bits a value, {ratio:.3g} times less than float32; "
        f"error {PERCENT * effect.share:.3g} %"
    )


def _single(found: Found, nbytes: float) -> str:
    """Compare with one codec for all that were chosen for: the one that loses least for no more bytes."""
    free = [name for name in found.candidates if name not in found.reasons]
    rest = [found.effects[name, found.chosen[name]] for name in found.reasons]
    fitting = {}
    for codec in found.candidates[free[0]]:
        effects = [*rest, *(found.effects[name, codec] for name in free)]
        if math.fsum(effect.nbytes for effect in effects) <= nbytes:
            fitting[codec] = math.fsum(effect.share for effect in effects)
    if not fitting:
        return "no single codec takes as few bytes"
    best = min(fitting, key=lambda codec: fitting[codec])
    return f"the best single codec that takes no more: {best}, error {PERCENT * fitting[best]:.3g} %"


def _tell_sent(sent: Mapping[str, Sent], shape: GridShape) -> None:
    raw = sent["raw"].nbytes
    print(f"all {count(shape.size, 'rank')} ({shape}) together send along the data axis in a step:")
    for name, each in sent.items():
        ratio = f", {raw / each.nbytes:.3g} times less than raw" if name != "raw" and each.nbytes else ""
        print(f"  {name}: {'about ' * each.about}{each.nbytes:,} bytes{ratio}")


def _write(request: Request, found: Found, written: Resolved, out: Path | None) -> None:
    """Write the configuration with the rules, or print these."""
    if out is None:
        print(f"\n# append to {request.config}; the first match wins\n{rules_toml(found.rules)}", end="")
        return
    command = shlex.join(["mpitrain", *sys.argv[1:]])
    write_output(out, f"# Rules by: {printable(command)}\n\n{written.to_toml()}", "--out")
    print(f"{out}: {request.config.name} with {count(len(found.rules), 'rule')}; train with: mpitrain train {out}")


def _records(found: Found, specs: Sequence[ParamSpec]) -> list[dict[str, object]]:
    return [
        {
            "tensor": spec.name,
            "codec": codec,
            "values": spec.size,
            "payload_bytes": effect.nbytes,
            "error": _finite(effect.relative),
            "share": _finite(effect.share),
            "moved": _finite(effect.moved),
            "loss_change": _finite(effect.loss),
            "loss_change_error": _finite(effect.loss_error),
            "chosen": codec == found.chosen[spec.name],
        }
        for spec in specs
        for codec in found.candidates[spec.name]
        for effect in [found.effects[spec.name, codec]]
    ]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _percent(value: float) -> float | None:
    return _finite(PERCENT * value)


def _interval(effect: Effect) -> str:
    spread = "" if math.isnan(effect.loss_error) else f" ± {2 * effect.loss_error:.0e}"
    return f"{effect.loss:+.1e}{spread}"
