"""What is measured of a delta, in one pass over a block."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from mergegit.dtypes import DTYPES
from mergegit.kernels.floats import PIECE, Bytes, compiled, load
from mergegit.statistics import BIN_SHIFT, BINS, SKETCH_BUCKETS

_LANES: Final = 8


class BlockMeasure(NamedTuple):
    """Measures of ``delta = expert - base`` over one block, as mergegit.statistics explains them.

    ``histogram`` counts non-zero |delta| by bin (uint32, ``BINS``).
    """

    energy: float
    maximum: float
    nonzero: int
    nonfinite: int
    sketch: npt.NDArray[np.float64]
    histogram: npt.NDArray[np.uint32]


def measure(
    expert: Bytes, dtype: str, base: Bytes | None, base_dtype: str, elements: int, first: int
) -> BlockMeasure:
    """Measure one block of an expert against its base block; ``base`` None stands for zeros.

    ``first`` is the index, in the tensor, of the block's first element.
    """
    sketch = np.zeros(SKETCH_BUCKETS, np.float64)
    histogram = np.zeros(BINS, np.uint32)
    energy, maximum, nonzero, nonfinite = _measure(
        expert,
        DTYPES[dtype].code,
        expert if base is None else base,
        DTYPES[base_dtype].code,
        base is not None,
        elements,
        first,
        sketch,
        histogram,
    )
    return BlockMeasure(energy, float(maximum), nonzero, nonfinite, sketch, histogram)


@compiled
def _measure(
    expert: Bytes,
    code: int,
    base: Bytes,
    base_code: int,
    has_base: bool,
    n: int,
    first: int,
    sketch: Any,
    histogram: Any,
) -> Any:
    values = np.empty(PIECE, np.float32)
    reference = np.zeros(PIECE, np.float32)
    bits = values.view(np.uint32)
    lanes = np.zeros(_LANES, np.float64)
    maximum = np.float32(0.0)
    nonzero = 0
    nonfinite = 0
    infinity = np.uint32(0x7F800000)
    low_mask = np.uint32((1 << BIN_SHIFT) - 1)
    for start in range(0, n, PIECE):
        stop = min(n, start + PIECE)
        load(code, expert, start, stop, values)
        if has_base:
            load(base_code, base, start, stop, reference)
        for i in range(stop - start):
            if (bits[i] & infinity) == infinity:
                nonfinite += 1
            d = values[i] - reference[i]
            values[i] = d
            magnitude = bits[i] & np.uint32(0x7FFFFFFF)
            if magnitude == 0 or magnitude >= infinity:
                continue
            nonzero += 1
            size = abs(d)
            if size > maximum:
                maximum = size
            wide = np.float64(d)
            lanes[i & (_LANES - 1)] += wide * wide
            h = np.uint64(first + start + i) * np.uint64(0x9E3779B97F4A7C15)
            h = (h ^ (h >> np.uint64(31))) * np.uint64(0xBF58476D1CE4E5B9)
            bucket = h >> np.uint64(56)
            if (h >> np.uint64(55)) & np.uint64(1):
                sketch[bucket] -= wide
            else:
                sketch[bucket] += wide
            above_edge = np.uint32((magnitude & low_mask) != 0)
            histogram[(magnitude >> np.uint32(BIN_SHIFT)) * 2 + above_edge] += np.uint32(1)
    energy = 0.0
    for lane in range(_LANES):
        energy += lanes[lane]
    return energy, maximum, nonzero, nonfinite
