"""Consensus task arithmetic: keep the elements that matter to several experts."""

from __future__ import annotations

from typing import Final

from mergegit.errors import BadRecipe
from mergegit.kernels.agreement import agreed_sum
from mergegit.kernels.floats import Floats
from mergegit.merge.method import (
    DEPTH_SCALED,
    WEIGHT,
    Band,
    Banded,
    Method,
    Parameter,
    TensorContext,
    factor,
    plain,
)

_SHARE: Final = Parameter(
    "tall_lambda", 0.4, "how large an expert's part must be beside that of all others", low=0.0
)
_AGREE: Final = Parameter("agree", 2.0, "how many experts an element must matter to", low=0.0)


def _consensus(context: TensorContext) -> Banded:
    """b + lambda * m * s, with s = sum c_k, c_k = w_k d_k, and m the consensus of masks.

    The TALL mask of expert k is |c_k| >= tall_lambda * |s - c_k| (equation 4 of the paper, where
    all weights are 1), and m is one where at least ``agree`` of the masks are.
    """
    nearest = plain(context)
    share, agree = context.number("tall_lambda"), context.number("agree")
    scale = factor(context)
    if agree > len(context.experts):
        raise BadRecipe(
            f"agree is {agree:g}, and only {len(context.experts)} experts take part",
            hint="name more experts, or ask fewer of them to agree",
        )

    def apply(band: Band) -> Floats:
        return agreed_sum(band.base, band.deltas, nearest.weights, share, agree, scale)

    return Banded(apply, nearest)


CONSENSUS: Final = Method(
    "consensus",
    "add up the deltas where they matter to several experts, drop the rest",
    "Consensus task arithmetic with TALL masks, arXiv 2405.07813",
    (WEIGHT, _SHARE, _AGREE, *DEPTH_SCALED),
    _consensus,
    models=(2, None),
    trims=True,
    flips=1.5,
)
