"""RAM: what one expert alone moved is added whole, what several moved is averaged over them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from mergegit.kernels.combine import Coefficients
from mergegit.kernels.floats import Floats
from mergegit.merge.method import (
    Band,
    Banded,
    Doubles,
    Method,
    Needs,
    Parameter,
    TensorContext,
    floats,
    weighted,
)

_EPSILON: Final = Parameter("epsilon", 1e-5, "deltas up to this count as not moved", low=0.0)


@dataclass(frozen=True, slots=True)
class _Sum:
    """b + boosts_k d_k where expert k alone moved an element, and b + sum d_k / count where
    ``count`` of them did, over those."""

    epsilon: np.float32
    boosts: Floats

    def apply(self, band: Band) -> Floats:
        moved = np.abs(band.deltas) > self.epsilon
        counts = moved.sum(axis=0, dtype=np.int32)
        alone = counts == 1
        total = np.zeros(band.base.size, np.float32)
        for place, delta in enumerate(band.deltas):
            boosted = np.where(alone, self.boosts[place] * delta, delta)
            np.add(total, boosted, out=total, where=moved[place])
        total /= np.maximum(counts, 1).astype(np.float32)
        return band.base + total


def _ram(context: TensorContext) -> Banded:
    return _rule(context, np.ones(len(context.experts)))


def _ramplus_tl(context: TensorContext) -> Banded:
    """RAM with d_k where only expert k moved multiplied by 1 + r min(shared_k / unique_k, alpha).

    ``shared_k`` and ``unique_k`` count the elements of the tensor that k moved with others and
    alone. Before they are counted they are estimated from how many each expert moved.
    """
    if context.surveyed is not None:
        shared, unique = context.surveyed.astype(np.float64)
    else:
        moved = _moved_shares(context)
        unique = moved * np.array([_counts_of_others(moved, k)[0] for k in range(moved.size)])
        shared = moved - unique
    most = context.number("alpha")
    ratios = np.where(shared > 0, most, 0.0)
    np.divide(shared, unique, out=ratios, where=unique > 0)
    return _rule(context, 1.0 + context.number("r") * np.minimum(ratios, most))


def _rule(context: TensorContext, boosts: Doubles) -> Banded:
    epsilon = np.float32(context.number("epsilon"))
    rule = _Sum(epsilon, boosts.astype(np.float32))
    return Banded(rule.apply, _nearest(context, epsilon, boosts))


def _nearest(context: TensorContext, epsilon: np.float32, boosts: Doubles) -> Coefficients:
    """Each delta by what it is multiplied by on average where it moved, were experts to choose
    their elements independently. Unread precision is spent beyond ``epsilon`` alone."""
    moved = _moved_shares(context)
    weights = []
    for place, boost in enumerate(boosts):
        others = _counts_of_others(moved, place)
        factors = 1.0 / np.arange(1, others.size + 1)
        factors[0] = boost
        weights.append(float(others @ factors))
    beyond = np.nextafter(epsilon, np.float32(np.inf))
    return replace(weighted(weights), thresholds=floats([float(beyond)] * len(weights)))


def _moved_shares(context: TensorContext) -> Doubles:
    """The share of a tensor's elements that each expert moved at all."""
    counts = [
        0 if expert.histogram is None else int(expert.histogram.counts.sum())
        for expert in context.experts
    ]
    return np.array(counts) / max(context.elements, 1)


def _counts_of_others(moved: Doubles, place: int) -> Doubles:
    """Probabilities that 0, 1, ... of the other experts moved an element."""
    probabilities = np.ones(1)
    for share in np.delete(moved, place):
        probabilities = np.convolve(probabilities, [1.0 - share, share])
    return probabilities


class _Overlap:
    """Counts (2, K) of the elements that each expert moved: with others, and alone."""

    def __init__(self, context: TensorContext) -> None:
        self._epsilon = np.float32(context.number("epsilon"))
        self._counts = np.zeros((2, len(context.experts)), np.int64)

    def measure(self, band: Band) -> npt.NDArray[np.int64]:
        moved = np.abs(band.deltas) > self._epsilon
        alone = moved.sum(axis=0, dtype=np.int32) == 1
        unique = (moved & alone).sum(axis=1)
        return np.stack([moved.sum(axis=1) - unique, unique])

    def add(self, measured: npt.NDArray[np.int64]) -> None:
        self._counts += measured

    def finish(self) -> npt.NDArray[np.int64]:
        return self._counts


RAM: Final = Method(
    "ram",
    "add what one expert alone moved, average what several moved",
    "Reinforced Agent Merging, arXiv 2601.13572",
    (_EPSILON,),
    _ram,
    trims=True,
    flips=0.1,
)

RAMPLUS_TL: Final = Method(
    "ramplus_tl",
    "ram, with more of what one expert alone moved where it shares much of the tensor with others",
    "Reinforced Agent Merging, arXiv 2601.13572",
    (
        _EPSILON,
        Parameter("r", 0.1, "how much more of it for each share of overlap"),
        Parameter("alpha", 0.2, "most overlap that counts", low=0.0),
    ),
    _ramplus_tl,
    needs=Needs.SURVEY,
    survey=_Overlap,
    trims=True,
    flips=0.1,
)
