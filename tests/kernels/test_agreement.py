"""Sums that keep the elements on which enough experts agree."""

from __future__ import annotations

import numpy as np
import pytest

from mergegit.kernels.agreement import agreed_sum
from mergegit.kernels.floats import PIECE


@pytest.mark.parametrize("n", [0, 1, 5, PIECE, PIECE + 1, 3 * PIECE - 7])
@pytest.mark.parametrize("votes", [0, 1, 2, 3])
def test_pieces_of_any_length_are_summed(n: int, votes: int) -> None:
    random = np.random.default_rng(n)
    base = random.standard_normal(n).astype(np.float32)
    deltas = random.standard_normal((3, n)).astype(np.float32)
    weights = np.array([0.5, -1.0, 2.0], np.float32)
    share, factor = np.float32(0.7), np.float32(1.5)
    parts = deltas * weights[:, None]
    total = (parts[0] + parts[1]) + parts[2]
    agreeing = (np.abs(parts) >= share * np.abs(total - parts)).sum(axis=0)
    want = base + factor * np.where(agreeing >= votes, total, np.float32(0.0))
    assert np.array_equal(agreed_sum(base, deltas, weights, 0.7, votes, 1.5), want)


def test_a_base_on_which_nobody_agrees_keeps_its_bits() -> None:
    base = np.array([1.5, -0.0, np.inf], np.float32)
    deltas = np.array([[1.0, 0.5, 2.0], [0.0, 0.0, 0.0]], np.float32)
    merged = agreed_sum(base, deltas, np.ones(2, np.float32), 1.0, 2, 1.0)
    assert merged[[0, 2]].tolist() == [1.5, np.inf]
