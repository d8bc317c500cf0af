"""The weighted sum of deltas that most methods are, in one pass over a block.

For every element, with deltas d_k = expert_k - base in float32:

    c_k  = w_k * s_k * d_k     where element k is kept, else 0
    out  = base_scale * base + lambda * (sum of c_k) / divisor

An element is kept where |d_k| reaches ``threshold[k]`` but not ``ceiling[k]``, and where a draw
from a counter-based generator falls below ``keep[k]``. With ``elect``, only those c_k count whose
sign is that of their sum (zero counts as positive), and the divisor, with ``normalize``, is the sum
of their weights; without it the divisor is the sum of all weights. A divisor of zero becomes one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from mergegit.dtypes import DTYPES
from mergegit.kernels.floats import (
    PIECE,
    Bytes,
    Floats,
    compiled,
    from_float32,
    load,
    round_bf16,
    to_float32,
)

DELTA: Final = 0
"""Code of a row that holds float32 deltas where others hold an expert's elements. Where the expert
is trimmed at a threshold, such a row holds deltas as they are expected to be after trimming, and
then each element's probability of being kept."""

ALWAYS: Final = 1 << 32
"""``keep`` of an expert whose elements are never dropped at random."""

_BF16: Final = DTYPES["BF16"].code


@dataclass(frozen=True, slots=True)
class Coefficients:
    """What the sum needs to know of one tensor's experts, K of them.

    ``weights``, ``scales`` and ``thresholds`` are float32, and so are ``ceilings``, None for no
    ceiling; ``keep`` (uint64) is the probability of keeping an element, times 2^32; ``keys``
    (uint64) seed each expert's draws.
    """

    weights: Floats
    scales: Floats
    thresholds: Floats
    keep: npt.NDArray[np.uint64]
    keys: npt.NDArray[np.uint64]
    base_scale: float = 1.0
    factor: float = 1.0
    elect: bool = False
    normalize: bool = False
    ceilings: Floats | None = None

    @property
    def keeps_base(self) -> bool:
        """Whether a block to which no expert contributes is the base's block."""
        return self.base_scale == 1.0

    @property
    def limits(self) -> npt.NDArray[np.float64]:
        """For each expert the most that an error of its delta is multiplied by in the result.

        With ``elect`` it is only in proportion: what is divided by depends on the element.
        """
        divisor = 1.0
        if self.normalize and not self.elect:
            total = float(np.sum(self.weights, dtype=np.float32))
            divisor = total if abs(total) >= 1e-8 else 1.0
        product = self.weights.astype(np.float64) * self.scales * self.factor / divisor
        return np.abs(product)

    @property
    def amplitudes(self) -> npt.NDArray[np.float64]:
        """What each expert's delta is multiplied by in expectation, signed."""
        return np.sign(self.weights) * self.limits * (self.keep.astype(np.float64) / ALWAYS)

    @property
    def spreads(self) -> npt.NDArray[np.float64]:
        """The root of what each delta's energy is multiplied by in expectation."""
        return self.limits * np.sqrt(self.keep.astype(np.float64) / ALWAYS)


def combine(
    rows: npt.NDArray[np.uint8],
    codes: npt.NDArray[np.int64],
    used: npt.NDArray[np.int64],
    base: Bytes,
    base_dtype: str,
    elements: int,
    first: int,
    coefficients: Coefficients,
    out_dtype: str,
) -> bytes | memoryview:
    """One merged block, rounded once to ``out_dtype``.

    ``rows[j]`` holds, as bytes, the block of expert ``used[j]``, of element type ``codes[j]``;
    experts that are not in ``used`` contribute a delta of zero. ``first`` is the index of the
    block's first element in its tensor.
    """
    c = coefficients
    wide = np.empty(elements if out_dtype != "BF16" else 0, np.float32)
    narrow = np.empty(elements if out_dtype == "BF16" else 0, np.uint16)
    _combine(
        rows,
        codes,
        used,
        base,
        DTYPES[base_dtype].code,
        elements,
        first,
        c.weights,
        c.scales,
        c.thresholds,
        c.ceilings if c.ceilings is not None else np.full(c.weights.size, np.inf, np.float32),
        c.keep,
        c.keys,
        np.float32(c.base_scale),
        np.float32(c.factor),
        c.elect,
        c.normalize,
        DTYPES[out_dtype].code,
        wide,
        narrow,
    )
    return narrow.data.cast("B") if out_dtype == "BF16" else from_float32(wide, out_dtype)


def load_deltas(
    rows: npt.NDArray[np.uint8],
    codes: npt.NDArray[np.int64],
    used: npt.NDArray[np.int64],
    base: Bytes,
    base_dtype: str,
    elements: int,
    experts: int,
) -> tuple[Floats, Floats]:
    """A block of the base and the deltas from it, in float32: (elements) and (experts, elements).

    ``rows``, ``codes`` and ``used`` are as in ``combine``; experts not in ``used`` have zeros.
    """
    reference = to_float32(base, base_dtype)[:elements]
    deltas = np.zeros((experts, elements), np.float32)
    for row, code, k in zip(rows, codes, used, strict=True):
        _load_delta(row, code, reference, deltas[k])
    return reference, deltas


@compiled
def _load_delta(row: Bytes, code: int, reference: Floats, out: Floats) -> None:
    n = out.size
    if code == 0:
        deltas = row.view(np.float32)[:n]
        for i in range(n):
            out[i] = deltas[i]
    else:
        load(code, row, 0, n, out)
        for i in range(n):
            out[i] -= reference[i]


@compiled
def draw(key: Any, index: Any) -> Any:
    """32 random bits for one element: SplitMix64 at position ``index`` of the stream ``key``."""
    z = key + (np.uint64(index) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z ^ (z >> np.uint64(31))) >> np.uint64(32)


@compiled
def _load_contribution(
    row: Bytes, code: int, reference: Floats, start: int, stop: int, first: int, weight: Any,
    scale: Any, threshold: Any, ceiling: Any, keep: Any, key: Any, out: Floats,
) -> None:  # fmt: skip
    """c_k of a piece: the trimmed, rescaled and weighted deltas of one expert."""
    n = stop - start
    if code == 0:
        deltas = row.view(np.float32)[start:stop]
        for i in range(n):
            out[i] = deltas[i]
    else:
        load(code, row, start, stop, out)
        for i in range(n):
            out[i] -= reference[i]
    if threshold > 0 and code != 0:
        for i in range(n):
            out[i] = out[i] if abs(out[i]) >= threshold else np.float32(0.0)
    if ceiling < np.float32(np.inf):
        for i in range(n):
            out[i] = out[i] if abs(out[i]) < ceiling else np.float32(0.0)
    if keep < np.uint64(1 << 32):
        for i in range(n):
            if draw(key, first + start + i) >= keep:
                out[i] = np.float32(0.0)
    if scale != np.float32(1.0):
        for i in range(n):
            out[i] *= scale
    for i in range(n):
        out[i] *= weight


@compiled
def _combine(
    rows: Any, codes: Any, used: Any, base: Bytes, base_code: int, n: int, first: int,
    weights: Floats, scales: Floats, thresholds: Floats, ceilings: Floats, keep: Any, keys: Any,
    base_scale: Any, factor: Any, elect: bool, normalize: bool, out_code: int, wide: Floats,
    narrow: Any,
) -> None:  # fmt: skip
    count = used.size
    parts = np.empty((count, PIECE), np.float32)
    reference = np.empty(PIECE, np.float32)
    total = np.empty(PIECE, np.float32)
    divisor = np.empty(PIECE, np.float32)
    agreeing = np.empty(PIECE, np.float32)
    absent = np.empty(PIECE, np.float32)
    ones = np.ones(PIECE, np.float32)
    zero = np.float32(0.0)
    one = np.float32(1.0)
    weight_sum = zero
    for k in range(weights.size):
        weight_sum += weights[k]
    # Weights that cancel leave nothing sensible to divide by.
    constant = weight_sum if normalize and abs(weight_sum) >= np.float32(1e-8) else one
    for start in range(0, n, PIECE):
        stop = min(n, start + PIECE)
        m = stop - start
        load(base_code, base, start, stop, reference)
        for i in range(m):
            total[i] = zero
        for j in range(count):
            k = used[j]
            _load_contribution(
                rows[j], codes[j], reference, start, stop, first, weights[k], scales[k],
                thresholds[k], ceilings[k], keep[k], keys[k], parts[j],
            )  # fmt: skip
            part = parts[j]
            for i in range(m):
                total[i] += part[i]
        if elect:
            for i in range(m):
                # From here on `divisor` holds the elected sign, then the agreeing weights.
                divisor[i] = one if total[i] >= zero else -one
                total[i] = zero
            if normalize:
                agreeing[:m] = zero
                absent[:m] = one
                for j in range(count):
                    k = used[j]
                    if codes[j] == 0 and thresholds[k] > 0:
                        shares = rows[j].view(np.float32)[n + start : n + stop]
                    else:
                        shares = ones[:m]
                    _sum_agreeing_shares(
                        parts[j], shares, weights[k], divisor, total, agreeing, absent
                    )
                for i in range(m):
                    divisor[i] = agreeing[i] if agreeing[i] != zero else one
                    # The mean of what is kept counts as far as anything is.
                    total[i] *= one - absent[i]
            else:
                _sum_agreeing(parts, m, divisor, total)
                for i in range(m):
                    divisor[i] = one
        else:
            for i in range(m):
                divisor[i] = constant
        for i in range(m):
            total[i] = base_scale * reference[i] + factor * (total[i] / divisor[i])
        if out_code == _BF16:
            round_bf16(total, narrow[start:stop])
        else:
            piece = wide[start:stop]
            for i in range(m):
                piece[i] = total[i]


@compiled
def _sum_agreeing(parts: Any, m: int, sign: Floats, total: Floats) -> None:
    for j in range(parts.shape[0]):
        part = parts[j]
        for i in range(m):
            total[i] += part[i] if part[i] * sign[i] > np.float32(0.0) else np.float32(0.0)


@compiled
def _sum_agreeing_shares(
    part: Any, shares: Any, weight: Any, sign: Any, total: Any, agreeing: Any, absent: Any
) -> None:
    """Sum one expert's part where it agrees with ``sign``, its weight as far as it is kept, and
    multiply up the probability that nothing is."""
    for i in range(shares.size):
        agrees = part[i] * sign[i] > np.float32(0.0)
        share = shares[i] if agrees else np.float32(0.0)
        total[i] += part[i] if agrees else np.float32(0.0)
        agreeing[i] += weight * share
        absent[i] *= np.float32(1.0) - share
