"""Weighted averages: of models (linear) and of what experts changed (task arithmetic)."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np

from mergegit.kernels.combine import Coefficients
from mergegit.merge.method import (
    DEPTH_SCALED,
    WEIGHT,
    Merges,
    Method,
    TensorContext,
    normalize,
    plain,
)


def _linear(context: TensorContext) -> Coefficients:
    """sum w_i e_i / sum w_i; without ``normalize``, or where weights cancel, sum w_i e_i."""
    average = plain(context)
    total = float(np.sum(average.weights, dtype=np.float32))
    divides = average.normalize and abs(total) >= 1e-8
    return replace(average, base_scale=1.0 if divides else total)


LINEAR: Final = Method(
    "linear",
    "weighted average of the experts",
    "Model soups, arXiv 2203.05482",
    (WEIGHT, normalize(True)),
    _linear,
    merges=Merges.MODELS,
    additive=True,
)

TASK_ARITHMETIC: Final = Method(
    "task_arithmetic",
    "base plus the weighted sum of the deltas",
    "Editing models with task arithmetic, arXiv 2212.04089",
    (WEIGHT, normalize(False), *DEPTH_SCALED),
    plain,
    additive=True,
)
