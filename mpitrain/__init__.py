"""Train one numpy model over slow links with compressed MPI collectives."""

import importlib

__version__ = "0.1.0"

_EXPORTS = {"Allreduce": "mpitrain.collectives.allreduce"}

__all__ = ["Allreduce", "__version__"]


def __getattr__(name: str) -> object:
    """Load the library call on first use, so that ``import mpitrain`` needs neither numba nor MPI."""
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'mpitrain' has no attribute {name!r}")
