"""Lengths of vectors and distances between their directions, from inner products alone.

The vectors are models, e_i = b + d_i, or deltas, d_i. Models differ little from one another beside
their length, so that 1 - cos would lose half of the digits; distances are taken from the deltas,
which loses none.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mergegit.merge.method import Doubles, TensorContext


@dataclass(frozen=True, slots=True)
class Directions:
    """Of K vectors, or of K in each of several groups.

    ``lengths`` (..., K), and ``apart`` (..., K, K), the squared distances between the vectors
    scaled to length one: 0 for one direction, 2 for a right angle, 4 for opposite ones. A vector
    without a direction, of zeros or with NaN or infinity in it, has length zero and is apart from
    none.
    """

    lengths: Doubles
    apart: Doubles

    @classmethod
    def of(cls, gram: Doubles, *, deltas: bool) -> Directions:
        """Of the deltas, or of the models, whose inner products ``gram`` (..., K + 1, K + 1) holds,
        those of the base first."""
        changes = gram[..., 1:, 1:]
        energies = np.diagonal(changes, axis1=-2, axis2=-1)
        # The models' squares are the base's and this; it cancels where squares are subtracted.
        moved = energies if deltas else 2.0 * gram[..., 0, 1:] + energies
        squares = np.maximum(moved if deltas else gram[..., 0, 0, None] + moved, 0.0)
        squares = np.where(np.isfinite(squares), squares, 0.0)
        lengths = np.sqrt(squares)
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            # |u - v|^2 = (|x - y|^2 - (|x| - |y|)^2) / (|x| |y|) for u = x / |x|, v = y / |y|
            distances = _pairs(energies, np.add) - 2.0 * changes
            gaps = _pairs(moved, np.subtract) / _pairs(lengths, np.add)
            products = np.sqrt(_pairs(squares, np.multiply))
            apart = (distances - gaps**2) / products
        return cls(lengths, np.where(products > 0, np.clip(apart, 0.0, 4.0), 0.0))


def _pairs(values: Doubles, operation: np.ufunc) -> Doubles:
    """``operation`` of every two values (..., K): (..., K, K)."""
    result: npt.NDArray[np.float64] = operation(values[..., :, None], values[..., None, :])
    return result


def known_gram(context: TensorContext) -> Doubles:
    """Inner products (K + 1, K + 1) of base and deltas: as surveyed, summed over rows or columns if
    there are any, or before that as estimated; zeros where there is no estimate."""
    size = len(context.experts) + 1
    gram: Doubles = context.gram if context.surveyed is None else context.surveyed
    if gram.shape[-1] != size:
        return np.zeros((size, size))
    return gram if gram.ndim == 2 else gram.sum(axis=0)
