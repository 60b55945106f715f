"""Products with a few long vectors, and their orthonormalization, in an order of operations that is always the same.

A library for linear algebra chooses its order by processor and matrix; ranks that must agree to the last bit cannot
use one. Factors lie one *row* after the other, ``(r, n)``, so that every inner loop runs along memory.
"""

from math import sqrt
from typing import Any

import numpy as np

from mpitrain.kernels import lanes
from mpitrain.kernels.jit import inlined, kernel

EPS = 1e-6
"""A row of which less than this share is left after its projections lies in the span of those before it."""


@inlined
def _dot(a: Any, b: Any) -> float:
    """Return the inner product, summed in float64."""
    sums, whole = lanes.zeros(), a.size - a.size % lanes.COUNT
    for start in range(0, whole, lanes.COUNT):
        sums = lanes.add_products(sums, lanes.load(a, start), lanes.load(b, start))
    first, second, third, fourth = lanes.split(sums)
    total = (first + second) + (third + fourth)
    for i in range(whole, a.size):
        total += np.float64(a[i]) * np.float64(b[i])
    return float(total)


@kernel
def project_rows(matrix: Any, rows: Any, out: Any) -> None:
    """Write ``matrix @ rows.T``, transposed.

    Parameters
    ----------
    matrix : (m, n) contiguous
    rows : (r, n) contiguous
    out : (r, m), written
    """
    for i in range(matrix.shape[0]):
        for k in range(rows.shape[0]):
            out[k, i] = _dot(matrix[i], rows[k])


@kernel
def project_columns(matrix: Any, columns: Any, out: Any) -> None:
    """Write ``columns @ matrix``: the rows of the matrix are added up from the first to the last.

    Parameters
    ----------
    matrix : (m, n) contiguous
    columns : (r, m)
        One of the factors' columns a row.
    out : (r, n) contiguous, written
    """
    out[:] = 0
    for i in range(matrix.shape[0]):
        row = matrix[i]
        for k in range(columns.shape[0]):
            weight, total = columns[k, i], out[k]
            for j in range(row.size):
                total[j] += weight * row[j]


@kernel
def add_product(scale: Any, left: Any, right: Any, acc: Any) -> None:
    """Add ``scale * left.T @ right`` to ``acc``, one rank after the other.

    Parameters
    ----------
    scale : float
        Of the type of the arrays.
    left : (r, m)
    right : (r, n) contiguous
    acc : (m, n) contiguous, changed
    """
    for i in range(acc.shape[0]):
        row = acc[i]
        for k in range(left.shape[0]):
            weight, factor = scale * left[k, i], right[k]
            for j in range(row.size):
                row[j] += weight * factor[j]


@kernel
def orthonormalize(rows: Any) -> None:
    """Make rows orthonormal by the modified Gram-Schmidt process, in float64; those that depend on others become zero.

    Parameters
    ----------
    rows : (r, n), changed
    """
    work = rows.astype(np.float64)
    for k in range(work.shape[0]):
        row = work[k]
        before = _dot(row, row)
        for other in range(k):
            along = _dot(work[other], row)
            for i in range(row.size):
                row[i] -= along * work[other, i]
        after = _dot(row, row)
        factor = 1.0 / sqrt(after) if after > EPS * EPS * before else 0.0
        for i in range(row.size):
            row[i] *= factor
            rows[k, i] = row[i]
