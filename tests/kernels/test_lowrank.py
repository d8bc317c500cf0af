"""Low-rank changes: the sum in its order, whatever the cut, and DoRA's lengths."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mergegit.kernels.lowrank import add_square_sums, dora_delta, dora_gain, low_rank_delta

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

both_layouts = pytest.mark.parametrize("transposed", [False, True])


def factors(m: int, n: int, rank: int, seed: int = 0) -> tuple[Floats, Floats]:
    """``a`` (rank, n) and ``b`` (m, rank)."""
    draws = np.random.default_rng((m, n, rank, seed))
    a, b = draws.standard_normal((rank, n)), draws.standard_normal((m, rank))
    return a.astype(np.float32), b.astype(np.float32)


def in_order(a: Floats, b: Floats, scale: float, transposed: bool) -> Floats:
    """The sum as it is defined: one rounded product and one rounded addition at a time."""
    total = np.zeros((len(b), a.shape[1]), np.float32)
    for k in range(len(a)):
        total += b[:, k : k + 1] * a[k]
    total *= np.float32(scale)
    return np.ascontiguousarray(total.T) if transposed else total


def stored(m: int, n: int, transposed: bool) -> tuple[int, int]:
    return (n, m) if transposed else (m, n)


def cuts(size: int, shares: list[float]) -> list[tuple[int, int]]:
    """Runs, as (first, elements), that cover ``size`` elements; some may be empty."""
    edges = sorted({0, size, *(round(share * size) for share in shares)})
    return [(first, stop - first) for first, stop in pairwise(edges)] or [(0, size)]


def matrices(m: int, n: int, seed: int = 1) -> tuple[Floats, Floats]:
    """Weights and a change of them."""
    draws = np.random.default_rng((m, n, seed))
    w, delta = draws.standard_normal((2, m, n)).astype(np.float32)
    return w, delta * np.float32(0.1)


shares = st.lists(st.floats(0, 1), max_size=5)
sides = st.integers(1, 40)


@both_layouts
@pytest.mark.parametrize(
    ("m", "n", "rank"),
    [(1, 1, 1), (5, 3, 2), (7, 9, 8), (6, 1300, 37), (1300, 6, 16), (3, 513, 65)],
)
def test_every_element_is_the_sum_in_the_order_of_its_terms(
    m: int, n: int, rank: int, transposed: bool
) -> None:
    a, b = factors(m, n, rank)
    found = low_rank_delta(a, b, 0.7, transposed, stored(m, n, transposed), 0, m * n)
    expected = in_order(a, b, 0.7, transposed)
    np.testing.assert_array_equal(found.view(np.uint32), expected.ravel().view(np.uint32))


@settings(deadline=None, max_examples=80)
@given(sides, sides, st.integers(1, 40), st.booleans(), shares)
def test_any_cut_into_runs_gives_the_whole(
    m: int, n: int, rank: int, transposed: bool, where: list[float]
) -> None:
    a, b = factors(m, n, rank)
    shape = stored(m, n, transposed)
    whole = low_rank_delta(a, b, 1.5, transposed, shape, 0, m * n)
    parts = [
        low_rank_delta(a, b, 1.5, transposed, shape, first, elements)
        for first, elements in cuts(m * n, where)
    ]
    np.testing.assert_array_equal(np.concatenate(parts).view(np.uint32), whole.view(np.uint32))


@both_layouts
def test_the_delta_is_the_product_of_the_factors(transposed: bool) -> None:
    a, b = factors(50, 70, 16)
    found = low_rank_delta(a, b, 2.5, transposed, stored(50, 70, transposed), 0, 3500)
    exact = 2.5 * b.astype(np.float64) @ a.astype(np.float64)
    exact = exact.T if transposed else exact
    np.testing.assert_allclose(found, exact.ravel(), rtol=0, atol=1e-4)


@both_layouts
def test_factors_may_lie_in_memory_as_they_like(transposed: bool) -> None:
    a, b = factors(6, 11, 5)
    shape = stored(6, 11, transposed)
    expected = low_rank_delta(a, b, 1.0, transposed, shape, 3, 40)
    frozen = np.frombuffer(a.tobytes(), np.float32).reshape(a.shape)
    turned = np.asfortranarray(b)
    found = low_rank_delta(frozen, turned, 1.0, transposed, shape, 3, 40)
    np.testing.assert_array_equal(found, expected)


def test_what_is_not_finite_in_a_factor_shows_in_the_delta() -> None:
    a, b = factors(2, 3, 2)
    a[1, 2] = np.nan
    found = low_rank_delta(a, b, 1.0, False, (2, 3), 0, 6).reshape(2, 3)
    assert np.isnan(found[:, 2]).all()
    assert np.isfinite(found[:, :2]).all()


def output_norms(v: Doubles, transposed: bool) -> Doubles:
    return np.sqrt((v**2).sum(axis=0 if transposed else 1))


@both_layouts
def test_square_sums_are_those_of_each_output(transposed: bool) -> None:
    w, delta = matrices(9, 14)
    sums = np.zeros(14 if transposed else 9)
    add_square_sums(w.ravel(), delta.ravel(), transposed, 0, 14, sums)
    norms = output_norms(w.astype(np.float64) + delta, transposed)
    np.testing.assert_allclose(np.sqrt(sums), norms, rtol=1e-14)


@settings(deadline=None, max_examples=60)
@given(sides, sides, st.booleans(), shares)
def test_any_cut_into_runs_gives_the_same_square_sums_and_dora_deltas(
    m: int, n: int, transposed: bool, where: list[float]
) -> None:
    w, delta = (matrix.ravel() for matrix in matrices(m, n))
    outputs = n if transposed else m
    gain = np.linspace(0.5, 1.5, outputs)
    whole, parted = np.zeros(outputs), np.zeros(outputs)
    add_square_sums(w, delta, transposed, 0, n, whole)
    made = []
    for first, elements in cuts(m * n, where):
        run = slice(first, first + elements)
        add_square_sums(w[run], delta[run], transposed, first, n, parted)
        made.append(dora_delta(w[run], delta[run], gain, transposed, first, n))
    np.testing.assert_array_equal(parted.view(np.uint64), whole.view(np.uint64))
    expected = dora_delta(w, delta, gain, transposed, 0, n)
    np.testing.assert_array_equal(np.concatenate(made).view(np.uint32), expected.view(np.uint32))


@both_layouts
def test_dora_gives_every_output_the_length_of_its_magnitude(transposed: bool) -> None:
    w, delta = matrices(20, 30)
    outputs = 30 if transposed else 20
    magnitude = np.linspace(0.1, 3, outputs).astype(np.float32)
    sums = np.zeros(outputs)
    add_square_sums(w.ravel(), delta.ravel(), transposed, 0, 30, sums)
    gain = dora_gain(magnitude, sums)
    made = dora_delta(w.ravel(), delta.ravel(), gain, transposed, 0, 30).reshape(20, 30)
    merged = w.astype(np.float64) + made
    np.testing.assert_allclose(output_norms(merged, transposed), magnitude, rtol=1e-5)
    straight = w.astype(np.float64) + delta
    per_output = gain if transposed else gain[:, None]
    np.testing.assert_allclose(merged, per_output * straight, rtol=0, atol=1e-6)


def test_a_gain_of_one_leaves_the_low_rank_delta() -> None:
    w, delta = matrices(4, 5)
    made = dora_delta(w.ravel(), delta.ravel(), np.ones(4), False, 0, 5)
    np.testing.assert_array_equal(made, delta.ravel())


def test_an_output_of_zeros_stays_as_it_is() -> None:
    w = np.array([0, 0, 3, 4], np.float32)
    delta = np.zeros(4, np.float32)
    sums = np.zeros(2)
    add_square_sums(w, delta, False, 0, 2, sums)
    gain = dora_gain(np.array([7, 10], np.float32), sums)
    np.testing.assert_array_equal(gain, [0, 2])
    np.testing.assert_array_equal(dora_delta(w, delta, gain, False, 0, 2), [0, 0, 3, 4])
