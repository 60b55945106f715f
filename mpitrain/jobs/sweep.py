"""Sweeps: which settings every task of an array trains with."""

import itertools

from mpitrain.errors import ConfigError

MAX_TASKS = 1000
"""Slurm's default of ``MaxArraySize`` is 1001."""


def points(sweeps: list[str]) -> list[tuple[str, ...]]:
    """List the settings of every task: each value of a key with each of the others, the last key fastest.

    Parameters
    ----------
    sweeps : list of str
        ``section.key=VALUE,VALUE…``.

    Returns
    -------
    list of tuple of str
        ``section.key=VALUE``, one of each key; empty without sweeps.

    Raises
    ------
    ConfigError
        A sweep without values, a key that is swept twice or is a task's own, or too many tasks.
    """
    choices: dict[str, list[str]] = {}
    for sweep in sweeps:
        key, equals, text = sweep.partition("=")
        key, values = key.strip(), [value.strip() for value in text.split(",")]
        if not equals or not all(values):
            raise ConfigError(f"job: --sweep: expected section.key=VALUE,VALUE…, got {sweep!r}")
        if key in choices or len(set(values)) < len(values):
            raise ConfigError(f"job: --sweep: {key} or one of its values is given twice; give it once")
        if key == "run.folder":
            raise ConfigError("job: --sweep: every task has a folder of its own below run.folder; leave run.folder out")
        choices[key] = values
    number = 1
    for values in choices.values():
        number *= len(values)
    if number > MAX_TASKS:
        raise ConfigError(f"job: --sweep: {number} tasks, but an array has {MAX_TASKS} at most; sweep fewer values")
    if not choices:
        return []
    pairs = [[f"{key}={value}" for value in values] for key, values in choices.items()]
    return list(itertools.product(*pairs))
