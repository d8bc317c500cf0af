"""Sums whose weights differ from group to group."""

from __future__ import annotations

import numpy as np
import pytest

from mergegit.merge.grouped import GroupedSum
from mergegit.merge.method import Band, Doubles, weighted

ROWS, COLUMNS = 6, 7
GENERATOR = np.random.default_rng(0)
BASE = GENERATOR.normal(size=(ROWS, COLUMNS)).astype(np.float32)
DELTAS = GENERATOR.normal(size=(3, ROWS, COLUMNS)).astype(np.float32)


def grouped(by_rows: bool, scales: Doubles | None = None) -> GroupedSum:
    groups = ROWS if by_rows else COLUMNS
    weights = np.random.default_rng(1).normal(size=(groups, 3))
    scales = np.linspace(0.5, 1.5, groups) if scales is None else scales
    return GroupedSum.of(weights, scales, COLUMNS, by_rows=by_rows)


def applied(sums: GroupedSum, block: int) -> np.ndarray:
    base, deltas = BASE.reshape(-1), DELTAS.reshape(3, -1)
    return np.concatenate(
        [
            sums.apply(Band(base[at : at + block], deltas[:, at : at + block], at))
            for at in range(0, base.size, block)
        ]
    ).reshape(ROWS, COLUMNS)


@pytest.mark.parametrize("by_rows", [True, False])
def test_every_group_has_its_own_weights(by_rows: bool) -> None:
    sums = grouped(by_rows)
    merged = applied(sums, ROWS * COLUMNS)
    assert merged.dtype == np.float32
    for group in range(ROWS if by_rows else COLUMNS):
        here = (group, slice(None)) if by_rows else (slice(None), group)
        exact = sums.base_scales[group] * BASE[here].astype(np.float64)
        for weight, delta in zip(sums.weights[group], DELTAS, strict=True):
            exact = exact + np.float64(weight) * delta[here]
        np.testing.assert_allclose(merged[here], exact, rtol=0, atol=1e-6)


@pytest.mark.parametrize("by_rows", [True, False])
@pytest.mark.parametrize("block", [1, 4, 7, 10])
def test_blocks_may_be_cut_anywhere(by_rows: bool, block: int) -> None:
    sums = grouped(by_rows)
    np.testing.assert_array_equal(applied(sums, block), applied(sums, ROWS * COLUMNS))


def test_the_base_is_kept_only_where_every_group_keeps_it() -> None:
    nearest = weighted([0.5, 0.5, 0.5])
    ones = np.ones(ROWS)
    assert grouped(True, ones).rule(nearest).nearest.keeps_base
    for scale in (1.001, 0.7):
        ones[2] = scale
        found = grouped(True, ones).rule(nearest).nearest
        assert found.base_scale == np.float32(scale)
        assert found.weights.tolist() == [0.5, 0.5, 0.5]


def test_a_scale_that_float32_cannot_tell_from_one_keeps_the_base() -> None:
    sums = grouped(True, np.full(ROWS, 1.0 + 1e-9))
    assert sums.rule(weighted([1.0])).nearest.keeps_base


def test_a_tensor_without_groups_keeps_the_base() -> None:
    sums = GroupedSum.of(np.zeros((0, 2)), np.zeros(0), 5, by_rows=True)
    assert sums.rule(weighted([1.0, 1.0])).nearest.keeps_base
