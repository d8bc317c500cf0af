"""Recipes that every method understands: as many experts as it merges, what it must be told."""

from __future__ import annotations

from collections.abc import Sequence

from mergegit.merge.methods import METHODS

EXAMPLE = 0.5
"""Given for parameters that have no default."""


def experts_for(method: str, experts: Sequence[str]) -> list[str]:
    """The first of ``experts``, no more than the method merges; the last again where it needs
    more."""
    low, high = METHODS[method].models
    chosen = list(experts[: high or len(experts)])
    return chosen + chosen[-1:] * (low - len(chosen))


def needed_parameters(method: str) -> dict[str, float]:
    # nearswap's t is a distance between elements; half is farther than any two are apart.
    example = 1e-3 if method == "nearswap" else EXAMPLE
    return {p.name: example for p in METHODS[method].parameters if p.default is None}
