"""Numbers that are exact or estimated, and say which."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Figure:
    """A number. ``error`` is its standard error where it was estimated, None where it is exact."""

    value: float
    error: float | None = None

    def root(self) -> Figure:
        """The square root of an energy: a norm."""
        root = math.sqrt(max(self.value, 0.0))
        if self.error is None:
            return Figure(root)
        # An energy that its error drowns has a root of the size of that error's.
        return Figure(root, self.error / (2 * root) if root else math.sqrt(self.error))

    def over(self, other: Figure) -> Figure | None:
        """A quotient of two figures whose errors have nothing to do with one another, if any."""
        if not other.value:
            return None
        quotient = self.value / other.value
        if self.error is None and other.error is None:
            return Figure(quotient)
        own, others = self.error or 0.0, other.error or 0.0
        return Figure(quotient, math.hypot(own, quotient * others) / abs(other.value))


ZERO = Figure(0.0)


def total(figures: Iterable[Figure | None]) -> Figure | None:
    """The sum of independent figures, None where one of them is not known."""
    value, variance, exact = 0.0, 0.0, True
    for figure in figures:
        if figure is None:
            return None
        value += figure.value
        if figure.error is not None:
            exact = False
            variance += figure.error**2
    return Figure(value, None if exact else math.sqrt(variance))


def cosine(product: Figure | None, one: Figure | None, other: Figure | None) -> Figure | None:
    """The cosine of two vectors from their inner product and their energies, if both have any."""
    if product is None or one is None or other is None or one.value <= 0 or other.value <= 0:
        return None
    length = math.sqrt(one.value) * math.sqrt(other.value)
    value = min(max(product.value / length, -1.0), 1.0)
    if product.error is None and one.error is None and other.error is None:
        return Figure(value)
    lengths = math.hypot(
        (one.error or 0.0) / (2 * one.value), (other.error or 0.0) / (2 * other.value)
    )
    return Figure(value, math.hypot((product.error or 0.0) / length, value * lengths))
