"""Whether replicas are the same: hashes of parameters."""

import hashlib
from dataclasses import dataclass
from typing import cast

from mpitrain.comm.agreement import gather
from mpitrain.comm.grid import Axis
from mpitrain.errors import ConfigError
from mpitrain.params import Params


@dataclass(frozen=True)
class Fingerprint:
    """The weights of all ranks in short.

    Attributes
    ----------
    sha256 : str
        Of all tensors of the model, or of the parts into which the tensor axis cuts them.
    differing : str
        A tensor of which two ranks hold different values, and the ranks; empty where all holders agree.
    """

    sha256: str
    differing: str


def params_sha256(params: Params) -> str:
    """Hash what this rank holds; the same as the fingerprint of a model that no axis cuts."""
    return _digest(_hashes(params))


def fingerprint(world: Axis, params: Params) -> Fingerprint:
    """Compare what every rank holds with what the others hold of it. Collective over ``world``."""
    tables = cast(list[dict[str, str]], gather(world, _hashes(params)))
    first: dict[str, tuple[str, int]] = {}
    differing = ""
    for rank, table in enumerate(tables):
        for piece, value in table.items():
            known, holder = first.setdefault(piece, (value, rank))
            if value != known and not differing:
                differing = f"{piece.partition(' ')[0]} on ranks {holder} and {rank}"
    return Fingerprint(_digest({piece: value for piece, (value, _) in first.items()}), differing)


def check_same(world: Axis, params: Params, when: str) -> None:
    """Refuse to go on where holders of a tensor disagree. Collective; raises ConfigError on all ranks."""
    if differing := fingerprint(world, params).differing:
        error = ConfigError(f"the weights {when} differ: {differing}")
        error.agreed = True
        raise error


def _digest(hashes: dict[str, str]) -> str:
    return hashlib.sha256("\n".join(sorted(f"{piece} {value}" for piece, value in hashes.items())).encode()).hexdigest()


def _hashes(params: Params) -> dict[str, str]:
    """Hash the bits of every tensor, by name and place; padding does not count."""
    places = {spec.name: spec.place for spec in params.layout.specs}
    return {
        f"{name} {places[name].start} {places[name].stop}": hashlib.sha256(params[name].data).hexdigest()
        for name in params
    }
