"""Taking statistics of a tensor against a base tensor, block by block."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mergegit.kernels.floats import Floats
from mergegit.kernels.measure import BlockMeasure, measure
from mergegit.kernels.progressive import Quantised
from mergegit.objects import BLOCK_ELEMENTS, BlockId, Tensor
from mergegit.statistics import BINS, PLANES, SKETCH_BUCKETS, Histogram, TensorStatistics
from mergegit.storage import delta
from mergegit.storage.store import Store


@dataclass(frozen=True, slots=True)
class Comparison:
    """A block beside the base's block in its place.

    ``measures`` and ``base_data`` are None where the two are one block; ``quantised`` is None
    where their dtypes allow no progressive delta.
    """

    measures: BlockMeasure | None = None
    base_block: BlockId | None = None
    base_data: bytes | None = None
    quantised: Quantised | None = None


def compare(
    store: Store,
    dtype: str,
    data: bytes,
    block: BlockId,
    base: Tensor | None,
    index: int,
    elements: int,
) -> Comparison:
    """Measure a block against the base's block in its place, or against zeros.

    The base's block is read only where the two differ.
    """
    row = np.frombuffer(data, np.uint8)
    first = index * BLOCK_ELEMENTS
    if base is None:
        return Comparison(measure(row, dtype, None, dtype, elements, first))
    base_block = base.block(index)
    if block == base_block and dtype == base.dtype:
        return Comparison()
    base_data = store.read_block(base_block)
    return compare_data(dtype, data, base.dtype, base_block, base_data, index, elements)


def compare_data(
    dtype: str,
    data: bytes,
    base_dtype: str,
    base_block: BlockId,
    base_data: bytes,
    index: int,
    elements: int,
) -> Comparison:
    """Measure a block against another one in its place, both in memory."""
    row, base_row = np.frombuffer(data, np.uint8), np.frombuffer(base_data, np.uint8)
    first = index * BLOCK_ELEMENTS
    measures = measure(row, dtype, base_row, base_dtype, elements, first)
    quantised = None
    if delta.can_encode(dtype, base_dtype):
        quantised = delta.quantise(data, base_data, dtype)
    return Comparison(measures, base_block, base_data, quantised)


def measure_delta(delta: Floats, index: int) -> Comparison:
    """Measure the deltas of a block that is computed and stored nowhere."""
    row = delta.view(np.uint8)
    return Comparison(measure(row, "F32", None, "F32", delta.size, index * BLOCK_ELEMENTS))


_LARGEST = float(np.finfo(np.float32).max)


class StatisticsBuilder:
    """Adds up the comparisons of one tensor's blocks, in order."""

    def __init__(self) -> None:
        self._rows: list[tuple[float, float, int, int]] = []
        self._remaining: list[np.ndarray] = []
        self._sketch = np.zeros(SKETCH_BUCKETS, np.float64)
        self._histogram = np.zeros(BINS, np.uint64)
        self.nonfinite = 0

    def add(self, comparison: Comparison) -> None:
        measures = comparison.measures
        if measures is None:
            self._rows.append((0.0, 0.0, 0, 0))
        else:
            self._rows.append(
                (measures.energy, measures.maximum, measures.nonzero, measures.nonfinite)
            )
            self._sketch += measures.sketch
            self._histogram += measures.histogram
            self.nonfinite += measures.nonfinite
        known = comparison.quantised
        self._remaining.append(np.zeros(PLANES) if known is None else known.remaining)

    def finish(self) -> TensorStatistics:
        rows = zip(*self._rows, strict=True) if self._rows else ((), (), (), ())
        energy, maximum, nonzero, nonfinite = rows
        bins = np.flatnonzero(self._histogram).astype(np.uint32)
        return TensorStatistics(
            np.array(energy, np.float64),
            np.array(maximum, np.float32),
            np.array(nonzero, np.uint32),
            np.array(nonfinite, np.uint32),
            np.array(self._remaining, np.float64).reshape(len(self._rows), PLANES),
            np.clip(self._sketch, -_LARGEST, _LARGEST).astype(np.float32),
            Histogram(bins, self._histogram[bins]),
        )
