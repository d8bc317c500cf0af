"""What a merge method is: the contract between the methods and what plans and executes them.

A method turns its parameters, and what is known of one tensor, into a ``Rule``: the coefficients of
the one weighted sum that most methods are (mergegit.kernels.combine), or a function of bands of
the tensor. It never sees what was left unread: under a budget the method is applied to the deltas
as far as they were read, and neither thresholds nor weights from statistics move with the budget.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from mergegit.errors import BadRecipe
from mergegit.kernels.combine import ALWAYS, Coefficients
from mergegit.kernels.floats import Floats
from mergegit.merge.settings import Scalar
from mergegit.statistics import Histogram

Doubles = npt.NDArray[np.float64]
Parameters = Mapping[str, Scalar]


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a method: its default, its bounds, and whether each expert has its own.

    Without a default it must be given. ``low`` and ``high`` are included, but ``low`` with
    ``open_low``.
    """

    name: str
    default: float | bool | None
    help: str
    per_expert: bool = False
    low: float = -math.inf
    high: float = math.inf
    open_low: bool = False

    @property
    def is_switch(self) -> bool:
        return isinstance(self.default, bool)

    def check(self, value: Scalar, of: str) -> Scalar:
        """``value`` in the parameter's type. Raises ``BadRecipe``."""
        if isinstance(value, bool) != self.is_switch or isinstance(value, str):
            kind = "true or false" if self.is_switch else "a number"
            raise BadRecipe(f"{of} is {value!r}, not {kind}", hint=f"{self.name}: {self.help}")
        if self.is_switch:
            return value
        value = float(value)
        below = value <= self.low if self.open_low else value < self.low
        if math.isnan(value) or math.isinf(value) or below or value > self.high:
            bounds = f"{'more than' if self.open_low else 'at least'} {self.low:g}"
            if math.isinf(self.low):
                bounds = "finite" if math.isinf(self.high) else f"at most {self.high:g}"
            elif math.isfinite(self.high):
                bounds += f" and at most {self.high:g}"
            raise BadRecipe(f"{of} is {value:g}; it must be {bounds}", hint=self.help)
        return value


@dataclass(frozen=True, slots=True)
class ExpertTensor:
    """What a method may know of one expert's tensor.

    ``parameters`` are the expert's own, as they apply to this tensor. ``histogram`` is None where
    the tensor is the base's own. ``key`` names the expert's contents for the random methods, and
    ``energy`` is the sum of the squares of its delta, from statistics.
    """

    parameters: Parameters
    histogram: Histogram | None
    key: bytes
    energy: float = 0.0


@dataclass(frozen=True, slots=True)
class TensorContext:
    """One tensor that is merged, and the experts that take part in it, K of them.

    ``parameters`` are the recipe's, as they apply to this tensor. ``depth`` is how deep it lies:
    0 for embeddings and the first layer, 1 for the last layer and the head; ``in_layers`` tells
    whether it belongs to a layer. ``surveyed`` is what the method's survey found in what was
    read, None before it has been made. ``gram`` (K + 1, K + 1) are the inner products of the base
    and the deltas, the base first, as estimated from statistics: the products of deltas from
    sketches, and a base so large that they are small beside it. It serves planning alone.
    """

    name: str
    shape: tuple[int, ...]
    parameters: Parameters
    seed: int
    experts: Sequence[ExpertTensor]
    gram: Doubles = field(default_factory=lambda: np.zeros((1, 1)))
    surveyed: Any = None
    depth: float = 0.0
    in_layers: bool = True

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def columns(self) -> int:
        """Elements of a row: a row is a run along the last axis; a vector is one row."""
        return self.shape[-1] if self.shape else 1

    def number(self, name: str) -> float:
        return float(self.parameters[name])

    def numbers(self, name: str) -> list[float]:
        """A parameter's value for each expert."""
        return [float(expert.parameters[name]) for expert in self.experts]


@dataclass(frozen=True, slots=True)
class Band:
    """A run of a tensor's elements: ``base`` (n) and the experts' ``deltas`` (K, n), float32.

    ``first`` is the index of its first element in the tensor. ``threads`` is how many threads may
    work on it: more than one where it is the whole tensor, and nothing else is there to do.
    """

    base: Floats
    deltas: Floats
    first: int
    threads: int = 1


class Unit(enum.Enum):
    """What a band must hold whole."""

    ELEMENT = "elements"
    ROW = "rows"
    TENSOR = "the tensor"


class Survey(Protocol):
    """A first pass over a tensor, by bands of whole elements (mergegit.merge.surveys).

    ``measure`` may be called by several threads and in any order; ``add`` is called with what it
    returned, in the bands' order, so that sums are the same for any number of threads.
    """

    def measure(self, band: Band) -> Any: ...

    def add(self, measured: Any) -> None: ...

    def finish(self) -> Any:
        """What is known now; without a band, what is known of a tensor without deltas."""


@dataclass(frozen=True, slots=True)
class Banded:
    """A merge that is not one weighted sum.

    ``apply`` gives the merged elements of a band, in float32, unrounded; where all deltas of a
    band are zero and ``nearest`` keeps the base, it is not called. It may be called with bands in
    any order, by several threads. ``unit`` is what it needs whole: with rows and tensors, memory
    holds the base and K deltas of so much in float32. ``nearest`` is the sum that the merge comes
    nearest to, by which planning counts what an expert's error does.
    """

    apply: Callable[[Band], Floats]
    nearest: Coefficients
    unit: Unit = Unit.ELEMENT


Rule = Coefficients | Banded


class Merges(enum.Enum):
    """What a method merges, and what a named base is to it."""

    DELTAS = "what experts changed of their base"
    MODELS = "whole models; a base that is named is one more of them"
    FROM_FIRST = "whole models, seen from the first; a base that is named is the first"
    EITHER = "whole models, or their deltas where a base is named"


class Needs(enum.Enum):
    """What a method needs to know beyond the elements themselves."""

    ELEMENTS = "each element by itself"
    STATISTICS = "statistics taken when experts are added"
    SURVEY = "a first pass over the tensor"
    ROWS = "whole rows"
    TENSOR = "the whole tensor"


@dataclass(frozen=True, slots=True)
class Method:
    """A method: what it is called, what it takes, and how it becomes a rule.

    ``survey``, where there is one, makes the first pass that a tensor needs before its rule is
    known, or None where its parameters need none. ``models`` is how many models it merges at
    least and at most (None: any number), and ``merges`` what of them. Where that is whole models
    no base need be named: deltas from any common model serve. ``EITHER`` methods have a parameter
    ``deltas``, which is true where a base is named.

    ``copies``, given the experts' parameters and those for all, tells whether a tensor of the one
    expert is taken as it is, without being read. ``additive`` is true where the merged delta is a
    fixed linear combination of the experts' deltas, so that errors of reading add up and can be
    predicted. ``trims`` is true where magnitudes decide what is kept. ``flips`` is how much error
    turned thresholds and votes add, as measured on even and uneven families (docs/planning.md).
    """

    name: str
    summary: str
    paper: str
    parameters: tuple[Parameter, ...]
    rule: Callable[[TensorContext], Rule]
    needs: Needs = Needs.ELEMENTS
    survey: Callable[[TensorContext], Survey | None] | None = None
    models: tuple[int, int | None] = (1, None)
    merges: Merges = Merges.DELTAS
    copies: Callable[[Sequence[Parameters], Parameters], bool] | None = None
    additive: bool = False
    trims: bool = False
    flips: float = 0.0

    def parameter(self, name: str) -> Parameter:
        for parameter in self.parameters:
            if parameter.name == name:
                return parameter
        known = ", ".join(parameter.name for parameter in self.parameters) or "none"
        raise BadRecipe(
            f"method {self.name} has no parameter {name!r}", hint=f"its parameters are {known}"
        )

    def coefficients(self, context: TensorContext) -> Coefficients:
        """The sum that the merge is, or comes nearest to."""
        rule = self.rule(context)
        return rule if isinstance(rule, Coefficients) else rule.nearest


WEIGHT: Final = Parameter("weight", 1.0, "how much of the expert's delta is added", per_expert=True)
LAMBDA: Final = Parameter("lambda", 1.0, "factor on the merged delta")
LINES: Final = Parameter(
    "lines", 0.0, "how much more lambda the deepest layer gets than the first (LiNeS)"
)
DEPTH_SCALED: Final = (LAMBDA, LINES)
"""Parameters of every method whose merged delta is scaled; see ``factor``."""


def normalize(default: bool) -> Parameter:
    return Parameter("normalize", default, "divide by the sum of the weights")


def factor(context: TensorContext) -> float:
    """What the merged delta is multiplied by: lambda, growing linearly with depth by ``lines``.

    LiNeS (arXiv 2410.17146) scales layer l of L by alpha + beta (l - 1) / (L - 1): here alpha is
    lambda and beta is ``lines``. Embeddings count as the first layer, the head as the last.
    """
    return context.number("lambda") + context.number("lines") * context.depth


def floats(values: Sequence[float]) -> Floats:
    return np.array(values, np.float32)


def weighted(
    weights: Sequence[float],
    *,
    base_scale: float = 1.0,
    factor: float = 1.0,
    normalize: bool = False,
) -> Coefficients:
    """The plain weighted sum: nothing trimmed, nothing drawn, nothing elected."""
    count = len(weights)
    return Coefficients(
        weights=floats(weights),
        scales=np.ones(count, np.float32),
        thresholds=np.zeros(count, np.float32),
        keep=np.full(count, ALWAYS, np.uint64),
        keys=np.zeros(count, np.uint64),
        base_scale=base_scale,
        factor=factor,
        normalize=normalize,
    )


def plain(context: TensorContext) -> Coefficients:
    """The experts' deltas by their weights, divided where the recipe normalises."""
    return weighted(
        context.numbers("weight"),
        factor=factor(context) if "lambda" in context.parameters else 1.0,
        normalize=bool(context.parameters.get("normalize", False)),
    )
