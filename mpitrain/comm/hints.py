"""What launchers tell their processes through the environment; known before MPI has started."""

import os

SIZE_HINTS = {
    "OMPI_COMM_WORLD_SIZE": "Open MPI",
    "PMI_SIZE": "MPICH or another PMI launcher",
    "SLURM_STEP_NUM_TASKS": "Slurm's srun",
}
"""Variables in which launchers tell the number of processes, the most specific first."""

REMEDIES = {"SLURM_STEP_NUM_TASKS": "give srun --mpi=pmix (for MPICH: --mpi=pmi2) if Slurm has it, or "}
"""What helps where a launcher and the library do not find each other, beside the library's own launcher."""

ARRAY_TASK = "SLURM_ARRAY_TASK_ID"

MAX_DIGITS = 10
"""A longer number is no count of processes."""

EMULATION = "MPITRAIN_EMULATION"
"""Mark of what runs on emulated hosts (`emulate.processes`); no setting."""

RANK_HINTS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")


def hinted_rank() -> int:
    """Guess this process's rank, for messages before MPI has started; 0 without a launcher."""
    return next((rank for name in RANK_HINTS if (rank := _number(name)) is not None), 0)


def hinted_size() -> tuple[str, int] | None:
    """Return the most specific variable that tells the number of processes, and what it tells; None without one."""
    return next(((name, size) for name in SIZE_HINTS if (size := _number(name)) is not None), None)


def allocated_tasks() -> tuple[str, int] | None:
    """Return how many processes a Slurm allocation is for, and which variables tell; None outside of one.

    ``SLURM_NTASKS`` is absent where a job was asked for by nodes and tasks a node alone.
    """
    if (tasks := _number("SLURM_NTASKS")) is not None:
        return "SLURM_NTASKS", tasks
    nodes, each = _number("SLURM_NNODES"), _number("SLURM_NTASKS_PER_NODE")
    return None if nodes is None or each is None else ("SLURM_NNODES * SLURM_NTASKS_PER_NODE", nodes * each)


def is_launched() -> bool:
    """Tell whether a launcher has started this process."""
    return any(_number(name) is not None for name in RANK_HINTS)


def array_task() -> int | None:
    """Return the number of this task of a Slurm array; None where it belongs to none."""
    return _number(ARRAY_TASK)


def _number(name: str) -> int | None:
    """Read a variable that may hold anything; None where it holds no plain number ("²" is a digit, but not one)."""
    text = os.environ.get(name, "")
    return int(text) if text.isascii() and text.isdecimal() and len(text) < MAX_DIGITS else None
