"""Keys that do not exist: which one was meant, or why there is none."""

import difflib
import typing

from mpitrain.config.plain import Tree, printable, shown
from mpitrain.config.schema import Config
from mpitrain.errors import ConfigError

ALIASES = {
    "learning_rate": "optim.lr",
    "warmup_steps": "optim.warmup_steps",
    "epochs": "train.steps",
    "num_epochs": "train.steps",
    "max_steps": "train.steps",
    "num_layers": "model.layers",
    "num_heads": "model.heads",
    "hidden_size": "model.d_model",
    "optimizer": "optim.kind",
    "compression": "exchange.codec",
    "output_dir": "run.folder",
    "num_workers": "data.readers",
    "workers": "data.readers",
    "local_steps": "exchange.h",
    "inner_steps": "exchange.h",
    "sync_every": "exchange.h",
}
"""Names that other programs give to these keys: what a user is likely to try."""

_FILES = "every rank writes its own file, so no parallel HDF5 is needed"
_BATCH = "train.batch_size is all samples of a step, over all ranks, and needs no accumulation"
_RANKS = "the launcher says it (mpitrain launch -n), and parallel.dp only checks it"
_PROCESSOR = "numpy and numba compute on processors alone"
_FLOAT32 = "weights and sums are float32, and what travels is exchange.codec"

EXPLAINED = {
    "driver": _FILES,
    "mpio": _FILES,
    "parallel_hdf5": _FILES,
    "accumulation": _BATCH,
    "accumulation_steps": _BATCH,
    "gradient_accumulation": _BATCH,
    "gradient_accumulation_steps": _BATCH,
    "ranks": _RANKS,
    "num_ranks": _RANKS,
    "world_size": _RANKS,
    "nproc": _RANKS,
    "device": _PROCESSOR,
    "gpus": _PROCESSOR,
    "cuda": _PROCESSOR,
    "dtype": _FLOAT32,
    "precision": _FLOAT32,
    "amp": _FLOAT32,
    "backend": "MPI is the only one, and how gradients travel is exchange.collective",
}
"""Keys that users try and that nothing here corresponds to, with the reason."""


def refuse_unknown(tree: Tree, sources: dict[str, str]) -> None:
    """Refuse keys that are not in the schema, with the one that was meant or with the reason why there is none.

    Raises
    ------
    ConfigError
        The first such section or key.
    """
    known = known_keys()
    dotted = [f"{section}.{key}" for section, keys in known.items() for key in keys]
    for section, table in tree.items():
        if section not in known:
            homes = [name for name in dotted if name.endswith(f".{section.replace('-', '_')}")]
            near = homes or difflib.get_close_matches(section, known, 1) or _near_key(section, dotted)
            raise ConfigError(
                f"{_origin(section, sources)}: unknown section or key {shown(section)}{_hint(section, near)}"
            )
        if not isinstance(table, dict):
            raise ConfigError(f"{sources.get(section, 'config')}: [{section}] must be a table, got {shown(table)}")
        for key in table:
            if key not in known[section]:
                word = key.replace("-", "_")
                here = (
                    []
                    if word in ALIASES and word not in known[section]
                    else difflib.get_close_matches(word, known[section], 1)
                )
                near = [f"{section}.{here[0]}"] if here else _near_key(key, dotted)
                origin = sources.get(f"{section}.{key}", "config")
                raise ConfigError(f"{origin}: unknown key {printable(f'{section}.{key}')}{_hint(key, near)}")


def _origin(section: str, sources: dict[str, str]) -> str:
    """Name the place that mentions a section first."""
    return next((origin for key, origin in sources.items() if key.partition(".")[0] == section), "config")


def _near_key(key: str, dotted: list[str]) -> list[str]:
    """Find the key that was probably meant: the most alike name of any section, or of another program."""
    names = {name.partition(".")[2]: name for name in dotted} | ALIASES
    return [names[near] for near in difflib.get_close_matches(key.replace("-", "_").lower(), names, 1)]


def _hint(key: str, near: list[str]) -> str:
    if reason := EXPLAINED.get(key.replace("-", "_").lower()):
        return f": {reason}; leave it out"
    return f"; did you mean {near[0]}?" if near else "; mpitrain reference lists the keys"


def known_keys() -> dict[str, list[str]]:
    """List the keys of every section."""
    return {section: list(typing.get_type_hints(kind)) for section, kind in typing.get_type_hints(Config).items()}
