"""SCE: select where experts differ most, calculate weights from energies, erase minorities."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from mergegit.kernels.floats import Floats
from mergegit.kernels.spread import fuse_agreeing, measure_spread
from mergegit.merge.method import (
    DEPTH_SCALED,
    Band,
    Banded,
    Doubles,
    Method,
    Needs,
    Parameter,
    TensorContext,
    factor,
    floats,
    weighted,
)
from mergegit.statistics import BINS, Histogram

_SHARE: Final = Parameter(
    "select_topk", 1.0, "share of the elements in which experts differ that is kept",
    low=0.0, high=1.0,
)  # fmt: skip


_Measured = tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint64], Doubles]


@dataclass(frozen=True, slots=True)
class _Selected:
    """Elements whose spread is at least ``threshold``, and the share (K) of each expert's energy
    that lies in them."""

    threshold: float
    shares: Doubles


class _Spreads:
    """A first pass: which elements are selected, and how much of each expert's energy they hold."""

    def __init__(self, context: TensorContext) -> None:
        self._share = context.number("select_topk")
        self._counts = np.zeros(BINS, np.uint64)
        self._energies = np.zeros((BINS, len(context.experts)))

    def measure(self, band: Band) -> _Measured:
        return measure_spread(band.deltas)

    def add(self, measured: _Measured) -> None:
        bins, counts, energies = measured
        self._counts[bins] += counts
        self._energies[bins] += energies

    def finish(self) -> _Selected:
        """The top share of the elements with a spread, one at least, and all that equal the last
        of them. Where the threshold lies within a bin, energies are counted in proportion."""
        bins = np.flatnonzero(self._counts).astype(np.uint32)
        energies = self._energies[bins]
        counts = np.where(bins > 0, self._counts[bins], np.uint64(0))
        moved = int(counts.sum())
        if not moved:
            return _Selected(math.inf, np.zeros(energies.shape[1]))
        keep = max(int(self._share * moved), 1)
        threshold = Histogram(bins[counts > 0], counts[counts > 0]).threshold(keep)
        sizes = counts.astype(np.float64)
        above = sizes.sum() - np.cumsum(sizes)
        kept = np.clip((keep - above) / np.maximum(sizes, 1.0), 0.0, 1.0)
        kept = np.where(bins % 2 == 0, np.ceil(kept), kept) * (sizes > 0)
        whole = energies.sum(axis=0)
        return _Selected(float(threshold), kept @ energies / np.where(whole > 0, whole, 1.0))


def _survey(context: TensorContext) -> _Spreads | None:
    return _Spreads(context) if 0.0 < context.number("select_topk") < 1.0 else None


def _sce(context: TensorContext) -> Banded:
    """b + lambda * (sum_k m_k w_k d_k) / (sum_k m_k w_k), on the selected elements.

    w_k is the energy of expert k in the selected elements over that of all experts, and m_k tells
    whether d_k has the sign of sum_k d_k. No weight depends on the deltas' scale.
    """
    energies = np.array([expert.energy for expert in context.experts])
    threshold = 0.0 if context.number("select_topk") > 0.0 else math.inf
    selected: _Selected | None = context.surveyed
    if selected is not None:
        threshold = selected.threshold
        energies = energies * selected.shares
    weights = energies / (energies.sum() or 1.0)
    if math.isinf(threshold):
        weights = np.zeros_like(weights)
    scale = factor(context)
    nearest = replace(weighted(_shares(weights), factor=scale), elect=True)

    def apply(band: Band) -> Floats:
        return fuse_agreeing(band.base, band.deltas, floats(weights.tolist()), threshold, scale)

    return Banded(apply, nearest)


_SAMPLE: Final = 1 << 14


def _shares(weights: Doubles) -> list[float]:
    """What each expert's errors count for in planning: the root of its mean part in the divisor.

    Not its weight: where an expert alone has the elected sign, it counts whole, however small its
    weight is. The mean is over deltas drawn from normal distributions of such energies. Errors that
    turn an election count more than the square of the part says: plans by the mean part were nearer
    to the full merge.
    """
    deltas = np.sqrt(weights)[:, None] * _normals(weights.size)
    counted = weights[:, None] * (deltas * deltas.sum(axis=0) > 0)
    divisor = counted.sum(axis=0)
    through = counted / np.where(divisor > 0, divisor, 1.0)
    shares: list[float] = np.sqrt(through.mean(axis=1)).tolist()
    return shares


@functools.cache
def _normals(count: int) -> Doubles:
    """The same standard normal numbers always, (count, _SAMPLE)."""
    raw = np.random.PCG64(0).random_raw(2 * count * _SAMPLE)
    one, other = ((raw >> np.uint64(11)) + 0.5).reshape(2, count, _SAMPLE) * 2.0**-53
    normals: Doubles = np.sqrt(-2.0 * np.log(one)) * np.cos(2.0 * np.pi * other)
    return normals


SCE: Final = Method(
    "sce",
    "weight experts by energy, keep the elements in which they differ most, erase minorities",
    "SCE of FuseChat, arXiv 2408.07990",
    (_SHARE, *DEPTH_SCALED),
    _sce,
    needs=Needs.SURVEY,
    survey=_survey,
    flips=0.9,
)
