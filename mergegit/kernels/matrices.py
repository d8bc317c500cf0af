"""Merging matrices as wholes: least squares, and singular values.

Deltas come as float32 matrices of one shape (m, n) and the merged one goes back as float32; all
between is float64, by torch. Singular values and vectors come from the eigenvectors of the smaller
Gram matrix, D D^T or D^T D, which costs a fraction of a singular value decomposition; in float64
it tells those apart that are at least a millionth of the largest, and float32 deltas mean no more.
Whatever has a sign or a basis that could be chosen otherwise occurs in pairs that cancel, so that
results do not depend on how they are chosen.

BLAS and LAPACK add in an order of their own, which depends on the library, the machine and its
number of cores. There the same deltas give the same bits; elsewhere results agree to about 1e-12,
which the rounding to the output's dtype hides but for an element in a great many.

Import this module only where a matrix is merged: it loads torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

from mergegit.kernels.floats import Floats

Matrix = torch.Tensor

_DOUBLE: Final = torch.float64
_PANEL: Final = 1024
_RANK: Final = 1e-12
"""Eigenvalues of D D^T, as a share of the largest, below which a direction is rounding and not
part of the matrix."""
_DISTINCT: Final = 1e-10
"""The same for the Gram matrix of unit vectors of several experts: directions that two share."""


def least_interference(
    deltas: Sequence[Floats], energies: Sequence[float], weights: Sequence[float], ridge: float
) -> Floats:
    """The matrix T (m, n) that comes nearest to every delta where that delta acts.

    With w_e = 1 / |D_e|^2, |.| the Frobenius norm and s_e the weights, it minimises

        sum_e w_e |(T - s_e D_e) D_e^T|^2 + eps |T|^2

    and is therefore (sum_e s_e w_e D_e D_e^T D_e) (sum_e w_e D_e^T D_e + eps I)^-1. ``eps`` is
    ``ridge`` times the mean eigenvalue of the sum that is inverted, so K / n times it. ``energies``
    are |D_e|^2, none of them zero.
    """
    rows, columns = deltas[0].shape
    norms = [math.sqrt(energy) for energy in energies]
    units = zip(deltas, norms, strict=True)
    scales = [weight * norm for weight, norm in zip(weights, norms, strict=True)]
    epsilon = ridge * len(deltas) / columns
    if len(deltas) * rows < columns:
        stack = torch.cat([_double(delta).div_(norm) for delta, norm in units])
        return _single(_solved_by_rows(stack, scales, epsilon))
    gram = torch.zeros(columns, columns, dtype=_DOUBLE)
    target = torch.zeros(rows, columns, dtype=_DOUBLE)
    for (delta, norm), scale in zip(units, scales, strict=True):
        unit = _double(delta).div_(norm)
        if rows < columns:
            target.addmm_(_gram(unit.T), unit, alpha=scale)
            _add_lower_gram(gram, unit)
        else:
            own = _gram(unit)
            target.addmm_(unit, own, alpha=scale)
            gram += own
    return _single(_ridge_solved(gram, target, epsilon))


def _solved_by_rows(stack: Matrix, scales: Sequence[float], epsilon: float) -> Matrix:
    """The same where the experts' rows together are fewer than the columns.

    With A the experts' unit deltas one below the other, the target is C A with C made of scaled
    diagonal blocks of A A^T, and C A (A^T A + eps I)^-1 = C (A A^T + eps I)^-1 A.
    """
    gram = _gram(stack.T)
    rows = stack.shape[0] // len(scales)
    blocks = [slice(start, start + rows) for start in range(0, stack.shape[0], rows)]
    coupling = torch.cat(
        [gram[here, here] * scale for here, scale in zip(blocks, scales, strict=True)], dim=1
    )
    return _ridge_solved(gram, coupling, epsilon) @ stack


def _ridge_solved(gram: Matrix, target: Matrix, epsilon: float) -> Matrix:
    """target (gram + epsilon I)^-1; of ``gram``, which is overwritten, the lower half is read."""
    gram.diagonal().add_(epsilon)
    return torch.cholesky_solve(target.T, torch.linalg.cholesky(gram)).T


def common_isotropic(deltas: Sequence[Floats], weights: Sequence[float]) -> Floats:
    """The weighted sum of the deltas with all its singular values replaced by their mean.

    The values that are replaced, and averaged, are those that are not zero: there are no
    directions to give to the others.
    """
    total = torch.zeros(deltas[0].shape, dtype=_DOUBLE)
    for delta, weight in zip(deltas, weights, strict=True):
        total.add_(torch.from_numpy(delta), alpha=weight)
    wide = _wide(total)
    values, vectors = _spectrum(_gram(wide.T), _RANK)
    if not len(values):
        return np.zeros(deltas[0].shape, np.float32)
    sizes = values.sqrt()
    # U U^T D V V^T / sigma = U diag(1 / sigma) U^T D: the right vectors are never formed.
    merged = ((vectors / sizes) @ vectors.T).mul_(sizes.mean()) @ wide
    return _single(merged if wide is total else merged.T)


def apart(deltas: Sequence[Floats], weights: Sequence[float], share: int) -> Floats:
    """The sum of each delta's ``share`` largest singular components, with vectors set apart.

    With U (min(m, n), k), S and V the components of all experts side by side, the sum is
    U' S V'^T, where U' = U (U^T U)^-1/2 and V' are the nearest matrices to U and V whose columns
    are orthonormal (orthogonal Procrustes). Directions that several experts share exactly, so that
    there is no such matrix, are shared out among them: U^T U is inverted where it can be.
    """
    tall = deltas[0].shape[0] > deltas[0].shape[1]
    lefts, rights, sizes = [], [], []
    for delta, weight in zip(deltas, weights, strict=True):
        wide = _wide(_double(delta)).mul_(weight)
        values, vectors = _spectrum(_gram(wide.T), _RANK)
        kept = values[-share:].sqrt()
        lefts.append(vectors[:, -share:])
        rights.append((lefts[-1].T @ wide).div_(kept[:, None]))
        sizes.append(kept)
    left, right = torch.cat(lefts, dim=1), torch.cat(rights)
    del lefts, rights, vectors
    core = (_inverse_root(_gram(left)) * torch.cat(sizes)) @ _inverse_root(_gram(right.T))
    merged = (left @ core) @ right
    return _single(merged.T if tall else merged)


def _inverse_root(gram: Matrix) -> Matrix:
    values, vectors = _spectrum(gram, _DISTINCT)
    return (vectors / values.sqrt()) @ vectors.T


def _spectrum(gram: Matrix, share: float) -> tuple[Matrix, Matrix]:
    """Eigenvalues, ascending, of more than a share of the largest, and their vectors as columns."""
    values, vectors = torch.linalg.eigh(gram)
    largest = float(values[-1])
    kept = int((values > max(largest * share, 0.0)).sum())
    start = len(values) - kept
    return values[start:], vectors[:, start:]


def _gram(matrix: Matrix) -> Matrix:
    """matrix^T matrix."""
    columns = matrix.shape[1]
    out = torch.zeros(columns, columns, dtype=_DOUBLE)
    _add_lower_gram(out, matrix)
    for start in range(0, columns, _PANEL):
        stop = min(start + _PANEL, columns)
        out[:start, start:stop] = out[start:stop, :start].T
    return out


def _add_lower_gram(out: Matrix, matrix: Matrix) -> None:
    """Add matrix^T matrix to ``out``, below the diagonal, in place and at half the cost."""
    columns = matrix.shape[1]
    for start in range(0, columns, _PANEL):
        stop = min(start + _PANEL, columns)
        out[start:stop, :stop].addmm_(matrix[:, start:stop].T, matrix[:, :stop])


def _double(matrix: Floats) -> Matrix:
    return torch.from_numpy(matrix).to(_DOUBLE)


def _single(matrix: Matrix) -> Floats:
    single: Floats = matrix.to(torch.float32, memory_format=torch.contiguous_format).numpy()
    return single


def _wide(matrix: Matrix) -> Matrix:
    """The matrix, or its transpose where it has more rows than columns."""
    return matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
