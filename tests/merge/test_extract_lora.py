"""Deltas as factors: as near as their rank allows, balanced, and the same every time."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mergegit.errors import NotFinite
from mergegit.merge.extract_lora import EXACT_SIDE, Factors, factor

Floats = npt.NDArray[np.float32]

LARGE = (EXACT_SIDE + 8, EXACT_SIDE + 40)
"""A matrix that is decomposed in a random subspace."""


def noise(m: int, n: int, seed: int = 0) -> Floats:
    return np.random.default_rng((m, n, seed)).standard_normal((m, n)).astype(np.float32)


def with_spectrum(m: int, n: int, values: npt.NDArray[np.float64]) -> Floats:
    """A matrix with these singular values."""
    left, right = (np.linalg.qr(noise(side, len(values)).astype(np.float64))[0] for side in (m, n))
    return ((left * values) @ right.T).astype(np.float32)


def least_error(values: npt.NDArray[np.float64], rank: int) -> float:
    return float(np.sqrt((values[rank:] ** 2).sum() / (values**2).sum()))


def measured(delta: Floats, made: Factors) -> float:
    wide = delta.astype(np.float64)
    missed = wide - made.b.astype(np.float64) @ made.a.astype(np.float64)
    return float(np.linalg.norm(missed) / np.linalg.norm(wide))


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 50))
def test_small_matrices_get_the_best_factors_of_any_rank(m: int, n: int, rank: int) -> None:
    delta = noise(m, n)
    made = factor(delta, rank)
    kept = min(rank, m, n)
    assert (made.b.shape, made.a.shape) == ((m, kept), (kept, n))
    assert made.b.dtype == made.a.dtype == np.float32
    best = least_error(np.linalg.svd(delta.astype(np.float64), compute_uv=False), rank)
    assert made.error == pytest.approx(best, rel=1e-5, abs=1e-5)
    assert made.error == pytest.approx(measured(delta, made), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("decay", [0.5, 1.0])
@pytest.mark.parametrize("rank", [8, 64])
def test_large_matrices_get_factors_near_the_best(rank: int, decay: float) -> None:
    values = np.arange(1, min(LARGE) + 1) ** -decay
    delta = with_spectrum(*LARGE, values)
    made = factor(delta, rank)
    best = least_error(values, rank)
    assert best * (1 - 1e-5) <= made.error <= best * 1.002
    assert made.error == pytest.approx(measured(delta, made), rel=1e-6)


def test_noise_which_has_no_best_subspace_costs_less_than_one_percent() -> None:
    delta = noise(*LARGE)
    values = np.linalg.svd(delta, compute_uv=False).astype(np.float64)
    assert factor(delta, 32).error <= least_error(values, 32) * 1.01


@pytest.mark.parametrize("shape", [(30, 50), LARGE], ids=["exact", "random"])
def test_a_delta_of_low_rank_comes_back(shape: tuple[int, int]) -> None:
    m, n = shape
    delta = noise(m, 6) @ noise(6, n)
    made = factor(delta, 8)
    assert made.error < 1e-5
    np.testing.assert_allclose(made.b @ made.a, delta, atol=1e-4 * np.abs(delta).max())


@pytest.mark.parametrize("shape", [(30, 50), LARGE], ids=["exact", "random"])
def test_singular_values_are_shared_evenly(shape: tuple[int, int]) -> None:
    values = np.linspace(9, 1, 12)
    made = factor(with_spectrum(*shape, values), 5)
    for gram in (made.b.T @ made.b, made.a @ made.a.T):
        np.testing.assert_allclose(gram, np.diag(values[:5]), atol=1e-3)


@pytest.mark.parametrize("shape", [(30, 50), LARGE], ids=["exact", "random"])
def test_the_same_delta_gives_the_same_bits(shape: tuple[int, int]) -> None:
    delta = noise(*shape)
    first, second = factor(delta, 8), factor(np.asfortranarray(delta), 8)
    assert (first.b.tobytes(), first.a.tobytes(), first.error) == (
        second.b.tobytes(),
        second.a.tobytes(),
        second.error,
    )


@pytest.mark.parametrize("shape", [(12, 15), LARGE], ids=["exact", "random"])
@pytest.mark.parametrize("size", [2.0**-130, 2.0**-70, 2.0**70, 2.0**120])
def test_the_size_of_a_delta_does_not_matter(size: float, shape: tuple[int, int]) -> None:
    delta = np.round(noise(*shape) * 64) / np.float32(64)
    found, expected = factor(delta * np.float32(size), 4), factor(delta, 4)
    assert found.error == pytest.approx(expected.error, rel=1e-4)
    root = math.sqrt(size)
    np.testing.assert_allclose(found.b / root, expected.b, atol=1e-3)
    np.testing.assert_allclose(found.a / root, expected.a, atol=1e-3)


def test_a_delta_of_zeros_has_factors_of_zeros() -> None:
    made = factor(np.zeros((3, 5), np.float32), 2)
    assert (made.b.shape, made.a.shape, made.error) == ((3, 2), (2, 5), 0.0)
    assert not made.b.any()
    assert not made.a.any()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_is_refused_by_name(value: float) -> None:
    delta = noise(3, 4)
    delta[1, 1] = value
    with pytest.raises(NotFinite, match=r"model\.q_proj"):
        factor(delta, 2, name="model.q_proj")


@pytest.mark.parametrize(
    ("shape", "rank"), [((3, 4), 0), ((0, 4), 1), ((4, 0), 1), ((4,), 1), ((2, 2, 2), 1)]
)
def test_what_has_no_rank_is_refused(shape: tuple[int, ...], rank: int) -> None:
    with pytest.raises(ValueError, match="no factors"):
        factor(np.ones(shape, np.float32), rank)
