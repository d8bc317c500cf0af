from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mergegit.kernels.floats import Floats
from mergegit.kernels.gram import grouped_inner_products, inner_products


def vectors(count: int, n: int, seed: int = 0) -> Floats:
    values: Floats = np.random.default_rng(seed).standard_normal((count, n)).astype(np.float32)
    return values


@pytest.mark.parametrize("n", [0, 1, 7, 8, 9, 64, 1001])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_products_are_exact_to_float64(count: int, n: int) -> None:
    made = vectors(count, n).astype(np.float64)
    got = inner_products(vectors(count, n))
    for i in range(count):
        for j in range(count):
            exact = math.fsum(made[i] * made[j])
            assert got[i, j] == pytest.approx(exact, rel=1e-12, abs=1e-12)


def test_products_are_symmetric_to_the_bit() -> None:
    got = inner_products(vectors(4, 1003))
    assert (got == got.T).all()


def test_small_numbers_do_not_vanish_beside_large_ones() -> None:
    """float32 would round 1 away beside 2^24."""
    made = np.ones((1, 1000), np.float32)
    made[0, 0] = 2.0**15
    assert inner_products(made)[0, 0] == 2.0**30 + 999


def test_products_do_not_overflow_where_float32_would() -> None:
    made = np.full((1, 4), 1e30, np.float32)
    assert inner_products(made)[0, 0] == pytest.approx(4e60, rel=1e-6)


def test_a_pairs_product_is_the_same_beside_any_other_vector() -> None:
    made = vectors(5, 321)
    whole = inner_products(made)
    pair = inner_products(np.ascontiguousarray(made[[1, 3]]))
    assert pair[0, 1] == whole[1, 3]


def test_parts_of_a_longer_array_can_be_multiplied() -> None:
    made = vectors(3, 100)
    part = made[:, 20:60]
    assert (inner_products(part) == inner_products(np.ascontiguousarray(part))).all()


@settings(deadline=None)
@given(
    rows=st.integers(1, 5), columns=st.integers(1, 6), start=st.integers(0, 20),
    length=st.integers(1, 40), by_rows=st.booleans(),
)  # fmt: skip
def test_groups_are_rows_or_columns_of_the_matrix(
    rows: int, columns: int, start: int, length: int, by_rows: bool
) -> None:
    size = rows * columns
    first = min(start, size - 1)
    stop = min(first + length, size)
    whole = vectors(3, size)
    top, last = first // columns, (stop - 1) // columns
    groups = last - top + 1 if by_rows else columns
    got = grouped_inner_products(
        whole[:, first:stop], first, columns, by_rows=by_rows, groups=groups
    )
    masked = np.zeros((3, size))
    masked[:, first:stop] = whole[:, first:stop]
    matrices = masked.reshape(3, rows, columns)
    want = np.einsum("irc,jrc->rij" if by_rows else "irc,jrc->cij", matrices, matrices)
    want = want[top : last + 1] if by_rows else want
    assert got.shape == (groups, 3, 3)
    assert np.allclose(got, want, rtol=1e-12, atol=1e-12)
    assert (got == got.transpose(0, 2, 1)).all()
