"""Numbers that say whether they are exact."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mergegit.repository.figures import Figure, cosine, total


def test_a_sum_of_exact_numbers_is_exact() -> None:
    assert total([Figure(1.0), Figure(2.5)]) == Figure(3.5)
    assert total([]) == Figure(0.0)


def test_errors_of_a_sum_add_up_as_those_of_independent_numbers_do() -> None:
    assert total([Figure(1.0, 3.0), Figure(2.0), Figure(4.0, 4.0)]) == Figure(7.0, 5.0)


def test_a_sum_with_something_unknown_is_unknown() -> None:
    assert total([Figure(1.0), None]) is None


@pytest.mark.parametrize("operation", ["root", "over", "cosine"])
def test_errors_are_carried_on_as_draws_spread(operation: str) -> None:
    draws = np.random.default_rng(0).standard_normal((3, 200_000))
    one, two, three = (
        Figure(4.0, 0.05), Figure(9.0, 0.2), Figure(3.0, 0.04),
    )  # fmt: skip
    first, second, third = (
        f.value + f.error * z
        for f, z in zip((one, two, three), draws, strict=True)  # type: ignore[operator]
    )
    figure, spread = {
        "root": (one.root(), np.sqrt(first)),
        "over": (one.over(two), first / second),
        "cosine": (cosine(three, one, two), third / np.sqrt(first * second)),
    }[operation]
    assert figure is not None
    assert figure.error == pytest.approx(spread.std(), rel=0.02)
    assert figure.value == pytest.approx(spread.mean(), rel=0.01)


def test_nothing_has_no_direction() -> None:
    assert cosine(Figure(0.0), Figure(0.0), Figure(1.0)) is None
    assert cosine(None, Figure(1.0), Figure(1.0)) is None
    assert cosine(Figure(1.5), Figure(1.0), Figure(1.0)) == Figure(1.0)


def test_a_share_of_nothing_is_unknown() -> None:
    assert Figure(1.0).over(Figure(0.0)) is None


def test_an_energy_below_zero_is_none() -> None:
    assert Figure(-1.0, 4.0).root() == Figure(0.0, 2.0)
    assert math.isclose(Figure(4.0).root().value, 2.0)
