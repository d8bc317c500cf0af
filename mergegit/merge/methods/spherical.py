"""Averages along arcs instead of chords: slerp and its kin, for two models and for more.

All of them are sums c_i e_i of models, or c_i d_i of deltas, whose coefficients follow from the
lengths of the vectors and the angles between them. With e_i = b + d_i, a sum of models is
(sum c_i) b + sum c_i d_i. Vectors without a direction, such as a delta of zeros, leave nothing to
follow an arc to: two of which one is such are averaged along the chord.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from mergegit.kernels.combine import Coefficients
from mergegit.merge.directions import Directions, known_gram
from mergegit.merge.grouped import GroupedSum
from mergegit.merge.method import (
    Doubles,
    Merges,
    Method,
    Needs,
    Parameter,
    Rule,
    Survey,
    TensorContext,
    weighted,
)
from mergegit.merge.surveys import ColumnGram, Gram, RowGram

_NEARLY_PARALLEL: Final = 0.9995
"""Slerp goes along the chord where the cosine is beyond this, either way."""

_SMALLEST_SINE: Final = 2.0**-12
"""Nuslerp goes along the chord where the angle's sine is no more than this: float32 can't tell its
cosine from one, or arc from chord, and between opposite vectors there is no shortest arc."""

_LEAST_LENGTH: Final = 1e-7
"""Sums of unit vectors that are shorter than this are rounding errors of float64."""

_PART: Final = Parameter("weight", 1.0, "the model's part in the average", per_expert=True)
_DELTAS: Final = Parameter("deltas", False, "average deltas from the base instead of whole models")


def _as_float32(scale: float) -> float:
    """The scale that the merge uses: what float32 can't tell from one keeps the base as it is."""
    return float(np.float32(scale))


@dataclass(frozen=True, slots=True)
class _Arc:
    """Coefficients of the two ends of an arc, each a number or one for every group."""

    first: Doubles
    second: Doubles
    base_scale: Doubles

    @classmethod
    def at(cls, t: float, apart: Doubles, straight: npt.NDArray[np.bool_], *, deltas: bool) -> _Arc:
        """The point at ``t`` of the arc between two vectors (Shoemake 1985, p. 248):

            sin((1 - t) a) / sin a,  sin(t a) / sin a

        where ``apart`` is the squared distance of the unit vectors, so that sin(a / 2) is half its
        root. Where ``straight``, the point at ``t`` of the chord.
        """
        angle = 2.0 * np.arcsin(np.sqrt(apart) / 2.0)
        sine = np.where(straight, 1.0, np.sqrt(apart * (1.0 - apart / 4.0)))
        first = np.where(straight, 1.0 - t, np.sin((1.0 - t) * angle) / sine)
        second = np.where(straight, t, np.sin(t * angle) / sine)
        keeps = np.logical_or(straight, deltas)
        return cls(first, second, np.where(keeps, 1.0, first + second))

    def coefficients(self) -> Coefficients:
        return weighted(
            [float(self.first), float(self.second)], base_scale=_as_float32(float(self.base_scale))
        )


def _slerp(context: TensorContext) -> Coefficients:
    apart = Directions.of(known_gram(context), deltas=False).apart[0, 1]
    straight = np.abs(1.0 - apart / 2.0) > _NEARLY_PARALLEL
    return _Arc.at(context.number("t"), apart, straight, deltas=False).coefficients()


SLERP: Final = Method(
    "slerp",
    "the point at t of the arc from the first model to the second",
    "Shoemake, Animating rotation with quaternion curves, 1985",
    (Parameter("t", None, "where on the arc: 0 is the first model, 1 the second"),),
    _slerp,
    needs=Needs.SURVEY,
    survey=Gram,
    models=(2, 2),
    merges=Merges.FROM_FIRST,
)


def _nuslerp(context: TensorContext) -> Rule:
    deltas = bool(context.parameters["deltas"])
    first, second = context.numbers("weight")
    total = first + second
    t = second / total if abs(total) >= 1e-6 else 0.5
    nearest = _nuslerp_arc(t, known_gram(context), deltas=deltas).coefficients()
    grouping = _grouping(context)
    if grouping is None or context.surveyed is None:
        return nearest
    arc = _nuslerp_arc(t, context.surveyed, deltas=deltas)
    weights = np.stack([arc.first, arc.second], axis=-1)
    grouped = GroupedSum.of(weights, arc.base_scale, grouping.columns, by_rows=grouping.by_rows)
    return grouped.rule(nearest)


def _nuslerp_arc(t: float, gram: Doubles, *, deltas: bool) -> _Arc:
    apart = Directions.of(gram, deltas=deltas).apart[..., 0, 1]
    straight = apart * (1.0 - apart / 4.0) <= _SMALLEST_SINE**2
    return _Arc.at(t, apart, straight, deltas=deltas)


@dataclass(frozen=True, slots=True)
class _Grouping:
    """How a tensor is cut into vectors of its own: by rows along its last axis, or into columns
    along its first."""

    columns: int
    by_rows: bool


def _grouping(context: TensorContext) -> _Grouping | None:
    """None where the tensor is one vector: where that is asked, and where it is one."""
    if context.parameters["nuslerp_flatten"] or len(context.shape) < 2:
        return None
    if context.parameters["nuslerp_row_wise"]:
        return _Grouping(int(np.prod(context.shape[1:])), by_rows=False)
    return _Grouping(context.columns, by_rows=True)


def _nuslerp_survey(context: TensorContext) -> Survey:
    grouping = _grouping(context)
    if grouping is None:
        return Gram(context)
    if grouping.by_rows:
        return RowGram(context)
    return ColumnGram(replace(context, shape=(context.shape[0], grouping.columns)))


NUSLERP: Final = Method(
    "nuslerp",
    "the point of the arc between two models, or two deltas, that their weights give",
    "no paper; known from mergekit",
    (
        _PART,
        Parameter("nuslerp_flatten", True, "take each tensor as one vector"),
        Parameter(
            "nuslerp_row_wise", False,
            "unless flattened: take each column as a vector instead of each row",
        ),
        _DELTAS,
    ),
    _nuslerp,
    needs=Needs.SURVEY,
    survey=_nuslerp_survey,
    models=(2, 2),
    merges=Merges.EITHER,
)  # fmt: skip


def _unit_length(parts: Doubles, apart: Doubles) -> float:
    """The length of sum parts_i u_i, for unit vectors u_i that are ``apart``.

    With u_i . u_j = 1 - apart_ij / 2 its square is (sum parts)^2 - parts' apart parts / 2, in which
    nothing cancels as long as all parts have one sign and no vectors are opposite.
    """
    total = float(parts.sum())
    return float(np.sqrt(max(total**2 - float(parts @ apart @ parts) / 2.0, 0.0)))


def _multislerp(context: TensorContext) -> Coefficients:
    """The weighted mean direction, as long as the weighted mean of the lengths:

        (sum w_i |v_i|) m / |m|,  m = sum w_i v_i / |v_i|

    The method is described as a step from m / |m| through the tangent space there, by the weighted
    sum of the vectors' projections on it. That sum is zero, for m has no part in the tangent space.
    """
    deltas = bool(context.parameters["deltas"])
    weights = np.array(context.numbers("weight"))
    total = float(weights.sum())
    if context.parameters["normalize_weights"] and abs(total) >= 1e-8:
        weights = weights / total
    found = Directions.of(known_gram(context), deltas=deltas)
    parts = np.where(found.lengths > 0, weights, 0.0)
    length = _unit_length(parts, found.apart)
    least = max(context.number("eps"), _LEAST_LENGTH) * float(np.abs(parts).sum())
    if length <= least:
        return _sum_of(weights, deltas=deltas)
    return _sum_of(_of_length(float(weights @ found.lengths), parts / length, found), deltas=deltas)


def _of_length(length: float, parts: Doubles, found: Directions) -> Doubles:
    """The coefficients of the vectors in ``length`` times the sum of parts of their directions."""
    lengths = np.where(found.lengths > 0, found.lengths, 1.0)
    coefficients: Doubles = length * parts / lengths
    return coefficients


def _sum_of(coefficients: Sequence[float] | Doubles, *, deltas: bool) -> Coefficients:
    scale = 1.0 if deltas else _as_float32(float(np.sum(coefficients)))
    return weighted([float(c) for c in coefficients], base_scale=scale)


MULTISLERP: Final = Method(
    "multislerp",
    "the weighted mean direction of models or deltas, as long as they are on average",
    "no paper; Goddard, Multi-SLERP, goddard.blog/posts/multislerp-wow-what-a-cool-idea",
    (
        _PART,
        Parameter("normalize_weights", True, "divide the weights by their sum"),
        Parameter("eps", 1e-8, "share of the weights below which a mean has no direction", low=0.0),
        _DELTAS,
    ),
    _multislerp,
    needs=Needs.SURVEY,
    survey=Gram,
    merges=Merges.EITHER,
)


def _karcher(context: TensorContext) -> Coefficients:
    """The mean of the directions on the sphere, as long as the vectors are on average."""
    found = Directions.of(known_gram(context), deltas=False)
    count = len(context.experts)
    here = (found.lengths > 0).astype(np.float64)
    if not here.any():
        return _sum_of(np.full(count, 1.0 / count), deltas=False)
    mean = _karcher_mean(
        here / here.sum(), found.apart, int(context.number("max_iter")), context.number("tol")
    )
    return _sum_of(_of_length(float(found.lengths.mean()), mean, found), deltas=False)


def _karcher_mean(shares: Doubles, apart: Doubles, steps: int, tolerance: float) -> Doubles:
    """The unit vector m whose logarithms of the u_i sum to nothing, as parts of the u_i.

    The fixed-point iteration of Karcher's mean: with a_i the angle between m and u_i,

        T = sum shares_i a_i / sin a_i (u_i - cos a_i m)
        m := cos |T| m + sin |T| T / |T|

    from the Euclidean mean, until |T| is below ``tolerance``. What lies opposite to m draws it in
    no direction, and where all directions balance, the first of them is the mean.
    """
    length = _unit_length(shares, apart)
    mean = shares / length if length > _LEAST_LENGTH else _first(shares)
    for _ in range(steps):
        # |u_i - m|^2 = (1 - sum m)^2 + (apart m)_i - m' apart m / 2
        reach = apart @ mean
        squares = (1.0 - mean.sum()) ** 2 + reach - mean @ reach / 2.0
        squares = np.clip(squares, 0.0, 4.0)
        angles = 2.0 * np.arcsin(np.sqrt(squares) / 2.0)
        sines = np.sqrt(squares * (1.0 - squares / 4.0))
        draws = (angles >= tolerance) & (sines > _LEAST_LENGTH)
        pulls = np.where(draws, shares * angles / np.where(draws, sines, 1.0), 0.0)
        tangent = pulls - float(pulls @ (1.0 - squares / 2.0)) * mean
        step = _unit_length(tangent, apart)
        if step < tolerance or step == 0.0:
            break
        mean = np.cos(step) * mean + np.sin(step) / step * tangent
        mean = mean / _unit_length(mean, apart)
    return mean


def _first(shares: Doubles) -> Doubles:
    chosen = np.zeros_like(shares)
    chosen[int(np.argmax(shares > 0))] = 1.0
    return chosen


KARCHER: Final = Method(
    "karcher",
    "the mean of the models' directions on the sphere, as long as they are on average",
    "Karcher mean, arXiv 2603.04972",
    (
        Parameter("max_iter", 10.0, "at most so many steps are taken", low=0.0),
        Parameter("tol", 1e-5, "steps and angles smaller than this, in radians, count as none",
                  low=0.0),
    ),
    _karcher,
    needs=Needs.SURVEY,
    survey=Gram,
    merges=Merges.MODELS,
)  # fmt: skip
