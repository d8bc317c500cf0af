"""Two models, the second seen from the first: parts of it are taken over, and the rest stays.

With v_0 = b + d_0 the first model and v_1 = b + d_1 the second, both methods are
v_0 + m (v_1 - v_0) with a share m between 0 and 1 for each element.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from mergegit.kernels.combine import ALWAYS, Coefficients
from mergegit.kernels.floats import Floats
from mergegit.merge.directions import known_gram
from mergegit.merge.method import (
    Band,
    Banded,
    Doubles,
    Merges,
    Method,
    Needs,
    Parameter,
    TensorContext,
    Unit,
    weighted,
)

_FLOOR: Final = np.float32(1e-6)
"""Differences below this count as this much."""

_PIECE: Final = 1 << 20
"""About so many elements are worked on in float64 at a time."""


def _taken_over(share: float) -> Coefficients:
    """The nearest sum, where about ``share`` of the elements are the second model's and the rest
    are the first's: each model's error counts where the element is its own."""
    keep = [round((1.0 - share) * ALWAYS), round(share * ALWAYS)]
    return replace(weighted([1.0, 1.0]), keep=np.array(keep, np.uint64))


def _nearswap(context: TensorContext) -> Banded:
    """v_0 + m (v_1 - v_0) with m = min(t / max(|v_1 - v_0|, 1e-6), 1)"""
    reach = np.float32(context.number("t"))

    def apply(band: Band) -> Floats:
        apart = band.deltas[1] - band.deltas[0]
        share = np.minimum(reach / np.maximum(np.abs(apart), _FLOOR), np.float32(1.0))
        swapped = band.base + band.deltas[1]
        moved: Floats = (band.base + band.deltas[0]) + share * apart
        np.copyto(moved, swapped, where=share == 1.0)
        return moved

    return Banded(apply, _taken_over(_share_within(context, float(reach))))


def _share_within(context: TensorContext, reach: float) -> float:
    """The share of elements that differ by no more than ``reach``, if differences are normal."""
    gram = known_gram(context)
    square = gram[1, 1] - 2.0 * gram[1, 2] + gram[2, 2]
    if not square > 0 or not context.elements:
        return 1.0
    return math.erf(reach / math.sqrt(2.0 * square / context.elements))


NEARSWAP: Final = Method(
    "nearswap",
    "the first model, moved towards the second by at most t in each element",
    "no paper; known from huggingface.co/alchemonaut/QuartetAnemoi-70B-t0.0001",
    (Parameter("t", None, "how far an element moves at most", low=0.0),),
    _nearswap,
    models=(2, 2),
    merges=Merges.FROM_FIRST,
)


_FUSED_SHARE: Final = 0.3
"""About so much of the energy of normal differences is beyond the threshold of arcee_fusion, in a
twentieth of the elements."""


def _arcee_fusion(context: TensorContext) -> Banded:
    """v_1 where an element's importance reaches a threshold, elsewhere v_0:

        importance = |v_1 - v_0| KL(softmax(row of v_1) || softmax(row of v_0))
        threshold = median + 1.5 (third quartile - first quartile)

    Quartiles of n elements are those at places int(q (n - 1)) of all n, in order.
    """
    fusion = _Fusion(context.columns)
    return Banded(fusion.apply, _taken_over(_FUSED_SHARE), Unit.TENSOR)


@dataclass(frozen=True, slots=True)
class _Fusion:
    """Beside the band and its result it holds four bytes an element."""

    columns: int

    def apply(self, band: Band) -> Floats:
        before: Floats = band.base + band.deltas[0]
        divergences = np.empty(before.size // self.columns)
        importances = np.empty_like(before)
        for rows, here in self._pieces(before.size):
            first = before[here].reshape(-1, self.columns)
            second = (band.base[here] + band.deltas[1][here]).reshape(-1, self.columns)
            divergences[rows] = _divergences(second, first)
            importances[here] = self._importances(band, here, divergences[rows])
        threshold = _fusion_threshold(importances)
        merged = before
        for rows, here in self._pieces(before.size):
            taken = self._importances(band, here, divergences[rows]) >= threshold
            np.copyto(merged[here], band.base[here] + band.deltas[1][here], where=taken)
        return merged

    def _pieces(self, elements: int) -> Iterator[tuple[slice, slice]]:
        """Whole rows, a few at a time, and their elements."""
        rows, step = elements // self.columns, max(_PIECE // self.columns, 1)
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            yield slice(start, stop), slice(start * self.columns, stop * self.columns)

    def _importances(self, band: Band, here: slice, divergences: Doubles) -> Floats:
        apart = np.abs(band.deltas[1][here] - band.deltas[0][here]).astype(np.float64)
        weighed = apart.reshape(-1, self.columns) * divergences[:, None]
        importances: Floats = weighed.astype(np.float32).reshape(-1)
        return importances


def _divergences(second: Floats, first: Floats) -> Doubles:
    """KL(softmax(second) || softmax(first)) of every row, in float64; at least zero."""
    log_p, log_q = _log_softmax(second), _log_softmax(first)
    divergences: Doubles = np.maximum((np.exp(log_p) * (log_p - log_q)).sum(axis=1), 0.0)
    return divergences


def _log_softmax(rows: Floats) -> Doubles:
    lowered = rows.astype(np.float64)
    lowered -= lowered.max(axis=1, keepdims=True)
    result: Doubles = lowered - np.log(np.exp(lowered).sum(axis=1, keepdims=True))
    return result


def _fusion_threshold(importances: Floats) -> float:
    """The threshold; leaves ``importances`` in another order."""
    last = importances.size - 1
    places = [int(share * last) for share in (0.25, 0.5, 0.75)]
    importances.partition(places)
    first, median, third = (float(importances[place]) for place in places)
    return median + 1.5 * (third - first)


ARCEE_FUSION: Final = Method(
    "arcee_fusion",
    "the first model, with those elements of the second that matter most",
    "no paper; Arcee AI, known from mergekit",
    (),
    _arcee_fusion,
    needs=Needs.TENSOR,
    models=(2, 2),
    merges=Merges.FROM_FIRST,
    trims=True,
    flips=1.2,
)
