"""How many threads the linear algebra of a rank takes; settled in the environment before numpy is imported."""

import os
from collections.abc import Collection, MutableMapping

THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS")


def limit_threads(
    environment: MutableMapping[str, str] = os.environ, affinity: Collection[int] | None = None
) -> str | None:
    """Give every rank one BLAS thread unless the user has said otherwise, and never more than it has processors.

    Must come before numpy is imported.

    Parameters
    ----------
    environment : mapping
        Changed in place.
    affinity : collection of int
        Processors of this process; asked for where left out.

    Returns
    -------
    str or None
        Warning for rank 0 to print, where more threads were wished for than there are processors.
    """
    if not any(environment.get(name) for name in THREAD_VARIABLES):
        environment.update(dict.fromkeys(THREAD_VARIABLES, "1"))
        return None
    processors = len(os.sched_getaffinity(0) if affinity is None else affinity)
    wishes = {name: _first_number(environment.get(name, "")) for name in THREAD_VARIABLES}
    excess = [name for name, number in wishes.items() if number > processors]
    if not excess:
        return None
    wished = ", ".join(f"{name}={environment[name]}" for name in excess)
    environment.update(dict.fromkeys(excess, str(processors)))
    return f"{wished}, but a rank may use {processors} of the processors here; taking {processors}"


def blas_threads(environment: MutableMapping[str, str] = os.environ) -> int:
    """Return the most threads that any of the variables grants, 1 where none does."""
    return max(1, *(_first_number(environment.get(name, "")) for name in THREAD_VARIABLES))


def _first_number(text: str) -> int:
    """Read the outermost level of OpenMP's lists such as ``4,2``; 0 for what is no number."""
    first = text.partition(",")[0].strip()
    return int(first) if first.isascii() and first.isdecimal() and len(first) < 10 else 0
