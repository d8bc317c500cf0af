"""Cosines and energies from sketches: how near they are, and whether their errors are true."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest

from mergegit.kernels.measure import measure
from mergegit.repository.figures import Figure
from mergegit.repository.known import Known, added_up, apart, product

Floats = npt.NDArray[np.float32]


def known(values: Floats) -> Known:
    """What statistics say of a change of these values."""
    measured = measure(values.view(np.uint8), "F32", None, "F32", values.size, 0)
    return Known(values.size, Figure(measured.energy), measured.sketch)


def pair(cosine: float, elements: int, seed: int) -> tuple[Floats, Floats]:
    """Two vectors with a cosine, of different lengths."""
    x, noise = np.random.default_rng(seed).standard_normal((2, elements))
    noise -= x * (noise @ x) / (x @ x)
    noise *= math.sqrt((x @ x) / (noise @ noise))
    y = cosine * x + math.sqrt(1 - cosine**2) * noise
    return x.astype(np.float32), (3 * y).astype(np.float32)


@pytest.mark.parametrize("cosine", [-0.9, 0.0, 0.4, 0.99])
def test_cosines_are_estimated_without_a_slant_and_err_as_they_say(cosine: float) -> None:
    errors, stated = [], []
    for seed in range(80):
        x, y = pair(cosine, 8_000, seed)
        one, other = known(x), known(y)
        found = product(one, other)
        length = math.sqrt(one.energy.value * other.energy.value)
        assert found.error is not None
        errors.append(found.value / length - cosine)
        stated.append(found.error / length)
    spread = np.std(errors)
    assert spread == pytest.approx(np.mean(stated), rel=0.3)
    assert abs(np.mean(errors)) < 4 * spread / math.sqrt(len(errors))


def test_knowing_the_lengths_makes_cosines_much_nearer() -> None:
    """Beside the plain product of sketches, whose error does not shrink where two are alike."""
    plain, better = [], []
    for seed in range(40):
        x, y = pair(0.95, 20_000, seed)
        one, other = known(x), known(y)
        length = math.sqrt(one.energy.value * other.energy.value)
        plain.append(float(one.sketch @ other.sketch) / length - 0.95)
        better.append(product(one, other).value / length - 0.95)
    assert np.std(better) < np.std(plain) / 8


def test_the_difference_of_two_that_are_nearly_the_same_keeps_its_digits() -> None:
    x = np.random.default_rng(0).standard_normal(50_000).astype(np.float32)
    step = np.random.default_rng(1).standard_normal(50_000).astype(np.float32) * np.float32(1e-4)
    y = (x + step).astype(np.float32)
    difference = added_up([known(y), known(x).reversed()])
    true = float(((y.astype(np.float64) - x) ** 2).sum())
    assert difference.energy.error is not None
    assert difference.energy.value == pytest.approx(true, rel=0.4)
    assert abs(difference.energy.value - true) < 4 * difference.energy.error


def test_a_change_and_back_is_nothing() -> None:
    x = known(np.random.default_rng(0).standard_normal(50_000).astype(np.float32))
    assert added_up([x, x.reversed()]).energy.value == pytest.approx(0.0, abs=1e-9)
    u, errors = apart(np.stack([x.sketch, x.sketch]), np.full(2, x.energy.value), x.elements)
    assert u.max() == pytest.approx(0.0, abs=1e-12)
    assert errors.max() == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("count", [2, 3, 5])
def test_the_energy_of_a_sum_errs_as_it_says(count: int) -> None:
    off = []
    for seed in range(40):
        draws = np.random.default_rng(seed).standard_normal((count, 20_000))
        parts = (draws * np.arange(1, count + 1)[:, None]).astype(np.float32)
        found = added_up([known(part) for part in parts]).energy
        true = float((parts.astype(np.float64).sum(axis=0) ** 2).sum())
        assert found.error is not None
        off.append((found.value - true) / found.error)
    assert 0.7 < np.std(off) < 1.3
    assert abs(np.mean(off)) < 0.5


def test_small_tensors_are_known_exactly() -> None:
    """Each of at most 256 elements has a bucket of its own."""
    x, y = np.random.default_rng(0).standard_normal((2, 200)).astype(np.float32)
    found = product(known(x), known(y))
    assert found.error is None
    assert found.value == pytest.approx(float(x.astype(np.float64) @ y), rel=1e-6)
    assert added_up([known(x), known(y)]).energy.error is None


def test_nothing_is_at_a_right_angle_to_all() -> None:
    x = known(np.random.default_rng(0).standard_normal(5_000).astype(np.float32))
    assert product(x, Known.nothing(5_000, 1)) == Figure(0.0)
    assert added_up([x, Known.nothing(5_000, 1)]).energy.value == pytest.approx(x.energy.value)
