"""Job scripts for workstations, emulated hosts and Slurm."""
