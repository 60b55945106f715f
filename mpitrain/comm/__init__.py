"""MPI: start and abort, the process grid, messages, the one wait, agreement, the fault hook."""
