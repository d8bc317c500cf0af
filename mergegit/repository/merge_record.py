"""A merge, as its commit remembers it: what its recipe and its plan say of each tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from mergegit.kernels.combine import ALWAYS, Coefficients
from mergegit.merge.method import Parameters
from mergegit.merge.recipe import Recipe, resolved
from mergegit.objects import Commit, CommitId, Plan, Tensor, TensorId
from mergegit.repository.figures import Figure
from mergegit.repository.known import Doubles, Knowledge, Known, apart
from mergegit.repository.moving import Pair
from mergegit.repository.planning import LAYERS, Inputs, Part, context_of
from mergegit.statistics import SKETCH_BUCKETS, TensorStatistics
from mergegit.storage.store import Store

Gather = Callable[[Recipe], Inputs]
"""How a recipe's models are loaded and matched (``mergegit.repository.planning.gather``)."""


@dataclass(frozen=True, slots=True)
class BlocksRead:
    """How far the blocks of an expert's tensor were read.

    ``whole`` were read with all of their layers, ``partly`` gives for a number of layers how many
    blocks were read so far. ``unread`` were left out by the budget, ``free`` are the base's own or
    count with a weight of zero.
    """

    whole: int
    partly: Mapping[int, int]
    unread: int
    free: int


@dataclass(frozen=True, slots=True)
class Share:
    """What an expert gave to one merged tensor.

    ``name`` and ``tensor`` are the tensor's in the expert, None where it lacks it; ``base`` is the
    tensor that its delta was taken from: the merge's base's, or that of a base of its own.
    ``parameters`` are the expert's own as they apply here. ``weight`` is what its delta is
    multiplied by, lambda and normalisation included, in expectation where elements are dropped at
    random; ``gain`` squared is what its energy is multiplied by. ``known`` is the fraction of its
    delta's energy that was read, None without statistics.
    """

    expert: int
    name: str
    tensor: TensorId | None
    base: TensorId
    parameters: Parameters
    weight: float
    gain: float
    read: BlocksRead
    known: float | None
    statistics: TensorStatistics | None


@dataclass(frozen=True, slots=True)
class MergedTensor:
    """One tensor of a merge.

    ``base`` and ``base_name`` are the base's tensor that deltas were taken from. ``parameters``
    are those that hold for all experts. ``caveat`` says why the weights do not tell all, None
    where the merged tensor is the base plus the deltas by their weights, up to one rounding.
    """

    base: TensorId
    base_name: str
    parameters: Parameters
    shares: tuple[Share, ...]
    keeps_base: bool
    caveat: str | None


class MergeRecord:
    """A merge commit with its recipe, its plan and its models' objects; no weights."""

    def __init__(self, store: Store, commit: Commit, gather: Gather) -> None:
        assert commit.recipe is not None
        assert commit.plan is not None
        self.plan: Plan = store.plan(commit.plan)
        self.recipe = Recipe.from_json(commit.recipe)
        self.inputs: Inputs = gather(self.recipe)
        self._store = store
        self._starts: dict[str, int] = {}
        at = 0
        for name in self.plan.tensors:
            self._starts[name] = at
            at += len(self.inputs.base.tensors[name])

    @classmethod
    def of(cls, store: Store, commit_id: CommitId, gather: Gather) -> MergeRecord | None:
        """The record of a merge; None of any other commit."""
        commit = store.commit(commit_id)
        if commit.recipe is None or commit.plan is None:
            return None
        return cls(store, commit, gather)

    def is_merged(self, name: str) -> bool:
        return name in self._starts

    def why_kept(self, name: str) -> str | None:
        """Why a tensor is the base's, or leaves out some of the experts."""
        return self.plan.kept.get(name)

    def copied_from(self, name: str) -> tuple[int, str] | None:
        """The expert, and its tensor, that a tensor was taken from as it is."""
        if name not in self.inputs.copied:
            return None
        expert = self.inputs.part(name).experts[0]
        return expert, self.inputs.experts[expert].own_name(name)

    def base_of(self, name: str) -> tuple[str, TensorId]:
        """The base's tensor that is seen as one of the merged model's."""
        return self.inputs.base.own_name(name), self.inputs.base.ids[name]

    def tensor(self, name: str) -> MergedTensor:
        """What the recipe and the plan say of a merged tensor."""
        inputs, part = self.inputs, self.inputs.part(name)
        statistics = self._statistics(name, part)
        context = context_of(inputs, name, statistics)
        coefficients = self.recipe.method.coefficients(context)
        base_name, base = self.base_of(name)
        shares = tuple(
            self._share(name, k, context.experts[at].parameters, coefficients, at, statistics[at])
            for at, k in enumerate(part.experts)
        )
        parameters = resolved(part.shared, name, inputs.places[name].position)
        return MergedTensor(
            base, base_name, parameters, shares, coefficients.keeps_base, self._caveat(coefficients)
        )

    def change(self, name: str, knowledge: Knowledge) -> Known | None:
        """What is known of a merged tensor's change from the base; None where it is no sum.

        A delta that was read in part is, of all vectors that look like what was read, the mean: of
        its energy the fraction f is there, and its product with any other delta is f times the
        whole one's. What rounding adds is as uncertain as it is large.
        """
        if not self.is_merged(name):
            return None
        merged = self.tensor(name)
        if not self.recipe.method.additive or not merged.keeps_base:
            return None
        shares = [share for share in merged.shares if share.tensor not in (None, share.base)]
        if any(share.statistics is None for share in shares):
            return None
        base = self.inputs.base.tensors[name]
        dtype = self.recipe.dtype or base.dtype
        if not shares and dtype == base.dtype:
            return Known.nothing(base.elements, len(base))
        size = knowledge.size(merged.base, base.elements, len(base))
        rounding = _rounding(dtype) * size.energy.value if size is not None else 0.0
        if dtype == base.dtype:  # else the base's own elements are rounded, too
            changed = sum(int(one.nonzero.sum()) for one in _statistics_of(shares))
            rounding *= min(changed / max(base.elements, 1), 1.0)
        return _sum_of(shares, base.elements, rounding)

    def _statistics(self, name: str, part: Part) -> list[TensorStatistics | None]:
        found: list[TensorStatistics | None] = []
        for k in part.experts:
            pair, data = self._pair(k, name), None
            if pair is not None and pair.tensor_id != pair.base_id:
                data = self._store.read_statistics(pair.tensor_id, pair.base_id)
            found.append(None if data is None else TensorStatistics.from_bytes(data))
        return found

    def _pair(self, k: int, name: str) -> Pair | None:
        """An expert's tensor and what its delta was taken from; None where it lacks it."""
        return self.inputs.pair(k, name) if name in self.inputs.experts[k].tensors else None

    def _share(
        self,
        name: str,
        k: int,
        parameters: Parameters,
        coefficients: Coefficients,
        at: int,
        statistics: TensorStatistics | None,
    ) -> Share:
        weight = float(coefficients.amplitudes[at])
        pair = self._pair(k, name)
        read, known = self._read(name, k, weight, statistics)
        return Share(
            expert=k,
            name=self.inputs.experts[k].own_name(name),
            tensor=pair.tensor_id if pair is not None else None,
            base=pair.base_id if pair is not None else self.inputs.base.ids[name],
            parameters=parameters,
            weight=weight,
            gain=float(coefficients.spreads[at]),
            read=read,
            known=known,
            statistics=statistics,
        )

    def _read(
        self, name: str, k: int, weight: float, statistics: TensorStatistics | None
    ) -> tuple[BlocksRead, float | None]:
        """How far an expert's blocks were read, and the fraction of the delta's energy in that."""
        pair = self._pair(k, name)
        tensor = pair.tensor if pair is not None else None
        base = pair.base if pair is not None else self.inputs.base.tensors[name]
        start = self._starts[name]
        layers = np.frombuffer(self.plan.experts[k].layers, np.uint8)[start : start + len(base)]
        depths = self._depths(k, tensor, base, layers)
        unread = free = whole = 0
        partly: dict[int, int] = {}
        left = np.zeros(len(base))
        for index in range(len(base)):
            same = tensor is None or (
                tensor.dtype == base.dtype and tensor.block(index) == base.block(index)
            )
            here = int(layers[index])
            if same or weight == 0.0:
                free += 1
            elif here == 0:
                unread += 1
            elif here >= depths[index]:
                whole += 1
            else:
                partly[here] = partly.get(here, 0) + 1
            if statistics is not None and here < depths[index]:
                energies = (statistics.energy[index], *statistics.remaining[index])
                left[index] = energies[here]
        read = BlocksRead(whole, dict(sorted(partly.items())), unread, free)
        if statistics is None:
            return read, 1.0 if tensor is None or not unread + whole + len(partly) else None
        energy = float(statistics.energy.sum())
        return read, 1.0 - float(left.sum()) / energy if energy else 1.0

    def _depths(
        self, k: int, tensor: Tensor | None, base: Tensor, layers: npt.NDArray[np.uint8]
    ) -> list[int]:
        """How many layers each block had. A plan does not say; where it read none or all of them
        that is clear, elsewhere it is as many as the block has now."""
        expert = self.plan.experts[k]
        everything = expert.predicted_error == 0.0 and not expert.blocks_skipped
        if tensor is None or everything:
            return [1] * len(base)
        computed = tensor.block(0) in self.inputs.computed if len(tensor) else False
        if computed or not len(tensor):
            return [1] * len(base)
        stored = self._store.forms(tensor.blocks())
        depths = []
        for index in range(len(base)):
            costs = self._store.layer_costs(stored[tensor.block(index)], base.block(index))
            depth = LAYERS if len(costs) == LAYERS else 1
            depths.append(max(depth, int(layers[index])))
        return depths

    def _caveat(self, coefficients: Coefficients) -> str | None:
        method = self.recipe.method
        if not method.additive:
            return f"{method.name} is more than a weighted sum"
        if (coefficients.keep < ALWAYS).any():
            return f"{method.name} drops elements at random; weights are what is left on average"
        if not coefficients.keeps_base:
            return f"the base counts with {coefficients.base_scale:g} and not with 1"
        return None


def _sum_of(shares: list[Share], elements: int, rounding: float) -> Known:
    """What is known of a weighted sum of deltas as far as they were read, and of its rounding."""
    if not shares:
        return Known(elements, Figure(rounding, rounding), np.zeros(SKETCH_BUCKETS), sketched=0.0)
    weights = np.array([share.weight for share in shares])
    gains = np.array([share.gain for share in shares])
    known = np.array([share.known for share in shares], np.float64)
    energies, sketches = _measured(shares)
    u, errors = apart(sketches, energies, elements)
    amplitudes = weights * known * np.sqrt(energies)
    products = np.outer(amplitudes, amplitudes)
    upper = np.triu_indices(len(shares), 1)
    crossed = float(2 * (products * (1.0 - u))[upper].sum())
    sketched = max(float(amplitudes @ amplitudes) + crossed, 0.0)
    energy = max(float((gains**2 * known) @ energies) + crossed, 0.0)
    error = math.sqrt(float(((2 * products * errors)[upper] ** 2).sum()))
    dropped = math.sqrt(sum(map(_dropping, shares)))
    figure = Figure(energy + rounding, math.hypot(error, rounding, dropped))
    return Known(elements, figure, (weights * known) @ sketches, sketched=sketched)


def _dropping(share: Share) -> float:
    """The variance of a delta's energy where its elements are kept with a probability p and scaled
    by 1 / p: of n elements, as spread as normal ones are, it is 3 (1 - p) / (p n) of its square."""
    if share.statistics is None or not share.gain:
        return 0.0
    kept = min((share.weight / share.gain) ** 2, 1.0)
    moved = max(int(share.statistics.nonzero.sum()), 1)
    energy = share.gain**2 * float(share.statistics.energy.sum())
    return 3 * (1 - kept) / (kept * moved) * energy**2


def _statistics_of(shares: list[Share]) -> list[TensorStatistics]:
    return [share.statistics for share in shares if share.statistics is not None]


def _measured(shares: list[Share]) -> tuple[Doubles, Doubles]:
    """Energies (K) and sketches (K, 256) of the deltas."""
    statistics = _statistics_of(shares)
    energies = np.array([float(one.energy.sum()) for one in statistics])
    return energies, np.stack([one.sketch.astype(np.float64) for one in statistics])


_DIGITS: Final = {"BF16": 8, "F16": 11, "F32": 24, "F64": 24, "F8_E4M3": 4, "F8_E5M2": 3}
"""Binary digits of a number of each type; float64 is rounded to float32 by the arithmetic."""


def _rounding(dtype: str) -> float:
    """Energy of the error of rounding values, beside their own.

    With m a value over the power of two below it, its unit in the last place is 2^(1 - digits) / m
    of it, and the error's square a twelfth of the unit's. Leading digits of numbers of many sizes
    are spread evenly on a logarithmic scale: the mean of 1 / m^2 is then 3 / (8 ln 2).
    """
    return float(2.0 ** (2 - 2 * _DIGITS[dtype])) * 3 / (8 * math.log(2) * 12)
