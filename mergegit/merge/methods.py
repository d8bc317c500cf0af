"""The methods by which experts are merged.

A method turns its parameters, and what the statistics say of one tensor, into the coefficients of
the one sum that all of them are (mergegit.kernels.combine). It never sees what was read: under a
budget the method is applied to the deltas as far as they were read, and neither thresholds nor
weights move with the budget.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from blake3 import blake3

from mergegit.errors import BadRecipe
from mergegit.kernels.combine import ALWAYS, Coefficients
from mergegit.statistics import Histogram

Value = float | bool
Parameters = Mapping[str, Value]


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a method: its default, its bounds, and whether each expert has its own.

    ``low`` and ``high`` are included, but ``low`` with ``open_low``.
    """

    name: str
    default: Value
    help: str
    per_expert: bool = False
    low: float = -math.inf
    high: float = math.inf
    open_low: bool = False

    def check(self, value: Value, of: str) -> Value:
        """``value`` in the parameter's type. Raises ``BadRecipe``."""
        wants_bool = isinstance(self.default, bool)
        if isinstance(value, bool) != wants_bool:
            kind = "true or false" if wants_bool else "a number"
            raise BadRecipe(f"{of} is {value!r}, not {kind}", hint=f"{self.name}: {self.help}")
        if wants_bool:
            return value
        number = float(value)
        below = number <= self.low if self.open_low else number < self.low
        if math.isnan(number) or math.isinf(number) or below or number > self.high:
            bounds = f"{'more than' if self.open_low else 'at least'} {self.low:g}"
            if math.isinf(self.low):
                bounds = "finite"
            elif math.isfinite(self.high):
                bounds += f" and at most {self.high:g}"
            raise BadRecipe(f"{of} is {number:g}; it must be {bounds}", hint=self.help)
        return number


@dataclass(frozen=True, slots=True)
class ExpertTensor:
    """What a method may know of one expert's tensor.

    ``histogram`` is None where the tensor is the base's own. ``key`` names the expert's contents
    for the random methods.
    """

    parameters: Parameters
    histogram: Histogram | None
    key: bytes


@dataclass(frozen=True, slots=True)
class TensorContext:
    """One tensor that is merged: its name, its number of elements, the recipe's parameters."""

    name: str
    elements: int
    parameters: Parameters
    seed: int
    experts: Sequence[ExpertTensor]


@dataclass(frozen=True, slots=True)
class Method:
    """A method: what it is called, what it takes, and how it becomes coefficients.

    ``additive`` is true where the merged delta is a fixed linear combination of the experts'
    deltas, so that errors of reading add up and can be predicted. ``trims`` is true where
    magnitudes decide what is kept. ``flips`` is how much error turned thresholds and votes add, as
    measured on even and uneven families (docs/planning.md).
    """

    name: str
    summary: str
    paper: str
    parameters: tuple[Parameter, ...]
    coefficients: Callable[[TensorContext], Coefficients]
    additive: bool = False
    trims: bool = False
    flips: float = 0.0

    def parameter(self, name: str) -> Parameter:
        for parameter in self.parameters:
            if parameter.name == name:
                return parameter
        known = ", ".join(parameter.name for parameter in self.parameters)
        raise BadRecipe(
            f"method {self.name} has no parameter {name!r}", hint=f"its parameters are {known}"
        )


def method(name: str) -> Method:
    """The method of a name. Raises ``BadRecipe``."""
    try:
        return METHODS[name]
    except KeyError:
        raise BadRecipe(
            f"there is no method {name!r}", hint=f"methods are {', '.join(METHODS)}"
        ) from None


_WEIGHT = Parameter("weight", 1.0, "how much of the expert's delta is added", per_expert=True)
_DENSITY = Parameter(
    "density", 1.0, "share of the expert's elements that is kept",
    per_expert=True, low=0.0, high=1.0,
)  # fmt: skip
_KEEP = Parameter(
    "density", 1.0, "probability of keeping an element",
    per_expert=True, low=0.0, high=1.0, open_low=True,
)  # fmt: skip
_LAMBDA = Parameter("lambda", 1.0, "factor on the merged delta")
_RESCALE = Parameter("rescale", True, "divide what is kept by its density")


def _normalize(default: bool) -> Parameter:
    return Parameter("normalize", default, "divide by the sum of the weights")


def _array(values: Sequence[Value]) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return np.array(values, np.float32)


def _plain(context: TensorContext) -> Coefficients:
    """Weights alone: nothing trimmed, nothing drawn."""
    count = len(context.experts)
    return Coefficients(
        weights=_array([expert.parameters["weight"] for expert in context.experts]),
        scales=np.ones(count, np.float32),
        thresholds=np.zeros(count, np.float32),
        keep=np.full(count, ALWAYS, np.uint64),
        keys=np.zeros(count, np.uint64),
        factor=float(context.parameters.get("lambda", 1.0)),
        normalize=bool(context.parameters["normalize"]),
    )


def _linear(context: TensorContext) -> Coefficients:
    plain = _plain(context)
    total = float(np.sum(plain.weights, dtype=np.float32))
    divides = plain.normalize and abs(total) >= 1e-8
    return replace(plain, base_scale=1.0 if divides else total)


def _ties(context: TensorContext) -> Coefficients:
    plain = _plain(context)
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
    return replace(plain, thresholds=_array(thresholds), scales=_array(scales), elect=True)


def _dare(context: TensorContext, *, elect: bool) -> Coefficients:
    densities = [float(expert.parameters["density"]) for expert in context.experts]
    scales = [1.0 / p if context.parameters["rescale"] else 1.0 for p in densities]
    return replace(
        _plain(context),
        scales=_array(scales),
        keep=np.array([round(p * ALWAYS) for p in densities], np.uint64),
        keys=np.array(
            [stream_key(context.seed, expert.key, context.name) for expert in context.experts],
            np.uint64,
        ),
        elect=elect,
    )


def _dare_linear(context: TensorContext) -> Coefficients:
    return _dare(context, elect=False)


def _dare_ties(context: TensorContext) -> Coefficients:
    return _dare(context, elect=True)


def stream_key(seed: int, expert: bytes, tensor: str) -> int:
    """The key of an expert's random stream for one tensor, 64 bits.

    It depends on the recipe's seed, the expert's contents and the tensor's name alone, so that an
    element's fate is the same whatever else is merged, read or run beside it.
    """
    text = b"%d\n%s\n%s" % (seed, expert, tensor.encode())
    return int.from_bytes(blake3(text).digest(8), "little")


METHODS: Final[dict[str, Method]] = {
    method.name: method
    for method in (
        Method(
            "linear",
            "weighted average of the experts",
            "Model soups, arXiv 2203.05482",
            (_WEIGHT, _normalize(True)),
            _linear,
            additive=True,
        ),
        Method(
            "task_arithmetic",
            "base plus the weighted sum of the deltas",
            "Editing models with task arithmetic, arXiv 2212.04089",
            (_WEIGHT, _normalize(False), _LAMBDA),
            _plain,
            additive=True,
        ),
        Method(
            "ties",
            "trim small deltas, elect a sign per element, average those that agree",
            "TIES-Merging, arXiv 2306.01708",
            (
                _WEIGHT,
                _DENSITY,
                _normalize(True),
                _LAMBDA,
                Parameter("rescale", False, "scale what is kept to the L1 norm of the whole"),
            ),
            _ties,
            trims=True,
            flips=0.7,
        ),
        Method(
            "dare_linear",
            "drop deltas at random, rescale the rest, add them up",
            "DARE, arXiv 2311.03099",
            (_WEIGHT, _KEEP, _normalize(False), _LAMBDA, _RESCALE),
            _dare_linear,
            additive=True,
        ),
        Method(
            "dare_ties",
            "drop deltas at random, rescale the rest, elect a sign per element",
            "DARE, arXiv 2311.03099, with the election of TIES",
            (_WEIGHT, _KEEP, _normalize(False), _LAMBDA, _RESCALE),
            _dare_ties,
            flips=0.3,
        ),
    )
}
