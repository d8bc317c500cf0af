"""What methods share that see a layer's matrices as wholes.

Such a method merges the matrices inside layers. Vectors, embeddings, heads and convolutions are
merged by the mean of the weighted deltas, ``lambda`` times. Where three axes stand for the matrices
of several experts of a mixture, stacked, each is merged by itself.

A weight scales an expert's delta before anything else happens to it; an expert of weight zero takes
no part and is not counted. Experts without a change in a matrix leave it to the others.

Memory: for one matrix of m n elements, float32 of the base, K deltas and the result, and in float64
what each method says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mergegit.errors import NotFinite
from mergegit.kernels.combine import Coefficients
from mergegit.kernels.floats import Floats
from mergegit.kernels.gram import inner_products
from mergegit.merge.method import Band, Banded, TensorContext, Unit, factor, weighted


@dataclass(frozen=True, slots=True)
class Moved:
    """The experts that changed a matrix: their deltas (m, n) float32, those deltas' energies (sums
    of squares, none of them zero), and their weights."""

    deltas: Sequence[Floats]
    energies: Sequence[float]
    weights: Sequence[float]


def is_matrix(context: TensorContext) -> bool:
    """Whether a tensor is a matrix of a layer, or several, stacked along a first axis."""
    shape = context.shape
    if not context.in_layers or len(shape) not in (2, 3) or min(shape[-2:]) < 2:
        return False
    # A mixture has few experts of large matrices; a convolution has kernels in great number.
    return len(shape) == 2 or shape[0] <= min(shape[1:])


def mean(context: TensorContext) -> Coefficients:
    """lambda / K times the sum of the weighted deltas of K experts."""
    weights = context.numbers("weight")
    count = max(sum(weight != 0 for weight in weights), 1)
    return weighted([weight / count for weight in weights], factor=factor(context))


def by_matrix(context: TensorContext, merge: Callable[[Moved, int], Floats]) -> Banded:
    """A rule that adds lambda times what ``merge`` makes of each matrix's deltas to the base.

    ``merge`` takes the number of threads that it may use as well.

    Planning takes it for the weighted sum of the deltas, which it comes near to. Applying it raises
    ``NotFinite`` where a delta holds NaN or infinity.
    """
    weights = context.numbers("weight")
    scale = np.float32(factor(context))
    rows, columns = context.shape[-2:]

    def apply(band: Band) -> Floats:
        out = band.base.reshape(-1, rows, columns).copy()
        deltas = band.deltas.reshape(len(weights), -1, rows, columns)
        for place, matrix in enumerate(out):
            moved = _moved(context.name, deltas[:, place], weights)
            if moved.deltas:
                merged = merge(moved, band.threads)
                merged *= scale
                matrix += merged
        return out.reshape(-1)

    return Banded(apply, nearest=weighted(weights, factor=factor(context)), unit=Unit.TENSOR)


def _moved(name: str, deltas: Floats, weights: Sequence[float]) -> Moved:
    energies = [float(inner_products(delta.reshape(1, -1))[0, 0]) for delta in deltas]
    if not all(map(math.isfinite, energies)):
        raise NotFinite(
            f"tensor {name} of an expert holds NaN or infinity, which would spread over the matrix",
            hint="leave the expert out, or merge by a method that takes each element by itself",
        )
    kept = [k for k, energy in enumerate(energies) if energy > 0 and weights[k] != 0]
    return Moved([deltas[k] for k in kept], [energies[k] for k in kept], [weights[k] for k in kept])
