"""TIES: trim, elect a sign, merge those that agree."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from mergegit.kernels.combine import Coefficients
from mergegit.merge.method import (
    DEPTH_SCALED,
    WEIGHT,
    Method,
    Needs,
    Parameter,
    TensorContext,
    floats,
    normalize,
    plain,
)

DENSITY: Final = Parameter(
    "density", 1.0, "share of the expert's elements that is kept",
    per_expert=True, low=0.0, high=1.0,
)  # fmt: skip
RESCALE: Final = Parameter("rescale", False, "scale what is kept to the L1 norm of the whole")


def _ties(context: TensorContext) -> Coefficients:
    thresholds, scales = [], []
    for expert in context.experts:
        density = float(expert.parameters["density"])
        if expert.histogram is None or density >= 1.0:
            thresholds.append(0.0)
            scales.append(1.0)
            continue
        # A positive density keeps one element at least, so that scalars are not lost.
        keep = max(int(density * context.elements), 1) if density > 0 else 0
        threshold = expert.histogram.threshold(keep)
        thresholds.append(float(threshold))
        kept = expert.histogram.magnitude(threshold)
        rescales = context.parameters["rescale"] and kept > 0
        scales.append(expert.histogram.magnitude() / kept if rescales else 1.0)
    return replace(plain(context), thresholds=floats(thresholds), scales=floats(scales), elect=True)


TIES: Final = Method(
    "ties",
    "trim small deltas, elect a sign per element, average those that agree",
    "TIES-Merging, arXiv 2306.01708",
    (WEIGHT, DENSITY, normalize(True), *DEPTH_SCALED, RESCALE),
    _ties,
    needs=Needs.STATISTICS,
    trims=True,
    flips=0.7,
)
