"""Plain numpy twins of what the package computes in kernels and over MPI."""
