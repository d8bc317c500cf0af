"""The arithmetic of progressive deltas: an embedded quantiser, and an exact residual.

Encoding. Per group of ``GROUP`` elements, ``delta = expert - base`` in float32 falls by its
magnitude into one of eight cells, whose bounds are those of the best 16-level quantiser of a
normal variable times the group's scale. An element's *code* is its sign and its cell, four bits;
plane p is the p-th of them. After p planes an element is known to lie in one of 2^(p-1) cells, and
its reconstruction is its sign times the mean magnitude of that cell in that group, kept as BF16.
Bounds are the encoder's business alone: the decoder knows the means.

The residual is the difference, in units in the last place, between the expert's bits and those of
``base + reconstruction`` rounded to the dtype. It makes the whole lossless whatever the values are.
It is sorted by the exponent of that prediction, which the decoder has, before its bytes are
compressed: the finer the exponent, the wider the residual, and like lies beside like.

Everything is exact IEEE arithmetic in a fixed order: all machines agree on every bit.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from mergegit.dtypes import DTYPES
from mergegit.kernels.floats import Bytes, Floats, compiled, from_float32, load, round_bf16
from mergegit.statistics import PLANES

GROUP: Final = 4096
CELLS: Final = 8

_BOUNDS: Final = (0.2582, 0.5224, 0.7996, 1.099, 1.437, 1.844, 2.401)
_LANES: Final = 8
_LARGEST_BF16: Final = np.uint16(0x7F7F)
_BF16: Final = DTYPES["BF16"].code

_SPREAD: Final = np.array(
    [sum(((byte >> bit) & 1) << (8 * bit) for bit in range(8)) for byte in range(256)], "<u8"
)
"""Eight bits as eight bytes."""

_MANTISSA_BITS: Final = {"F64": 52, "F32": 23, "BF16": 7, "F16": 10, "F8_E4M3": 3, "F8_E5M2": 2}
_UNSIGNED: Final = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class Quantised(NamedTuple):
    """A block's delta under the quantiser.

    ``codes`` (uint8, elements) are sign and cell; ``means`` has for plane p an array (uint16, BF16
    bits) of 2^(p-1) means per group; ``remaining`` (float64, ``PLANES``) is the energy of the
    delta that is left after 1, 2, ... planes.
    """

    codes: npt.NDArray[np.uint8]
    means: tuple[npt.NDArray[np.uint16], ...]
    remaining: npt.NDArray[np.float64]


def group_count(elements: int) -> int:
    """Number of groups of a block of ``elements`` elements."""
    return -(-elements // GROUP)


def quantise(expert: Bytes, base: Bytes, dtype: str, elements: int) -> Quantised:
    """Quantise ``expert - base``, two blocks of one dtype, as little-endian bytes."""
    groups = group_count(elements)
    codes = np.empty(elements, np.uint8)
    means = tuple(np.zeros(groups << plane, np.uint16) for plane in range(PLANES))
    remaining = np.zeros(PLANES, np.float64)
    _quantise(
        expert, base, DTYPES[dtype].code, elements, np.array(_BOUNDS, np.float32), codes, *means,
        remaining,
    )  # fmt: skip
    return Quantised(codes, means, remaining)


def plane_bits(codes: npt.NDArray[np.uint8], plane: int) -> npt.NDArray[np.uint8]:
    """Bits of plane ``plane`` (from 0), eight elements to a byte, the first the lowest."""
    out = np.empty(-(-codes.size // 8), np.uint8)
    _pack_bits(codes, PLANES - 1 - plane, out)
    return out


def reconstruct(
    bits: list[npt.NDArray[np.uint8]], means: npt.NDArray[np.uint16], elements: int
) -> Floats:
    """The delta as far as ``len(bits)`` planes tell, with the last plane's means; float32."""
    levels = (means.astype(np.uint32) << 16).view(np.float32)
    out = np.empty(elements, np.float32)
    _look_up(_indices(bits, elements), levels.reshape(group_count(elements), -1), True, out)
    return out


def reconstruct_trimmed(
    bits: list[npt.NDArray[np.uint8]],
    means: npt.NDArray[np.uint16],
    elements: int,
    threshold: float,
) -> npt.NDArray[np.float32]:
    """What the first planes tell of a delta that is trimmed at ``threshold``: two rows, float32.

    The first holds the expected value of each element after trimming, the second the probability
    that it is kept. Magnitudes are taken to be spread evenly between a cell's bounds, which lie
    half-way between the means, and to fall off exponentially in the highest cell.
    """
    count = len(bits)
    cells = 1 << (count - 1)
    groups = group_count(elements)
    values = np.zeros((groups, cells), np.float32)
    kept = np.zeros((groups, cells), np.float32)
    levels = (means.astype(np.uint32) << 16).view(np.float32).reshape(groups, cells)
    _expect_trimmed(levels, np.float32(threshold), values, kept)
    out = np.empty((2, elements), np.float32)
    indices = _indices(bits, elements)
    _look_up(indices, values, True, out[0])
    _look_up(indices, kept, False, out[1])
    return out


def _indices(bits: list[npt.NDArray[np.uint8]], elements: int) -> npt.NDArray[np.uint8]:
    """For each element its cell, as far as the planes tell, times two, and its sign."""
    words = np.empty(bits[0].size, np.uint64)
    _interleave(bits[0], 0, True, _SPREAD, words)
    for plane, shift in zip(bits[1:], range(len(bits) - 1, 0, -1), strict=True):
        _interleave(plane, shift, False, _SPREAD, words)
    return words.view(np.uint8)[:elements]


def reconstruct_codes(quantised: Quantised) -> Floats:
    """The delta as all planes tell, from the codes; float32."""
    out = np.empty(quantised.codes.size, np.float32)
    _reconstruct_codes(quantised.codes, quantised.means[-1], out)
    return out


def predict(base: Bytes, delta: Floats, dtype: str) -> npt.NDArray[Any]:
    """Bits of ``base + delta`` rounded to the dtype; where the base is not finite, the base's."""
    width = DTYPES[dtype].bits // 8
    own = base.view(_UNSIGNED[width])
    if dtype == "BF16":
        out = np.empty(delta.size, np.uint16)
        _predict_bf16(own, delta, out)
        return out
    if dtype == "F64":
        with np.errstate(invalid="ignore"):
            total = base.view(np.float64) + delta
        finite = np.isfinite(base.view(np.float64))
        return np.where(finite, total.view(np.uint64), own)
    wide = np.empty(delta.size, np.float32)
    _load_block(DTYPES[dtype].code, base, wide)
    finite = np.isfinite(wide)
    with np.errstate(invalid="ignore", over="ignore"):
        wide += delta
    rounded = np.frombuffer(from_float32(wide, dtype), _UNSIGNED[width])
    return np.where(finite, rounded, own)


def residual_planes(
    expert: Bytes, prediction: npt.NDArray[Any], dtype: str
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """The residual as bytes (width, elements), and where runs of one exponent end.

    Row k holds the k-th lowest bytes of all residuals, sorted by the prediction's exponent.
    """
    width = DTYPES[dtype].bits // 8
    bits = expert.view(_UNSIGNED[width])
    ends = _run_ends(prediction, _MANTISSA_BITS[dtype], DTYPES[dtype].bits)
    out = np.empty((width, bits.size), np.uint8)
    places = np.concatenate([[0], ends[:-1]]).astype(np.int64)
    words = np.empty(bits.size, bits.dtype)
    _sort_residual(bits, prediction, _MANTISSA_BITS[dtype], places, words, out)
    return out, ends


def apply_residual(
    planes: npt.NDArray[np.uint8], prediction: npt.NDArray[Any], dtype: str
) -> bytes:
    """The expert's bytes, from a residual as ``residual_planes`` made it."""
    ends = _run_ends(prediction, _MANTISSA_BITS[dtype], DTYPES[dtype].bits)
    places = np.concatenate([[0], ends[:-1]]).astype(np.int64)
    out = np.empty(prediction.size, prediction.dtype)
    words = np.empty(prediction.size, prediction.dtype)
    _unsort_residual(planes, prediction, _MANTISSA_BITS[dtype], places, words, out)
    return out.tobytes()


def _run_ends(prediction: npt.NDArray[Any], mantissa: int, bits: int) -> npt.NDArray[np.int64]:
    counts = np.zeros(1 << (bits - 1 - mantissa), np.int64)
    _count_exponents(prediction, mantissa, counts)
    return np.cumsum(counts)


@compiled
def _load_block(code: int, row: Bytes, out: Floats) -> None:
    load(code, row, 0, out.size, out)


@compiled
def _quantise(
    expert: Bytes, base: Bytes, code: int, n: int, bounds: Floats, codes: Any, means1: Any,
    means2: Any, means3: Any, means4: Any, remaining: Any,
) -> None:  # fmt: skip
    values = np.empty(GROUP, np.float32)
    reference = np.empty(GROUP, np.float32)
    sizes = np.empty(GROUP, np.float32)
    scaled = np.empty(CELLS - 1, np.float32)
    energy_lanes = np.empty(_LANES, np.float64)
    nonzero_lanes = np.empty(_LANES, np.int64)
    counts = np.empty((CELLS, _LANES), np.int64)
    sums = np.empty((CELLS, _LANES), np.float64)
    cell_count = np.empty(CELLS, np.float64)
    cell_sum = np.empty(CELLS, np.float64)
    rounded = np.empty(1, np.uint16)
    mean = np.empty(1, np.float32)
    infinity = np.float32(np.inf)
    tiny = np.float32(1.4e-45)
    for group in range((n + GROUP - 1) // GROUP):
        start = group * GROUP
        m = min(n, start + GROUP) - start
        load(code, expert, start, start + m, values)
        load(code, base, start, start + m, reference)
        for lane in range(_LANES):
            energy_lanes[lane] = 0.0
            nonzero_lanes[lane] = 0
        padded = (m + _LANES - 1) // _LANES * _LANES
        for i in range(m):
            d = values[i] - reference[i]
            # A delta that is not finite counts as none; the residual does the rest.
            d = d if abs(d) < infinity else np.float32(0.0)
            values[i] = d
            sizes[i] = abs(d)
        for i in range(m, padded):
            sizes[i] = np.float32(0.0)
        for i in range(0, padded, _LANES):
            for lane in range(_LANES):
                wide = np.float64(sizes[i + lane])
                energy_lanes[lane] += wide * wide
                nonzero_lanes[lane] += np.int64(wide > 0.0)
        energy = 0.0
        nonzero = np.int64(0)
        for lane in range(_LANES):
            energy += energy_lanes[lane]
            nonzero += nonzero_lanes[lane]
        # Where few elements move, the scale is theirs alone.
        among = np.float64(m) if 4 * nonzero >= m else max(np.float64(nonzero), 1.0)
        scale = np.float32(np.sqrt(energy / among))
        for k in range(CELLS - 1):
            scaled[k] = max(scale * bounds[k], tiny)
        for k in range(CELLS):
            for lane in range(_LANES):
                counts[k, lane] = 0
                sums[k, lane] = 0.0
        own_codes = codes[start : start + m]
        for i in range(m):
            cell = np.uint8(0)
            for k in range(CELLS - 1):
                cell += np.uint8(sizes[i] >= scaled[k])
            own_codes[i] = cell
        for i in range(m):
            cell = own_codes[i]
            counts[cell, i & (_LANES - 1)] += 1
            sums[cell, i & (_LANES - 1)] += np.float64(sizes[i])
        for i in range(m):
            own_codes[i] |= np.uint8(values[i] < np.float32(0.0)) << np.uint8(3)
        for k in range(CELLS):
            cell_count[k] = 0.0
            cell_sum[k] = 0.0
            for lane in range(_LANES):
                cell_count[k] += counts[k, lane]
                cell_sum[k] += sums[k, lane]
        for plane in range(PLANES):
            width = CELLS >> plane
            left = energy
            for wide_cell in range(1 << plane):
                count = 0.0
                total = 0.0
                for k in range(wide_cell * width, (wide_cell + 1) * width):
                    count += cell_count[k]
                    total += cell_sum[k]
                if count == 0.0:
                    continue
                mean[0] = np.float32(total / count)
                round_bf16(mean, rounded)
                rounded[0] = min(rounded[0], _LARGEST_BF16)
                load(_BF16, rounded.view(np.uint8), 0, 1, mean)
                # The sum of (size - mean)^2 over the cell, its squares being part of the energy.
                known = np.float64(mean[0])
                left -= known * (2.0 * total - count * known)
                at = (group << plane) + wide_cell
                if plane == 0:
                    means1[at] = rounded[0]
                elif plane == 1:
                    means2[at] = rounded[0]
                elif plane == 2:
                    means3[at] = rounded[0]
                else:
                    means4[at] = rounded[0]
            remaining[plane] += max(left, 0.0)


@compiled
def _pack_bits(codes: Any, shift: int, out: Any) -> None:
    full = codes.size // 8
    for j in range(full):
        byte = np.uint8(0)
        for lane in range(8):
            byte |= ((codes[8 * j + lane] >> np.uint8(shift)) & np.uint8(1)) << np.uint8(lane)
        out[j] = byte
    if full < out.size:
        byte = np.uint8(0)
        for i in range(8 * full, codes.size):
            byte |= ((codes[i] >> np.uint8(shift)) & np.uint8(1)) << np.uint8(i - 8 * full)
        out[full] = byte


@compiled
def _expect_trimmed(levels: Any, threshold: Any, values: Any, kept: Any) -> None:
    """For each cell the expected magnitude after trimming, and the probability of being kept."""
    groups, cells = levels.shape
    for group in range(groups):
        lower = 0.0
        for cell in range(cells):
            mean = float(levels[group, cell])
            limit = float(threshold)
            if cell == cells - 1:
                reach = mean - lower
                if limit <= lower or reach <= 0.0:
                    share = 1.0 if mean >= limit else 0.0
                    expected = mean * share
                else:
                    share = np.exp(-(limit - lower) / reach)
                    expected = share * (limit + reach)
            else:
                upper = (mean + float(levels[group, cell + 1])) / 2
                if limit <= lower:
                    share, expected = 1.0, mean
                elif limit >= upper:
                    share, expected = 0.0, 0.0
                else:
                    share = (upper - limit) / (upper - lower)
                    expected = share * (upper + limit) / 2
                lower = upper
            values[group, cell] = expected
            kept[group, cell] = share


@compiled
def _interleave(bits: Any, shift: int, first: bool, spread: Any, words: Any) -> None:
    """Put each bit of a plane at place ``shift`` of its element's byte, eight bytes at a time."""
    for j in range(words.size):
        word = spread[bits[j]] << np.uint64(shift)
        words[j] = word if first else words[j] | word


@compiled
def _look_up(indices: Any, levels: Any, signed: bool, out: Floats) -> None:
    """Each element's level in its group, with its sign where ``signed``."""
    cells = levels.shape[1]
    table = np.empty(2 * CELLS, np.float32)
    for group in range(levels.shape[0]):
        for cell in range(cells):
            table[2 * cell] = levels[group, cell]
            table[2 * cell + 1] = -levels[group, cell] if signed else levels[group, cell]
        start = group * GROUP
        own, looked_up = indices[start : start + GROUP], out[start : start + GROUP]
        for i in range(own.size):
            looked_up[i] = table[own[i] & np.uint8(15)]


@compiled
def _reconstruct_codes(codes: Any, means: Any, out: Floats) -> None:
    n = codes.size
    table = np.empty(2 * CELLS, np.float32)
    table_bits = table.view(np.uint32)
    for group in range((n + GROUP - 1) // GROUP):
        start = group * GROUP
        for cell in range(CELLS):
            magnitude = np.uint32(means[group * CELLS + cell]) << np.uint32(16)
            table_bits[cell] = magnitude
            table_bits[cell + CELLS] = magnitude | np.uint32(0x80000000)
        own_codes, own = codes[start : start + GROUP], out[start : start + GROUP]
        for i in range(own.size):
            own[i] = table[own_codes[i] & np.uint8(15)]


@compiled
def _predict_bf16(base: Any, delta: Floats, out: Any) -> None:
    value = np.empty(GROUP, np.float32)
    bits = value.view(np.uint32)
    for start in range(0, out.size, GROUP):
        stop = min(out.size, start + GROUP)
        m = stop - start
        own, change, predicted = base[start:stop], delta[start:stop], out[start:stop]
        nonfinite = np.int64(0)
        for i in range(m):
            bits[i] = np.uint32(own[i]) << np.uint32(16)
            nonfinite += np.int64((own[i] & 0x7F80) == 0x7F80)
        for i in range(m):
            value[i] += change[i]
        round_bf16(value, predicted)
        if nonfinite:
            for i in range(m):
                if (own[i] & 0x7F80) == 0x7F80:
                    predicted[i] = own[i]


@compiled
def _count_exponents(bits: Any, mantissa: int, counts: Any) -> None:
    # Four tables, so that runs of one exponent do not wait for one counter.
    size = counts.size
    tables = np.zeros((4, size), np.int64)
    mask = size - 1
    for i in range(bits.size):
        tables[i & 3, (np.int64(bits[i]) >> mantissa) & mask] += 1
    for table in range(4):
        for key in range(size):
            counts[key] += tables[table, key]


@compiled
def _sort_residual(
    expert: Any, prediction: Any, mantissa: int, places: Any, words: Any, out: Any
) -> None:
    mask = places.size - 1
    width = out.shape[0]
    top = np.int64(8 * width - 1)
    for start in range(0, expert.size, GROUP):
        stop = min(expert.size, start + GROUP)
        is_bits, was_bits = expert[start:stop], prediction[start:stop]
        for i in range(stop - start):
            e, p = np.int64(is_bits[i]), np.int64(was_bits[i])
            folded = words.dtype.type(_zigzag(_ordered(e, top) - _ordered(p, top), top))
            key = (p >> mantissa) & mask
            at = places[key]
            places[key] = at + 1
            words[at] = folded
    for k in range(width):
        plane = out[k]
        for i in range(plane.size):
            plane[i] = np.uint8((np.int64(words[i]) >> (8 * k)) & 0xFF)


@compiled
def _unsort_residual(
    planes: Any, prediction: Any, mantissa: int, places: Any, words: Any, out: Any
) -> None:
    mask = places.size - 1
    width = planes.shape[0]
    top = np.int64(8 * width - 1)
    words[:] = 0
    for k in range(width):
        plane = planes[k]
        for i in range(plane.size):
            words[i] |= words.dtype.type(np.uint64(plane[i]) << np.uint64(8 * k))
    folded = np.empty(GROUP, np.int64)
    for start in range(0, out.size, GROUP):
        stop = min(out.size, start + GROUP)
        was_bits, is_bits = prediction[start:stop], out[start:stop]
        for i in range(stop - start):
            key = (np.int64(was_bits[i]) >> mantissa) & mask
            at = places[key]
            places[key] = at + 1
            folded[i] = np.int64(words[at])
        for i in range(stop - start):
            p = np.int64(was_bits[i])
            difference = ((folded[i] >> 1) & ~(np.int64(-1) << top)) ^ -(folded[i] & 1)
            value = _ordered(_ordered(p, top) + difference, top) & ~(np.int64(-2) << top)
            is_bits[i] = out.dtype.type(value)


@compiled
def _ordered(bits: Any, top: Any) -> Any:
    """Bits of a float, sign at ``top``, to integers in the order of the floats, and back.

    Negative floats have all bits but the sign inverted: -0 stays apart from +0. The result is
    sign-extended; the function is its own inverse.
    """
    extended = (bits << (63 - top)) >> (63 - top)
    return extended ^ ((extended >> 63) & ~(np.int64(-1) << top))


@compiled
def _zigzag(difference: Any, top: Any) -> Any:
    """A difference modulo 2^(top + 1), small magnitudes to small numbers."""
    wrapped = (difference << (63 - top)) >> (63 - top)
    return (wrapped << 1) ^ (wrapped >> 63)
