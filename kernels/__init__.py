"""Numba loops on plain arrays (imported as ``mpitrain.kernels``).

A kernel takes arrays and scalars, writes preallocated outputs, allocates nothing and raises nothing. It returns a
status or a count that its wrapper must check. Each has a plain numpy twin in ``tests/reference/``.
"""
