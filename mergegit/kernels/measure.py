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
    maximum = np.uint32(0)
    nonzero = np.int64(0)
    nonfinite = np.int64(0)
    infinity = np.uint32(0x7F800000)
    low_mask = np.uint32((1 << BIN_SHIFT) - 1)
    for start in range(0, n, PIECE):
        stop = min(n, start + PIECE)
        m = stop - start
        load(code, expert, start, stop, values)
        if has_base:
            load(base_code, base, start, stop, reference)
        for i in range(m):
            nonfinite += np.int64((bits[i] & infinity) == infinity)
        for i in range(m):
            values[i] -= reference[i]
        for i in range(m):
            # Deltas that are not finite count nowhere.
            bits[i] = np.uint32(0) if (bits[i] & infinity) == infinity else bits[i]
        for i in range(m, (m + SKETCH_BUCKETS - 1) // SKETCH_BUCKETS * SKETCH_BUCKETS):
            values[i] = np.float32(0.0)
        for i in range(m):
            magnitude = np.uint32(bits[i] & np.uint32(0x7FFFFFFF))
            maximum = max(maximum, magnitude)
            nonzero += np.int64(magnitude != 0)
        for i in range(0, m, _LANES):
            for lane in range(_LANES):
                wide = np.float64(values[i + lane])
                lanes[lane] += wide * wide
        for i in range(m):
            magnitude = np.uint32(bits[i] & np.uint32(0x7FFFFFFF))
            above_edge = np.uint32((magnitude & low_mask) != 0)
            histogram[(magnitude >> np.uint32(BIN_SHIFT)) * 2 + above_edge] += np.uint32(1)
        for i in range(0, m, SKETCH_BUCKETS):
            _add_to_sketch(values[i : i + SKETCH_BUCKETS], (first + start + i) // 256, sketch)
    histogram[0] = np.uint32(0)
    energy = 0.0
    for lane in range(_LANES):
        energy += lanes[lane]
    largest = np.empty(1, np.uint32)
    largest[0] = maximum
    return energy, largest.view(np.float32)[0], nonzero, nonfinite


@compiled
def _add_to_sketch(values: Any, run: int, sketch: Any) -> None:
    """Add a run of as many values as there are buckets, each with a random sign.

    The run is turned by a random number of buckets, so that elements of one column of a matrix
    do not meet in one bucket.
    """
    turn = np.int64(_mix(np.uint64(run) * np.uint64(5)) & np.uint64(SKETCH_BUCKETS - 1))
    for word in range(SKETCH_BUCKETS // 64):
        signs = _mix(np.uint64(run) * np.uint64(5) + np.uint64(word + 1))
        for lane in range(64):
            i = word * 64 + lane
            sign = 1.0 - 2.0 * np.float64((signs >> np.uint64(lane)) & np.uint64(1))
            sketch[(i + turn) & (SKETCH_BUCKETS - 1)] += sign * np.float64(values[i])


@compiled
def _mix(x: Any) -> Any:
    """The finaliser of SplitMix64: 64 bits that depend on all bits of ``x``."""
    z = x + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
