"""Lengths and angles from inner products, beside those of the vectors themselves."""

from __future__ import annotations

import numpy as np
import pytest

from mergegit.merge.directions import Directions, known_gram
from mergegit.merge.method import ExpertTensor, TensorContext

Array = np.ndarray


def vectors(seed: int, count: int, n: int, scale: float) -> tuple[Array, Array]:
    """A base of unit scale and deltas of another, all with few enough digits for exact sums."""
    generator = np.random.default_rng(seed)
    base = np.round(generator.normal(size=n) * 2**10) / 2**10
    deltas = np.round(generator.normal(size=(count, n)) * 2**10) / 2**10 * scale
    return base, deltas


def gram_of(base: Array, deltas: Array) -> Array:
    stacked = np.vstack([base[None], deltas])
    return stacked @ stacked.T


def apart_of(models: Array) -> Array:
    """The squared distances of the unit vectors, from differences in extended precision."""
    wide = models.astype(np.longdouble)
    units = wide / np.sqrt((wide**2).sum(axis=1, keepdims=True))
    return np.asarray(((units[:, None] - units[None]) ** 2).sum(axis=-1), np.float64)


@pytest.mark.parametrize("deltas", [True, False])
@pytest.mark.parametrize("exponent", [2, 0, -5, -12, -20])
def test_nothing_is_lost_where_models_are_alike(deltas: bool, exponent: int) -> None:
    base, changes = vectors(1, 4, 500, 2.0**exponent)
    found = Directions.of(gram_of(base, changes), deltas=deltas)
    want = changes if deltas else base + changes
    np.testing.assert_allclose(found.lengths, np.linalg.norm(want, axis=1), rtol=1e-14)
    # 1 - cos would be good to 1e-16 of one, which is nothing at all for the last of these scales.
    np.testing.assert_allclose(found.apart, apart_of(want), rtol=1e-9, atol=0)


def test_opposite_vectors_are_four_apart_and_equal_ones_not_at_all() -> None:
    base, (one, other) = vectors(2, 2, 50, 0.1)
    found = Directions.of(gram_of(base, np.stack([one, -one, one, 3 * other])), deltas=True)
    assert found.apart[0, 1] == 4.0
    assert found.apart[0, 2] == 0.0
    assert found.lengths[0] == found.lengths[1] == found.lengths[2]
    assert 0.0 < found.apart[0, 3] < 4.0


@pytest.mark.parametrize("bad", [0.0, np.nan, np.inf])
def test_a_vector_without_direction_is_of_no_length_and_apart_from_none(bad: float) -> None:
    base, changes = vectors(3, 3, 50, 0.1)
    changes[1] = bad
    with np.errstate(invalid="ignore"):
        gram = gram_of(base, changes)
    found = Directions.of(gram, deltas=True)
    assert found.lengths[1] == 0.0
    assert not found.apart[1].any()
    assert not found.apart[:, 1].any()
    assert found.apart[0, 2] > 0.0


def test_a_model_that_is_all_zeros_has_no_direction() -> None:
    base, changes = vectors(4, 2, 50, 0.1)
    changes[0] = -base
    found = Directions.of(gram_of(base, changes), deltas=False)
    assert found.lengths[0] == 0.0
    assert found.lengths[1] > 0.0


@pytest.mark.parametrize("deltas", [True, False])
def test_groups_are_each_by_themselves(deltas: bool) -> None:
    grams = np.stack([gram_of(*vectors(seed, 3, 40, 0.1)) for seed in range(5)])
    together = Directions.of(grams, deltas=deltas)
    for place, gram in enumerate(grams):
        alone = Directions.of(gram, deltas=deltas)
        np.testing.assert_array_equal(together.lengths[place], alone.lengths)
        np.testing.assert_array_equal(together.apart[place], alone.apart)


def test_what_is_known_of_a_tensor() -> None:
    """What a survey found goes before estimates, and groups are added up."""
    experts = [ExpertTensor({}, None, b"")] * 2
    estimated, surveyed = np.eye(3), np.stack([np.ones((3, 3)), np.eye(3)])

    def known(**found: Array) -> Array:
        context = TensorContext("w", (2, 4), {}, 0, experts, **found)  # type: ignore[arg-type]
        return known_gram(context)

    np.testing.assert_array_equal(known(gram=estimated), estimated)
    np.testing.assert_array_equal(known(gram=estimated, surveyed=surveyed[0]), surveyed[0])
    np.testing.assert_array_equal(known(gram=estimated, surveyed=surveyed), surveyed.sum(axis=0))
    np.testing.assert_array_equal(known(), np.zeros((3, 3)))
