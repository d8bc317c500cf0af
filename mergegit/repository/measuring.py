"""Taking statistics of a tensor against a base tensor, block by block."""

from __future__ import annotations

import numpy as np

from mergegit.kernels.measure import BlockMeasure, measure
from mergegit.objects import BLOCK_ELEMENTS, BlockId, Tensor
from mergegit.statistics import BINS, SKETCH_BUCKETS, Histogram, TensorStatistics
from mergegit.storage.store import Store


def measure_block(
    store: Store,
    dtype: str,
    data: bytes,
    block: BlockId,
    base: Tensor | None,
    index: int,
    elements: int,
) -> BlockMeasure | None:
    """Measure a block against the base's block in its place; None where it is that block.

    The base's block is read only where the two differ.
    """
    if base is None:
        row = np.frombuffer(data, np.uint8)
        return measure(row, dtype, None, dtype, elements, index * BLOCK_ELEMENTS)
    base_block = base.block(index)
    if block == base_block and dtype == base.dtype:
        return None
    return measure(
        np.frombuffer(data, np.uint8),
        dtype,
        np.frombuffer(store.read_block(base_block), np.uint8),
        base.dtype,
        elements,
        index * BLOCK_ELEMENTS,
    )


class StatisticsBuilder:
    """Adds up the measures of one tensor's blocks, in order."""

    def __init__(self) -> None:
        self._rows: list[tuple[float, float, int, int]] = []
        self._sketch = np.zeros(SKETCH_BUCKETS, np.float64)
        self._histogram = np.zeros(BINS, np.uint64)
        self.nonfinite = 0

    def add(self, measures: BlockMeasure | None) -> None:
        """The next block's measures; None for a block that is the base's."""
        if measures is None:
            self._rows.append((0.0, 0.0, 0, 0))
            return
        self._rows.append((measures.energy, measures.maximum, measures.nonzero, measures.nonfinite))
        self._sketch += measures.sketch
        self._histogram += measures.histogram
        self.nonfinite += measures.nonfinite

    def finish(self) -> TensorStatistics:
        energy, maximum, nonzero, nonfinite = (
            zip(*self._rows, strict=True) if self._rows else ((), (), (), ())
        )
        bins = np.flatnonzero(self._histogram).astype(np.uint32)
        return TensorStatistics(
            np.array(energy, np.float64),
            np.array(maximum, np.float32),
            np.array(nonzero, np.uint32),
            np.array(nonfinite, np.uint32),
            self._sketch.astype(np.float32),
            Histogram(bins, self._histogram[bins]),
        )
