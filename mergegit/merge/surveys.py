"""First passes over a tensor: what methods must know of it before they can merge."""

from __future__ import annotations

import numpy as np

from mergegit.kernels.gram import grouped_inner_products, inner_products
from mergegit.merge.method import Band, Doubles, TensorContext


class Gram:
    """Inner products (K + 1, K + 1) of the base and the deltas of a whole tensor, base first."""

    def __init__(self, context: TensorContext) -> None:
        size = len(context.experts) + 1
        self._sum = np.zeros((size, size))

    def measure(self, band: Band) -> Doubles:
        return inner_products(_stacked(band))

    def add(self, measured: Doubles) -> None:
        self._sum += measured

    def finish(self) -> Doubles:
        return self._sum


class RowGram:
    """Inner products (rows, K + 1, K + 1) of the base and the deltas within each row."""

    def __init__(self, context: TensorContext) -> None:
        size = len(context.experts) + 1
        self._columns = max(context.columns, 1)
        self._sums = np.zeros((context.elements // self._columns, size, size))

    def measure(self, band: Band) -> tuple[int, Doubles]:
        top = band.first // self._columns
        rows = (band.first + band.base.size - 1) // self._columns - top + 1
        return top, grouped_inner_products(
            _stacked(band), band.first, self._columns, by_rows=True, groups=rows
        )

    def add(self, measured: tuple[int, Doubles]) -> None:
        top, sums = measured
        self._sums[top : top + len(sums)] += sums

    def finish(self) -> Doubles:
        return self._sums


class ColumnGram:
    """Inner products (columns, K + 1, K + 1) of the base and the deltas within each column."""

    def __init__(self, context: TensorContext) -> None:
        size = len(context.experts) + 1
        self._columns = max(context.columns, 1)
        self._sums = np.zeros((self._columns, size, size))

    def measure(self, band: Band) -> Doubles:
        return grouped_inner_products(
            _stacked(band), band.first, self._columns, by_rows=False, groups=self._columns
        )

    def add(self, measured: Doubles) -> None:
        self._sums += measured

    def finish(self) -> Doubles:
        return self._sums


def _stacked(band: Band) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    stacked = np.empty((len(band.deltas) + 1, band.base.size), np.float32)
    stacked[0] = band.base
    stacked[1:] = band.deltas
    return stacked
