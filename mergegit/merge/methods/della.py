"""DELLA: drop deltas at random, the smaller of each row more often, and rescale the rest.

In a row of n elements the one of rank r, from 0 for the smallest magnitude, is kept with the
probability density - epsilon + 2 epsilon r / (n - 1), and divided by it, so that it counts as it
would with all of them (the paper's MAGPRUNE, with its epsilon named as the half of the span and
its drop rate as 1 - density).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from mergegit.errors import BadRecipe
from mergegit.kernels.combine import ALWAYS, DELTA, Coefficients, combine
from mergegit.kernels.floats import Floats
from mergegit.kernels.ranks import keep_by_rank
from mergegit.merge.method import (
    DEPTH_SCALED,
    WEIGHT,
    Band,
    Banded,
    ExpertTensor,
    Method,
    Needs,
    Parameter,
    Rule,
    TensorContext,
    Unit,
    floats,
    normalize,
    plain,
)
from mergegit.merge.methods.dare import stream_key

_DENSITY: Final = Parameter(
    "density", 1.0, "mean probability of keeping an element; 1 drops nothing",
    per_expert=True, low=0.0, high=1.0, open_low=True,
)  # fmt: skip
_EPSILON: Final = Parameter(
    "epsilon", 0.15, "how far the probability departs from the density, at the ends of a row",
    per_expert=True, low=0.0, high=0.5,
)  # fmt: skip
_RESCALE: Final = Parameter("rescale", True, "divide what is kept by its probability")


@dataclass(frozen=True, slots=True)
class _Draws:
    """How an expert's elements are kept: with probabilities from ``low`` to ``high`` of a row."""

    low: float
    high: float
    key: int

    @property
    def drops(self) -> bool:
        return self.low < 1.0


def _draws(context: TensorContext, expert: ExpertTensor) -> _Draws:
    density, epsilon = float(expert.parameters["density"]), float(expert.parameters["epsilon"])
    key = stream_key(context.seed, expert.key, context.name)
    if density >= 1.0:
        return _Draws(1.0, 1.0, key)
    low, high = density - epsilon, density + epsilon
    if low <= 0.0 or high >= 1.0:
        raise BadRecipe(
            f"density {density:g} and epsilon {epsilon:g} (of {context.name}) make probabilities "
            f"from {low:g} to {high:g}; they must lie between 0 and 1",
            hint=f"choose an epsilon below {min(density, 1 - density):g}, "
            "or a density of 1, which drops nothing",
        )
    return _Draws(low, high, key)


def _sampled(band: Band, columns: int, draws: Sequence[_Draws], rescale: bool) -> Floats:
    """The deltas of whole rows with what is dropped set to zero, (K, n) float32."""
    out = np.empty_like(band.deltas)
    for delta, draw, kept in zip(band.deltas, draws, out, strict=True):
        if draw.drops:
            values = np.ascontiguousarray(delta)
            keep_by_rank(values, columns, band.first, draw.low, draw.high, draw.key, rescale, kept)
        else:
            kept[:] = delta
    return out


def _della(context: TensorContext, *, elect: bool) -> Rule:
    rescale = bool(context.parameters["rescale"])
    draws = [_draws(context, expert) for expert in context.experts]
    fuse = replace(plain(context), elect=elect)
    if not any(draw.drops for draw in draws):
        return fuse
    densities = [(draw.low + draw.high) / 2 for draw in draws]
    nearest = replace(
        fuse,
        scales=floats([1.0 / p if rescale else 1.0 for p in densities]),
        keep=np.array([round(p * ALWAYS) for p in densities], np.uint64),
    )

    def apply(band: Band) -> Floats:
        return _fused(band, _sampled(band, context.columns, draws, rescale), fuse)

    return Banded(apply, nearest, Unit.ROW)


def _fused(band: Band, deltas: Floats, coefficients: Coefficients) -> Floats:
    """The weighted sum of deltas upon a band's base, by the kernel that all methods share."""
    count, elements = deltas.shape
    merged = combine(
        deltas.view(np.uint8),
        np.full(count, DELTA, np.int64),
        np.arange(count),
        np.ascontiguousarray(band.base).view(np.uint8),
        "F32",
        elements,
        band.first,
        coefficients,
        "F32",
    )
    return np.frombuffer(merged, np.float32)


def _della_elect(context: TensorContext) -> Rule:
    return _della(context, elect=True)


def _della_linear(context: TensorContext) -> Rule:
    return _della(context, elect=False)


DELLA: Final = Method(
    "della",
    "drop deltas at random, small ones more often, rescale the rest, elect a sign per element",
    "DELLA-Merging, arXiv 2406.11617",
    (WEIGHT, _DENSITY, _EPSILON, normalize(True), *DEPTH_SCALED, _RESCALE),
    _della_elect,
    needs=Needs.ROWS,
    flips=0.8,
)

DELLA_LINEAR: Final = Method(
    "della_linear",
    "drop deltas at random, small ones more often, rescale the rest, add them up",
    "DELLA-Merging, arXiv 2406.11617, without the election",
    (WEIGHT, _DENSITY, _EPSILON, normalize(False), *DEPTH_SCALED, _RESCALE),
    _della_linear,
    needs=Needs.ROWS,
    flips=0.2,
)
