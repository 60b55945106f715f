"""``mpitrain bench codec``: MPI is loaded only where a configuration is to be trained for its gradients."""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from mpitrain.bench import codec as bench
from mpitrain.bench.sources import DRAWN, Source, draw
from mpitrain.cli.calling import load_mpi
from mpitrain.errors import ConfigError

CAPTURING, RUNTIME = "mpitrain.bench.captured", "mpitrain.comm.runtime"
DEFAULT_STEP = 100
SUFFIX = ".toml"
"""By which a configuration is told from the name of a distribution."""


def main(
    size: int,
    repeats: int,
    path: Path | None,
    codecs: Sequence[str],
    sources: Sequence[str],
    *,
    overrides: list[str],
    step: int | None,
) -> int:
    """Measure with every source."""
    names = list(sources) or list(DRAWN)
    configs = [name for name in names if name.endswith(SUFFIX)]
    if configs:
        load_mpi()

    def make(name: str) -> Source:
        if name in configs:
            capture = importlib.import_module(CAPTURING).capture
            return cast(Source, capture(Path(name), overrides, step or DEFAULT_STEP))
        return draw(name, size)

    def check() -> None:
        check_sources(names)
        if not configs and (overrides or step):
            what = "--set" if overrides else "--step"
            raise ConfigError(f"bench: {what} is for captured gradients; add --source CONFIG{SUFFIX}")

    code = bench.main(repeats, path, codecs, names, make, check)
    if configs:
        importlib.import_module(RUNTIME).finish()
    return code


def check_sources(names: Sequence[str]) -> None:
    """Refuse what is no source, and two that records could not tell apart; raises ConfigError."""
    for name in names:
        if name not in DRAWN and not name.endswith(SUFFIX):
            raise ConfigError(
                f"bench: --source: expected {', '.join(DRAWN)} or a configuration (*{SUFFIX}), got {name!r}"
            )
    labels = [Path(name).stem if name.endswith(SUFFIX) else name for name in names]
    for label in labels:
        if labels.count(label) > 1:
            raise ConfigError(f"bench: --source: {label} is there twice; give it once, or rename a file")
