"""Weighted sums whose weights differ from row to row, or from column to column."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from mergegit.kernels.combine import Coefficients
from mergegit.kernels.floats import Floats
from mergegit.merge.method import Band, Banded, Doubles


@dataclass(frozen=True, slots=True)
class GroupedSum:
    """base_scale * b + sum w_k d_k with weights (groups, K) and base scales (groups), float32.

    Group g is the g-th run of ``columns`` elements or, without ``by_rows``, every element whose
    index leaves g when divided by ``columns``.
    """

    weights: Floats
    base_scales: Floats
    columns: int
    by_rows: bool

    @classmethod
    def of(
        cls, weights: Doubles, base_scales: Doubles, columns: int, *, by_rows: bool
    ) -> GroupedSum:
        """From float64 numbers; a base scale that float32 can't tell from one is one."""
        return cls(
            weights.astype(np.float32), base_scales.astype(np.float32), max(columns, 1), by_rows
        )

    def apply(self, band: Band) -> Floats:
        groups = self._groups(band)
        total = np.zeros(band.base.size, np.float32)
        for weights, delta in zip(self.weights.T, band.deltas, strict=True):
            total += np.ascontiguousarray(weights)[groups] * delta
        total += self.base_scales[groups] * band.base
        return total

    def _groups(self, band: Band) -> npt.NDArray[np.int64]:
        places = np.arange(band.first, band.first + band.base.size, dtype=np.int64)
        return places // self.columns if self.by_rows else places % self.columns

    def rule(self, nearest: Coefficients) -> Banded:
        """The merge that this sum is. ``nearest`` is the one sum that comes nearest to it; its
        base is scaled like that of the group that scales it most, so that it keeps the base where
        every group does."""
        if not self.base_scales.size:
            return Banded(self.apply, nearest)
        furthest = int(np.argmax(np.abs(self.base_scales - 1.0)))
        scale = float(self.base_scales[furthest])
        return Banded(self.apply, replace(nearest, base_scale=scale))
