"""Merging matrices as wholes: least squares, and singular values.

Deltas come as float32 matrices of one shape (m, n) and the merged one goes back as float32; all
between is float64, by torch. Singular values and vectors come from the eigenvectors of the smaller
Gram matrix, D D^T or D^T D, at a fraction of what a singular value decomposition costs; in float64
it tells those apart that are at least a millionth of the largest, and float32 deltas mean no more.
Whatever has a sign or a basis that could be chosen otherwise occurs in pairs that cancel, so that
results do not depend on how they are chosen.

Work is cut into pieces that depend on the shape alone, and each piece is done on one core: any
number of threads gives the same bits. BLAS and LAPACK add up in an order of their own, which other
versions of them and other processors change: there, results agree to about 1e-12 before they are
rounded to the output's dtype, which hides it but for an element in a great many.

Import this module only where a matrix is merged: it loads torch.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, TypeVar

import torch

from mergegit.kernels.floats import Floats
from mergegit.pipeline import ordered_map

Matrix = torch.Tensor

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

_DOUBLE: Final = torch.float64
_PANEL: Final = 512
_EIGEN_AT_ONCE: Final = 4
_RANK: Final = 1e-12
"""Eigenvalues of D D^T, as a share of the largest, below which a direction is rounding and not
part of the matrix."""
_DISTINCT: Final = 1e-10
"""The same for the Gram matrix of unit vectors of several experts: directions that two share."""


def least_interference(
    deltas: Sequence[Floats],
    energies: Sequence[float],
    weights: Sequence[float],
    ridge: float,
    threads: int = 1,
) -> Floats:
    """The matrix T (m, n) that comes nearest to every delta where that delta acts.

    With w_e = 1 / |D_e|^2, |.| the Frobenius norm and s_e the weights, it minimises

        sum_e w_e |(T - s_e D_e) D_e^T|^2 + eps |T|^2

    and is therefore (sum_e s_e w_e D_e D_e^T D_e) (sum_e w_e D_e^T D_e + eps I)^-1. ``eps`` is
    ``ridge`` times the mean eigenvalue of the sum that is inverted, so K / n times it. ``energies``
    are |D_e|^2, none of them zero.
    """
    with _one_core_a_thread():
        algebra = _Algebra(threads)
        rows, columns = deltas[0].shape
        norms = [math.sqrt(energy) for energy in energies]
        scales = [weight * norm for weight, norm in zip(weights, norms, strict=True)]
        units = (_double(delta).div_(norm) for delta, norm in zip(deltas, norms, strict=True))
        epsilon = ridge * len(deltas) / columns
        if len(deltas) * rows < columns:
            return _single(_solved_by_rows(algebra, torch.cat([*units]), scales, epsilon))
        gram = torch.zeros(columns, columns, dtype=_DOUBLE)
        target = torch.zeros(rows, columns, dtype=_DOUBLE)
        for unit, scale in zip(units, scales, strict=True):
            if rows < columns:
                algebra.add_product(target, algebra.gram(unit.T), unit, scale)
                algebra.add_lower_gram(gram, unit)
            else:
                own = algebra.gram(unit)
                algebra.add_product(target, unit, own, scale)
                gram += own
        del unit
        return _single(algebra.ridge_solved(gram, target, epsilon))


def _solved_by_rows(
    algebra: _Algebra, stack: Matrix, scales: Sequence[float], epsilon: float
) -> Matrix:
    """The same where the experts' rows together are fewer than the columns.

    With A the experts' unit deltas one below the other, the target is C A with C made of scaled
    diagonal blocks of A A^T, and C A (A^T A + eps I)^-1 = C (A A^T + eps I)^-1 A.
    """
    gram = algebra.gram(stack.T)
    rows = stack.shape[0] // len(scales)
    blocks = [slice(start, start + rows) for start in range(0, stack.shape[0], rows)]
    coupling = torch.cat(
        [gram[here, here] * scale for here, scale in zip(blocks, scales, strict=True)], dim=1
    )
    return algebra.product(algebra.ridge_solved(gram, coupling, epsilon), stack)


def common_isotropic(
    deltas: Sequence[Floats], weights: Sequence[float], threads: int = 1
) -> Floats:
    """The weighted sum of the deltas with all its singular values replaced by their mean.

    The values that are replaced, and averaged, are those that are not zero: there are no
    directions to give to the others.
    """
    with _one_core_a_thread():
        algebra = _Algebra(threads)
        total = torch.zeros(deltas[0].shape, dtype=_DOUBLE)
        for delta, weight in zip(deltas, weights, strict=True):
            total.add_(torch.from_numpy(delta), alpha=weight)
        wide = _wide(total)
        ((values, vectors),) = algebra.spectra([algebra.gram(wide.T)], _RANK)
        sizes = values.sqrt()
        # U U^T D V V^T / sigma = U diag(1 / sigma) U^T D: the right vectors are never formed.
        whitener = algebra.product(vectors * (sizes.mean() / sizes), vectors.T)
        merged = algebra.product(whitener, wide)
        return _single(merged if wide is total else merged.T)


def apart(
    deltas: Sequence[Floats], weights: Sequence[float], share: int, threads: int = 1
) -> Floats:
    """The sum of each delta's ``share`` largest singular components, with vectors set apart.

    With U (min(m, n), k), S and V the components of all experts side by side, the sum is
    U' S V'^T, where U' = U (U^T U)^-1/2 and V' are the nearest matrices to U and V whose columns
    are orthonormal (orthogonal Procrustes). Directions that several experts share exactly, so that
    there is no such matrix, are shared out among them: U^T U is inverted where it can be.
    """
    with _one_core_a_thread():
        algebra = _Algebra(threads)
        grams = [algebra.gram(_wide(_double(delta)).T) for delta in deltas]
        spectra = algebra.spectra(grams, _RANK, share)
        del grams
        left = torch.cat([vectors for _, vectors in spectra], dim=1)
        right = torch.zeros(left.shape[1], max(deltas[0].shape), dtype=_DOUBLE)
        sizes: list[Matrix] = []
        at = 0
        for delta, weight, (values, vectors) in zip(deltas, weights, spectra, strict=True):
            size, stop = values.sqrt(), at + len(values)
            unit_rows = vectors.T / size[:, None]
            algebra.add_product(right[at:stop], unit_rows, _wide(_double(delta)), 1.0)
            sizes.append(size * weight)
            at = stop
        del spectra, vectors
        roots = algebra.inverse_roots([algebra.gram(left), algebra.gram(right.T)])
        core = algebra.product(roots[0] * torch.cat(sizes), roots[1])
        merged = algebra.product(algebra.product(left, core), right)
        return _single(merged if deltas[0].shape[0] <= deltas[0].shape[1] else merged.T)


@dataclass(frozen=True, slots=True)
class _Algebra:
    """Arithmetic in float64 by a number of threads, in pieces of which each is one thread's."""

    threads: int

    def product(self, left: Matrix, right: Matrix) -> Matrix:
        out = torch.zeros(left.shape[0], right.shape[1], dtype=_DOUBLE)
        self.add_product(out, left, right, 1.0)
        return out

    def add_product(self, out: Matrix, left: Matrix, right: Matrix, scale: float) -> None:
        """Add ``scale`` left right to ``out``."""

        def add(rows: slice) -> None:
            out[rows].addmm_(left[rows], right, alpha=scale)

        self._each(add, _panels(len(out)))

    def gram(self, matrix: Matrix) -> Matrix:
        """matrix^T matrix."""
        columns = matrix.shape[1]
        out = torch.zeros(columns, columns, dtype=_DOUBLE)
        self.add_lower_gram(out, matrix)
        for rows in _panels(columns):
            out[: rows.start, rows] = out[rows, : rows.start].T
        return out

    def add_lower_gram(self, out: Matrix, matrix: Matrix) -> None:
        """Add matrix^T matrix to ``out``, up to the diagonal's panels, at half the cost."""

        def add(rows: slice) -> None:
            out[rows, : rows.stop].addmm_(matrix[:, rows].T, matrix[:, : rows.stop])

        self._each(add, reversed(_panels(len(out))))

    def ridge_solved(self, gram: Matrix, target: Matrix, epsilon: float) -> Matrix:
        """target (gram + epsilon I)^-1, written over both; of ``gram`` the lower half is read."""
        gram.diagonal().add_(epsilon)

        def factorize(upper: Matrix) -> None:
            torch.linalg.cholesky(upper, upper=True, out=upper)

        def solve(rows: slice) -> None:
            # gram = L L^T, so that X L^T = target and then Y L = X.
            half = torch.linalg.solve_triangular(gram.T, target[rows], upper=True, left=False)
            target[rows] = torch.linalg.solve_triangular(gram, half, upper=False, left=False)

        # The transpose of the lower half is what LAPACK, which counts by columns, factors in place.
        self._each(factorize, [gram.T])
        self._each(solve, _panels(len(target)))
        return target

    def spectra(
        self, grams: Sequence[Matrix], share: float, count: int | None = None
    ) -> list[tuple[Matrix, Matrix]]:
        """Of each the eigenvalues, ascending, that are more than a share of the largest, the
        ``count`` largest at most, and their vectors as columns."""

        def solve(gram: Matrix) -> tuple[Matrix, Matrix]:
            values, vectors = torch.linalg.eigh(gram)
            kept = int((values > max(float(values[-1]) * share, 0.0)).sum())
            start = len(values) - min(kept, count or kept)
            return values[start:], vectors[:, start:].clone()

        return self._each(solve, grams, at_once=_EIGEN_AT_ONCE)

    def inverse_roots(self, grams: Sequence[Matrix]) -> list[Matrix]:
        """Of each the inverse of the square root, as far as it has one."""
        return [
            self.product(vectors / values.sqrt(), vectors.T)
            for values, vectors in self.spectra(grams, _DISTINCT)
        ]

    def _each(
        self, work: Callable[[_Item], _Result], items: Iterable[_Item], at_once: int | None = None
    ) -> list[_Result]:
        def alone(item: _Item) -> _Result:
            torch.set_num_threads(1)
            return work(item)

        threads = min(self.threads, at_once or self.threads)
        return list(ordered_map(alone, items, threads=threads))


class _Cores:
    """Who is inside ``_one_core_a_thread``, and what to put back when the last one leaves."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.inside = 0
        self.before = 0


_cores: Final = _Cores()


@contextmanager
def _one_core_a_thread() -> Iterator[None]:
    """Keep torch, in this thread, from starting threads of its own.

    They would make results depend on how many there are, and on a busy machine they spend their
    time waiting for one another. Torch's setting is one for the thread that sets it, and for all
    threads that are yet to come.
    """
    with _cores.lock:
        if not _cores.inside:
            _cores.before = torch.get_num_threads()
        _cores.inside += 1
        before = _cores.before
    torch.set_num_threads(1)
    try:
        yield
    finally:
        with _cores.lock:
            _cores.inside -= 1
        torch.set_num_threads(before)


def _panels(rows: int) -> list[slice]:
    return [slice(start, min(start + _PANEL, rows)) for start in range(0, rows, _PANEL)]


def _double(matrix: Floats) -> Matrix:
    return torch.from_numpy(matrix).to(_DOUBLE)


def _single(matrix: Matrix) -> Floats:
    single: Floats = matrix.to(torch.float32, memory_format=torch.contiguous_format).numpy()
    return single


def _wide(matrix: Matrix) -> Matrix:
    """The matrix, or its transpose where it has more rows than columns."""
    return matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
