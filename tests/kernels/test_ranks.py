"""Ranks of magnitudes within rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from mergegit.kernels.floats import Floats
from mergegit.kernels.ranks import double_ranks


def plainly(values: Floats, columns: int) -> list[int]:
    """The number of smaller ones, and the number of those and equal ones less one, added up."""
    out = []
    for row in np.abs(values).reshape(-1, columns):
        for value in row:
            out.append(int((row < value).sum()) + int((row <= value).sum()) - 1)
    return out


@given(
    values=arrays(
        np.float32, st.integers(1, 60),
        elements=st.one_of(
            st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, np.inf, 1e-45, -3e38]),
            st.floats(width=32, allow_nan=False),
        ),
    ),
    rows=st.integers(1, 3),
)  # fmt: skip
def test_equal_magnitudes_share_the_mean_of_their_ranks(values: Floats, rows: int) -> None:
    columns = max(values.size // rows, 1)
    whole = values[: values.size // columns * columns]
    assert double_ranks(whole, columns).tolist() == plainly(whole, columns)


@pytest.mark.parametrize("columns", [1, 2, 24, 25, 511, 512, 3000])
@pytest.mark.parametrize("kind", ["distinct", "few", "one", "none", "narrow"])
def test_rows_of_any_length_are_ranked(columns: int, kind: str) -> None:
    random = np.random.default_rng(columns)
    values = random.standard_normal(3 * columns).astype(np.float32)
    values = {
        "distinct": values,
        "few": np.round(values),
        "one": np.copysign(np.float32(0.5), values),
        "none": np.zeros_like(values),
        "narrow": (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32),
    }[kind]
    assert double_ranks(values, columns).tolist() == plainly(values, columns)


def test_nan_ranks_above_infinity() -> None:
    values = np.array([np.nan, 1.0, np.inf, -2.0], np.float32)
    assert double_ranks(values, 4).tolist() == [6, 0, 4, 2]


def test_no_elements_have_no_ranks() -> None:
    assert double_ranks(np.empty(0, np.float32), 7).size == 0
