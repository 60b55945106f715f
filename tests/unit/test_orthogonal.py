"""Kernels of factors, against numpy."""

import numpy as np
import pytest

from mpitrain.kernels.orthogonal import add_product, orthonormalize, project_columns, project_rows

SIZES = [(1, 1, 1), (3, 5, 2), (8, 64, 4), (33, 17, 7), (130, 129, 64)]


def drawn(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("m", "n", "r"), SIZES)
def test_products(m, n, r, dtype):
    matrix, left, right = drawn(m, n, dtype=dtype), drawn(r, m, dtype=dtype, seed=1), drawn(r, n, dtype=dtype, seed=2)
    close = {"rtol": 0, "atol": 2e-6 * (m + n)} if dtype == np.float32 else {"rtol": 1e-12, "atol": 1e-12}
    out = np.full((r, m), np.nan, dtype)
    project_rows(matrix, right, out)
    np.testing.assert_allclose(out, right @ matrix.T, **close)
    out = np.full((r, n), np.nan, dtype)
    project_columns(matrix, left, out)
    np.testing.assert_allclose(out, left @ matrix, **close)
    acc = matrix.copy()
    add_product(dtype(-2), left, right, acc)
    np.testing.assert_allclose(acc, matrix - 2 * left.T @ right, **close)


def test_the_order_of_products_is_fixed():
    """Bits, as a loop adds them up: rows of the matrix one after the other, in float32."""
    matrix, left = drawn(50, 9), drawn(3, 50, seed=1)
    expected = np.zeros((3, 9), np.float32)
    for i in range(50):
        expected += left[:, i : i + 1] * matrix[i]
    out = np.empty_like(expected)
    project_columns(matrix, left, out)
    assert out.tobytes() == expected.tobytes()


@pytest.mark.parametrize(("r", "n"), [(1, 1), (2, 5), (4, 64), (7, 130), (64, 200)])
def test_rows_become_those_of_a_qr_up_to_sign(r, n):
    rows = drawn(r, n)
    expected = np.linalg.qr(rows.T.astype(np.float64))[0].T
    orthonormalize(rows)
    signs = np.sign((rows * expected).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(rows, signs * expected, atol=1e-6)
    np.testing.assert_allclose(rows @ rows.T, np.eye(r), atol=1e-6)


def test_magnitudes_do_not_matter():
    rows = drawn(3, 20)
    for scale in (1e-36, 1e30):
        scaled = rows * np.float32(scale)
        orthonormalize(scaled)
        np.testing.assert_allclose(scaled @ scaled.T, np.eye(3), atol=1e-6)


def test_rows_that_depend_on_others_become_zero():
    a, b = drawn(2, 20)
    rows = np.stack([a, 2 * a, np.zeros_like(a), b, a + b])
    orthonormalize(rows)
    assert rows.any(axis=1).tolist() == [True, False, False, True, False]
    more = drawn(4, 2)  # no more than two can be independent
    orthonormalize(more)
    assert more.any(axis=1).tolist() == [True, True, False, False]
