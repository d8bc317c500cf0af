"""Model Breadcrumbs: drop the largest deltas and the smallest, and add up what lies between."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from mergegit.kernels.combine import Coefficients
from mergegit.merge.method import (
    DEPTH_SCALED,
    WEIGHT,
    ExpertTensor,
    Method,
    Needs,
    Parameter,
    TensorContext,
    floats,
    normalize,
    plain,
)
from mergegit.merge.methods.ties import DENSITY, RESCALE

GAMMA: Final = Parameter(
    "gamma", 0.01, "share of the expert's elements that is dropped as the largest",
    per_expert=True, low=0.0, high=1.0,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Range:
    """What is kept of an expert: magnitudes from ``floor`` to below ``ceiling``, by ``scale``."""

    floor: float = 0.0
    ceiling: float = float("inf")
    scale: float = 1.0


def _kept(expert: ExpertTensor, elements: int, rescale: bool) -> _Range:
    """The magnitudes of ranks int(gamma n) + 1 to int(gamma n) + int(density n), and their ties.

    Where these are more ranks than there are, fewer of the largest are dropped.
    """
    density, gamma = float(expert.parameters["density"]), float(expert.parameters["gamma"])
    if expert.histogram is None or density >= 1.0:
        return _Range()
    # A positive density keeps one element at least, so that scalars are not lost.
    keep = max(int(density * elements), 1) if density > 0 else 0
    dropped = min(int(gamma * elements), elements - keep)
    floor = expert.histogram.threshold(dropped + keep) if keep else np.float32(np.inf)
    ceiling = np.float32(np.inf)
    if dropped > 0:
        largest = expert.histogram.threshold(dropped + 1)
        ceiling = np.nextafter(largest, np.float32(np.inf))
    scale = 1.0
    if rescale:
        whole = expert.histogram.magnitude()
        rest = expert.histogram.magnitude(floor) - expert.histogram.magnitude(ceiling)
        scale = whole / rest if rest > 0 else 1.0
    return _Range(float(floor), float(ceiling), scale)


def _breadcrumbs(context: TensorContext) -> Coefficients:
    rescale = bool(context.parameters["rescale"])
    kept = [_kept(expert, context.elements, rescale) for expert in context.experts]
    return replace(
        plain(context),
        thresholds=floats([part.floor for part in kept]),
        ceilings=floats([part.ceiling for part in kept]),
        scales=floats([part.scale for part in kept]),
    )


def _breadcrumbs_ties(context: TensorContext) -> Coefficients:
    return replace(_breadcrumbs(context), elect=True)


BREADCRUMBS: Final = Method(
    "breadcrumbs",
    "drop the largest and the smallest deltas, add up the rest",
    "Model Breadcrumbs, arXiv 2312.06795",
    (WEIGHT, DENSITY, GAMMA, normalize(False), *DEPTH_SCALED, RESCALE),
    _breadcrumbs,
    needs=Needs.STATISTICS,
    trims=True,
    flips=0.4,
)

BREADCRUMBS_TIES: Final = Method(
    "breadcrumbs_ties",
    "drop the largest and the smallest deltas, elect a sign per element",
    "Model Breadcrumbs, arXiv 2312.06795, with the election of TIES, arXiv 2306.01708",
    (WEIGHT, DENSITY, GAMMA, normalize(False), *DEPTH_SCALED, RESCALE),
    _breadcrumbs_ties,
    needs=Needs.STATISTICS,
    trims=True,
    flips=0.7,
)
