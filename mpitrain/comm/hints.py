"""What launchers tell their processes through the environment; known before MPI has started."""

import os

SIZE_HINTS = {
    "OMPI_COMM_WORLD_SIZE": "Open MPI",
    "PMI_SIZE": "MPICH or another PMI launcher",
    "SLURM_STEP_NUM_TASKS": "Slurm's srun",
}
"""Variables in which launchers tell the number of processes, the most specific first."""

RANK_HINTS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")


def hinted_rank() -> int:
    """Guess this process's rank, for messages before MPI has started; 0 without a launcher."""
    values = [os.environ[name] for name in RANK_HINTS if os.environ.get(name, "").isdigit()]
    return int(values[0]) if values else 0


def is_launched() -> bool:
    """Tell whether a launcher has started this process."""
    return any(os.environ.get(name, "").isdigit() for name in RANK_HINTS)
