"""Merges by singular values: task singular vectors, and isotropic merging."""

from __future__ import annotations

from typing import Final

from mergegit.kernels.floats import Floats
from mergegit.merge.method import DEPTH_SCALED, WEIGHT, Method, Needs, Rule, TensorContext
from mergegit.merge.methods.by_matrix import Moved, by_matrix, is_matrix, mean


def _tsv(context: TensorContext) -> Rule:
    """b + lambda U' S V'^T: the leading singular components of K experts, set apart.

    Of each delta the rank / K largest components are kept, one at least, with rank = min(m, n).
    Side by side they are U, S and V; U' and V' are the matrices with orthonormal columns nearest
    to U and V (orthogonal Procrustes).

    Experts that did not change the matrix are not counted in K, and components of size zero, whose
    vectors could be any, are left out; the paper's code counts and keeps both. As in the paper's
    code, tensors that are no matrices are merged by the mean; other than there, so are embeddings.

    In float64 it holds one delta, the right vectors of all and the result (m n each), and with s =
    min(m, n) at most (K + 12) s^2. It takes K + 2 eigendecompositions of s x s matrices, which is
    nearly all of its time, and makes up to four of them at once.
    """
    if not is_matrix(context):
        return mean(context)
    weights = context.numbers("weight")
    moving = sum(
        expert.energy > 0 and weight != 0
        for expert, weight in zip(context.experts, weights, strict=True)
    )
    share = max(min(context.shape[-2:]) // max(moving, 1), 1)

    def merge(moved: Moved, threads: int) -> Floats:
        if moving == 1:
            return moved.deltas[0] * moved.weights[0]
        from mergegit.merge.matrices import apart

        return apart(moved.deltas, moved.weights, share, threads)

    return by_matrix(context, merge)


def _iso_c(context: TensorContext) -> Rule:
    """b + lambda s U V^T, with U S V^T the sum of the weighted deltas and s the mean of S.

    Singular values of zero stay zero and do not count in the mean, so that the sum of all stays
    what it was; the paper's code counts them and gives them some vectors. Where deltas of low rank
    were rounded, as those of adapters that were merged into 16-bit weights, what rounding made
    counts like all the rest: the method is for experts that were trained in full. As in the
    paper's code, tensors that are no matrices are merged by the mean; other than there, so are
    embeddings.

    In float64 it holds the sum and the result (m n each), and with s = min(m, n) at most 4 s^2. It
    takes one eigendecomposition of an s x s matrix.
    """
    if not is_matrix(context):
        return mean(context)

    def merge(moved: Moved, threads: int) -> Floats:
        from mergegit.merge.matrices import common_isotropic

        return common_isotropic(moved.deltas, moved.weights, threads)

    return by_matrix(context, merge)


TSV: Final = Method(
    "tsv",
    "per matrix, the leading singular components of each expert, made orthogonal to one another",
    "Task singular vectors (TSV-Merge), arXiv 2412.00081",
    (WEIGHT, *DEPTH_SCALED),
    _tsv,
    needs=Needs.TENSOR,
    flips=1.2,
)

ISO_C: Final = Method(
    "iso_c",
    "per matrix, the sum of the deltas with all singular values made equal",
    "Isotropic merging in common subspace (Iso-C), arXiv 2502.04959",
    (WEIGHT, *DEPTH_SCALED),
    _iso_c,
    needs=Needs.TENSOR,
    flips=0.6,
)
