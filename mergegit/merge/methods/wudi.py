"""WUDI: the merged matrix that interferes least with what each expert changed."""

from __future__ import annotations

from typing import Final

from mergegit.kernels.floats import Floats
from mergegit.merge.method import (
    DEPTH_SCALED,
    WEIGHT,
    Method,
    Needs,
    Parameter,
    Rule,
    TensorContext,
)
from mergegit.merge.methods.by_matrix import Moved, by_matrix, is_matrix, mean

_RIDGE: Final = Parameter(
    "ridge", 0.1, "how strongly small directions are shrunk, beside the mean one", low=1e-6
)
_INPUTS_FIRST: Final = Parameter(
    "inputs_first", False, "matrices are stored as (inputs, outputs), like those of GPT-2's Conv1D"
)


def _wudi(context: TensorContext) -> Rule:
    """b + lambda (sum_e w_e D_e D_e^T D_e) (sum_e w_e D_e^T D_e + eps I)^-1, w_e = 1 / |D_e|^2.

    D_e (outputs, inputs) is expert e's delta, |.| the Frobenius norm. The paper minimises the sum
    over experts of |(T - D_e) D_e^T|^2 / |D_e|^2: the rows of D_e lie in the space of the inputs
    that the expert was trained on, and on those T should do what D_e does. The paper descends from
    the sum of the deltas for 300 steps; this is the minimum itself, with a ridge where the paper
    stops early: eps is ``ridge`` times the mean eigenvalue of what is inverted. All other tensors
    are merged by the mean; the paper's code leaves them as they are in the base.

    Scaling D_e by its weight leaves w_e D_e^T D_e as it is and scales the first sum's term alone.
    The method is not symmetric: ``inputs_first`` transposes matrices that are stored that way.

    In float64 it holds one delta and the first sum (m n each), n^2 and min(m, n)^2. It takes about
    K m n (n + 3 min(m, n)) + n^3 / 3 + 2 m n^2 operations. Where the experts together have fewer
    rows than there are columns, it holds all deltas and (K m)^2 instead, which is less than n^2.
    """
    if not is_matrix(context):
        return mean(context)
    ridge = context.number("ridge")
    turned = bool(context.parameters["inputs_first"])

    def merge(moved: Moved, threads: int) -> Floats:
        from mergegit.merge.matrices import least_interference

        deltas = [delta.T if turned else delta for delta in moved.deltas]
        merged = least_interference(deltas, moved.energies, moved.weights, ridge, threads)
        return merged.T if turned else merged

    return by_matrix(context, merge)


WUDI: Final = Method(
    "wudi",
    "per matrix, the least-squares merge that disturbs each expert least in its own inputs",
    "WUDI-Merging, arXiv 2503.08099, in closed form",
    (WEIGHT, *DEPTH_SCALED, _RIDGE, _INPUTS_FIRST),
    _wudi,
    needs=Needs.TENSOR,
    flips=0.3,
)
