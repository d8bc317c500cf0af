"""How far experts are spread about their mean, element by element, and sums that depend on it.

The spread of an element is the standard deviation of the K deltas, sqrt(sum (d_k - mean)^2 / K), in
float64, rounded to float32. It orders elements as their variance does, and does not underflow where
that would.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mergegit.kernels.floats import PIECE, Floats, compiled
from mergegit.statistics import BIN_SHIFT, BINS


def measure_spread(
    deltas: Floats,
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint64], npt.NDArray[np.float64]]:
    """A histogram of the spreads of ``deltas`` (K, n) float32.

    Returns the bins that are not empty, numbered as mergegit.statistics does (B, uint32), their
    counts (B, uint64) and the energy of each expert's elements in them (B, K, float64). Bin 0 has
    the elements without a spread, and those whose spread is not finite, which have no energy.
    """
    counts = np.zeros(BINS, np.uint64)
    energies = np.zeros((BINS, len(deltas)))
    _measure_spread(deltas, counts, energies)
    bins = np.flatnonzero(counts).astype(np.uint32)
    return bins, counts[bins], energies[bins]


def fuse_agreeing(
    base: Floats, deltas: Floats, weights: Floats, least: float, factor: float
) -> Floats:
    """``base`` plus ``factor`` times the weighted mean of the deltas that have the elected sign.

    The sign is that of the plain sum of ``deltas`` (K, n); zero counts as positive, and a delta of
    zero joins neither side. Elements whose spread is below ``least`` are the base's. All arrays,
    ``base`` (n) and ``weights`` (K) as well, are float32, and so is the result.
    """
    out = np.empty_like(base)
    _fuse_agreeing(base, deltas, weights, np.float32(least), np.float32(factor), out)
    return out


@compiled
def _load_spread(deltas: Any, start: int, stop: int, mean: Any, square: Any, out: Floats) -> None:
    count = deltas.shape[0]
    n = stop - start
    for i in range(n):
        mean[i] = 0.0
        square[i] = 0.0
    for k in range(count):
        delta = deltas[k, start:stop]
        for i in range(n):
            mean[i] += np.float64(delta[i])
    for i in range(n):
        # The sum of equal numbers is exact, and so is its quotient: they have no spread at all.
        mean[i] /= count
    for k in range(count):
        delta = deltas[k, start:stop]
        for i in range(n):
            apart = np.float64(delta[i]) - mean[i]
            square[i] += apart * apart
    for i in range(n):
        out[i] = np.float32(np.sqrt(square[i] / count))


@compiled
def _measure_spread(deltas: Any, counts: Any, energies: Any) -> None:
    count, n = deltas.shape
    mean, square = np.empty(PIECE, np.float64), np.empty(PIECE, np.float64)
    spread = np.empty(PIECE, np.float32)
    bits = spread.view(np.uint32)
    bins = np.empty(PIECE, np.int64)
    low_mask = np.uint32((1 << BIN_SHIFT) - 1)
    infinity = np.uint32(0x7F800000)
    for start in range(0, n, PIECE):
        stop = min(n, start + PIECE)
        m = stop - start
        _load_spread(deltas, start, stop, mean, square, spread)
        for i in range(m):
            size = bits[i] if bits[i] < infinity else np.uint32(0)
            above_edge = np.uint32((size & low_mask) != 0)
            bins[i] = (size >> np.uint32(BIN_SHIFT)) * 2 + above_edge
        for i in range(m):
            counts[bins[i]] += np.uint64(1)
            own = energies[bins[i]]
            for k in range(count):
                wide = np.float64(deltas[k, start + i])
                own[k] += wide * wide if bits[i] < infinity else 0.0


@compiled
def _fuse_agreeing(
    base: Floats, deltas: Any, weights: Floats, least: Any, factor: Any, out: Floats
) -> None:
    count, n = deltas.shape
    mean, square = np.empty(PIECE, np.float64), np.empty(PIECE, np.float64)
    spread = np.empty(PIECE, np.float32)
    total = np.empty(PIECE, np.float32)
    merged = np.empty(PIECE, np.float32)
    divisor = np.empty(PIECE, np.float32)
    zero, one = np.float32(0.0), np.float32(1.0)
    for start in range(0, n, PIECE):
        stop = min(n, start + PIECE)
        m = stop - start
        for i in range(m):
            total[i] = zero
            merged[i] = zero
            divisor[i] = zero
        for k in range(count):
            delta = deltas[k, start:stop]
            for i in range(m):
                total[i] += delta[i]
        for i in range(m):
            total[i] = one if total[i] >= zero else -one
        for k in range(count):
            delta, weight = deltas[k, start:stop], weights[k]
            for i in range(m):
                counts = weight if delta[i] * total[i] > zero else zero
                merged[i] += counts * delta[i]
                divisor[i] += counts
        for i in range(m):
            merged[i] /= divisor[i] if divisor[i] != zero else one
        if least > zero:
            _load_spread(deltas, start, stop, mean, square, spread)
            for i in range(m):
                merged[i] = merged[i] if spread[i] >= least else zero
        own, result = base[start:stop], out[start:stop]
        for i in range(m):
            result[i] = own[i] + factor * merged[i]
