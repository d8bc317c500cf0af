"""Inner products of vectors, in float64 and in one fixed order of summation."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mergegit.kernels.floats import Floats, compiled


def inner_products(vectors: Floats) -> npt.NDArray[np.float64]:
    """The inner products (V, V) of ``vectors`` (V, n) float32."""
    count = vectors.shape[0]
    out = np.zeros((count, count), np.float64)
    _inner_products(vectors, out)
    return out


def grouped_inner_products(
    vectors: Floats, first: int, columns: int, *, by_rows: bool, groups: int
) -> npt.NDArray[np.float64]:
    """Inner products (groups, V, V) within each row, or each column, of a matrix.

    ``vectors`` (V, n) float32 are runs of matrices with ``columns`` columns, from element
    ``first`` on. With ``by_rows`` group g is the g-th row that the run touches, else column g.
    """
    count = vectors.shape[0]
    out = np.zeros((groups, count, count), np.float64)
    _grouped_inner_products(vectors, first, columns, by_rows, out)
    return out


@compiled
def _inner_products(vectors: Any, out: Any) -> None:
    count, n = vectors.shape
    whole = n - n % 8
    for i in range(count):
        a = vectors[i]
        for j in range(i, count):
            b = vectors[j]
            # Eight sums side by side fill a vector register, always in the same order.
            s0 = s1 = s2 = s3 = s4 = s5 = s6 = s7 = 0.0
            for k in range(0, whole, 8):
                s0 += np.float64(a[k]) * np.float64(b[k])
                s1 += np.float64(a[k + 1]) * np.float64(b[k + 1])
                s2 += np.float64(a[k + 2]) * np.float64(b[k + 2])
                s3 += np.float64(a[k + 3]) * np.float64(b[k + 3])
                s4 += np.float64(a[k + 4]) * np.float64(b[k + 4])
                s5 += np.float64(a[k + 5]) * np.float64(b[k + 5])
                s6 += np.float64(a[k + 6]) * np.float64(b[k + 6])
                s7 += np.float64(a[k + 7]) * np.float64(b[k + 7])
            total = ((s0 + s1) + (s2 + s3)) + ((s4 + s5) + (s6 + s7))
            for k in range(whole, n):
                total += np.float64(a[k]) * np.float64(b[k])
            out[i, j] = total
            out[j, i] = total


@compiled
def _grouped_inner_products(
    vectors: Any, first: int, columns: int, by_rows: bool, out: Any
) -> None:
    count, n = vectors.shape
    top = first // columns
    for i in range(count):
        for j in range(i, count):
            for k in range(n):
                place = first + k
                group = place // columns - top if by_rows else place % columns
                out[group, i, j] += np.float64(vectors[i, k]) * np.float64(vectors[j, k])
    for group in range(out.shape[0]):
        for i in range(count):
            for j in range(i):
                out[group, i, j] = out[group, j, i]
