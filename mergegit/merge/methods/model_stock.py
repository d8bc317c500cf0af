"""Model Stock: the average of the experts, drawn back to the base as far as they disagree."""

from __future__ import annotations

from typing import Final

import numpy as np

from mergegit.merge.directions import known_gram
from mergegit.merge.grouped import GroupedSum
from mergegit.merge.method import (
    Doubles,
    Method,
    Needs,
    Parameter,
    Rule,
    Survey,
    TensorContext,
    weighted,
)
from mergegit.merge.surveys import Gram, RowGram

_SINGULAR: Final = 1e-6
"""Where the divisor of the ratio is nearer to zero than this, there is no ratio."""


def _ratio(gram: Doubles) -> Doubles:
    """t = N c / (1 + (N - 1) c) (Model Stock, eq. 7), c the mean cosine between two deltas.

    A delta of zeros has a cosine of zero with every other. Where the deltas balance exactly, t has
    no finite value; nothing is moved then. From ``gram`` (..., N + 1, N + 1), (...).
    """
    changes = gram[..., 1:, 1:]
    count = changes.shape[-1]
    squares = np.diagonal(changes, axis1=-2, axis2=-1)
    products = np.sqrt(squares[..., :, None] * squares[..., None, :])
    usable = np.isfinite(products) & (products > 0)
    cosines = np.where(usable, changes / np.where(usable, products, 1.0), 0.0)
    one, other = np.triu_indices(count, 1)
    mean = np.clip(cosines, -1.0, 1.0)[..., one, other].mean(axis=-1)
    divisor = 1.0 + (count - 1) * mean
    singular = np.abs(divisor) < _SINGULAR
    ratio: Doubles = np.where(singular, 0.0, count * mean / np.where(singular, 1.0, divisor))
    return ratio


def _model_stock(context: TensorContext) -> Rule:
    """b + t (mean e_i - b)"""
    count = len(context.experts)
    nearest = weighted([float(_ratio(known_gram(context))) / count] * count)
    if not context.parameters["filter_wise"] or context.surveyed is None:
        return nearest
    ratios = _ratio(context.surveyed)
    weights = np.repeat(ratios[:, None] / count, count, axis=1)
    grouped = GroupedSum.of(weights, np.ones(ratios.size), context.columns, by_rows=True)
    return grouped.rule(nearest)


def _survey(context: TensorContext) -> Survey:
    return RowGram(context) if context.parameters["filter_wise"] else Gram(context)


MODEL_STOCK: Final = Method(
    "model_stock",
    "the average of the experts, drawn back to the base as far as they disagree",
    "Model Stock, arXiv 2403.19522",
    (Parameter("filter_wise", False, "take each row by itself, instead of the whole tensor"),),
    _model_stock,
    needs=Needs.SURVEY,
    survey=_survey,
    models=(2, None),
)
