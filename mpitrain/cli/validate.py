"""``mpitrain validate``: what a configuration comes to, without MPI, numba or the data."""

import sys
from pathlib import Path

from mpitrain.comm.fault import unread_variables
from mpitrain.config.load import load_config
from mpitrain.errors import ConfigError
from mpitrain.partition import GridShape


def main(config: Path, overrides: list[str], ranks: int | None) -> int:
    """Print the resolved configuration to the output, warnings and the refusal to the error stream."""
    try:
        resolved = load_config(config, overrides)
        parallel = resolved.config.parallel
        if ranks is not None:
            GridShape.fit(ranks, parallel.dp, parallel.pp, parallel.tp, resolved.config.exchange.servers or 0)
    except ConfigError as error:
        print(f"mpitrain: {error}", file=sys.stderr)
        return error.exit_code
    for warning in (*resolved.warnings(), *unread_variables()):
        print(f"mpitrain: warning: {warning}", file=sys.stderr)
    print(resolved.to_toml(), end="")
    return 0
