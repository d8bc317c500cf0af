"""The spread of experts about their mean, and sums that depend on it."""

from __future__ import annotations

import numpy as np
import pytest

from mergegit.kernels.floats import PIECE, Floats
from mergegit.kernels.spread import fuse_agreeing, measure_spread
from mergegit.statistics import BIN_SHIFT, Histogram


def random_deltas(n: int, experts: int = 3) -> Floats:
    return np.random.default_rng(n).standard_normal((experts, n)).astype(np.float32)


def spread_of(deltas: Floats) -> Floats:
    spread: Floats = deltas.astype(np.float64).std(axis=0).astype(np.float32)
    return spread


@pytest.mark.parametrize("n", [1, 5, PIECE, PIECE + 1, 3 * PIECE - 7])
def test_every_element_is_counted_in_the_bin_of_its_spread(n: int) -> None:
    deltas = random_deltas(n)
    bins, counts, energies = measure_spread(deltas)
    bits = spread_of(deltas).view(np.uint32)
    want = (bits >> BIN_SHIFT) * 2 + ((bits & ((1 << BIN_SHIFT) - 1)) != 0)
    assert int(counts.sum()) == n
    at = np.searchsorted(bins, want)
    # The last bit of a spread may be rounded either way: an element may lie beside its bin.
    exact = bins[np.minimum(at, bins.size - 1)] == want
    assert exact.mean() > 0.99
    squares = np.square(deltas.astype(np.float64))
    assert energies.sum(axis=0) == pytest.approx(squares.sum(axis=1))
    for place in np.flatnonzero(counts == 1)[:20]:
        (element,) = np.flatnonzero(want == bins[place])
        assert energies[place] == pytest.approx(squares[:, element])


def test_the_histogram_finds_the_elements_of_largest_spread() -> None:
    deltas = random_deltas(100_000)
    bins, counts, _ = measure_spread(deltas)
    threshold = Histogram(bins, counts).threshold(30_000)
    assert int((spread_of(deltas) >= threshold).sum()) == pytest.approx(30_000, abs=20)


def test_equal_deltas_have_no_spread() -> None:
    one = random_deltas(1000, experts=1)
    bins, counts, energies = measure_spread(np.repeat(one, 7, axis=0))
    assert bins.tolist() == [0]
    assert counts.tolist() == [1000]
    assert energies[0] == pytest.approx([float(np.square(one.astype(np.float64)).sum())] * 7)


def test_tiny_deltas_have_a_spread() -> None:
    deltas = random_deltas(100) * np.float32(2.0**-120)
    bins, counts, _ = measure_spread(deltas)
    assert bins.min() > 0
    assert int(counts.sum()) == 100


def test_what_is_not_finite_counts_nowhere() -> None:
    deltas = random_deltas(10)
    deltas[0, 3], deltas[1, 4] = np.nan, np.inf
    bins, counts, energies = measure_spread(deltas)
    assert (bins[0], counts[0]) == (0, 2)
    assert energies[0].tolist() == [0.0, 0.0, 0.0]
    assert np.isfinite(energies).all()


@pytest.mark.parametrize("n", [0, 1, PIECE, PIECE + 1, 3 * PIECE - 7])
@pytest.mark.parametrize("least", [0.0, 0.8])
def test_the_mean_of_those_with_the_elected_sign_is_added(n: int, least: float) -> None:
    deltas, base = random_deltas(n), random_deltas(n + 1, experts=1)[0, :n].copy()
    weights = np.array([0.2, 0.7, 0.1], np.float32)
    got = fuse_agreeing(base, deltas, weights, least, 0.5)
    total = (deltas[0] + deltas[1]) + deltas[2]
    agrees = np.where(total >= 0, deltas > 0, deltas < 0)
    own = np.where(agrees, weights[:, None], np.float32(0.0))
    merged = own * deltas
    mean = ((merged[0] + merged[1]) + merged[2]) / ((own[0] + own[1]) + own[2])
    mean = np.where(spread_of(deltas) >= least, mean, np.float32(0.0))
    assert np.array_equal(got, base + np.float32(0.5) * mean)


def test_where_nobody_moved_the_base_keeps_its_value() -> None:
    base = np.array([1.5, -2.0], np.float32)
    still = np.zeros((2, 2), np.float32)
    assert fuse_agreeing(base, still, np.ones(2, np.float32), 0.0, 1.0).tolist() == [1.5, -2.0]
    assert fuse_agreeing(base, still, np.zeros(2, np.float32), np.inf, 1.0).tolist() == [1.5, -2.0]
