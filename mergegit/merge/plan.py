"""The planner: which layers of which expert blocks a merge reads, under a budget.

A pure function over arrays: no disk, no tensors, no clock. The same problem gives the same plan.

For every (expert, block) there is a *ladder*: each layer costs stored bytes and leaves less of the
delta's energy unread. Reading a layer of an expert with weight w removes w^2 times the energy that
the layer takes away from the squared error of the merged delta. Within the budget, the planner
takes steps in the order of error removed per byte, on the concave hull of each ladder: that is
within one step of the best choice. Tensors so small that they cost nothing come first and whole.
Ties go to the earlier expert, then layer, then block.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from mergegit.encoding import round_error
from mergegit.objects import CommitId, ExpertPlan, Plan

TINY_ELEMENTS: Final = 1 << 14
TINY_SHARE: Final = 200
"""Tensors of at most ``TINY_ELEMENTS`` elements (norms, biases) are read whole and first: the
smallest, as long as together they hold no more than one in ``TINY_SHARE`` of all elements."""

CURVE: Final = (1, 2, 5, 10, 20, 50, 100)
"""Budgets of a curve, in per cent of the raw bytes."""

Ints = npt.NDArray[np.int64]
Reals = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Ladders:
    """One expert as the planner sees it, over N blocks with at most L layers each.

    ``weights`` (N) squared is what an error's energy is multiplied by in the merge, ``limits`` (N)
    the most that its magnitude can be. ``costs`` (N, L) are the
    stored bytes of each layer. ``remaining`` (N, L + 1) is the energy of the delta that is unread
    after 0, 1, ... layers. ``depths`` (N) is the number of layers; zero where the expert
    contributes nothing to the block, which is then free. ``leaders`` (N) is the index of the first
    expert that stores the very same bytes for the block: they are read and paid once.
    ``base_costs`` (N) are the bytes of other bases that are read beside blocks stored as deltas
    from those; they count as the base's and not against the budget. ``units`` (N) is the index of
    the block with which each is read, or left, together: the first of them has the cost of all.
    """

    ref: str
    commit: CommitId
    raw_bytes: int
    weights: Reals
    limits: Reals
    costs: Ints
    remaining: Reals
    depths: npt.NDArray[np.uint8]
    leaders: npt.NDArray[np.int16]
    base_costs: Ints | None = None
    units: Ints | None = None


@dataclass(frozen=True, slots=True)
class Problem:
    """All that a plan depends on.

    ``tiny`` (N, bool) marks blocks of tiny tensors; ``always`` (N, bool) those that are computed
    even where no expert is read; ``base_bytes`` (N) are the stored bytes of the base's blocks and
    ``write_bytes`` (N) the bytes of the merged ones. ``merged_energy`` is that of the full-read
    merge's delta. ``first_step`` is the number of layers that the first step reads at least.
    ``flips`` says how much more error small errors make where thresholds and votes come between.
    ``together`` (N) numbers the tensors of which the base is read whole as soon as any block of an
    expert is, -1 elsewhere.
    """

    recipe: Mapping[str, Any]
    base: CommitId
    tensors: tuple[str, ...]
    kept: Mapping[str, str]
    experts: Sequence[Ladders]
    tiny: npt.NDArray[np.bool_]
    always: npt.NDArray[np.bool_]
    base_bytes: Ints
    write_bytes: Ints
    merged_energy: float
    additive: bool
    first_step: int = 1
    flips: float = 0.0
    together: Ints | None = None

    @property
    def raw_bytes(self) -> int:
        """What a tool that reads every expert whole would read."""
        return sum(expert.raw_bytes for expert in self.experts)


@dataclass(frozen=True, slots=True)
class _Steps:
    """Steps up the ladders, in the order in which they are taken.

    Each goes from ``start`` layers to ``stop`` on a ladder, numbered expert by expert. The first
    ``tiny`` of them are those of tiny tensors.
    """

    ladder: Ints
    start: npt.NDArray[np.uint8]
    stop: npt.NDArray[np.uint8]
    cost: Ints
    tiny: int


def tiny_tensors(elements: Sequence[int]) -> list[bool]:
    """Which tensors, of so many elements each, are so small that reading them costs nothing."""
    left = sum(elements) // TINY_SHARE
    tiny = [False] * len(elements)
    for place in sorted(range(len(elements)), key=elements.__getitem__):
        left -= elements[place]
        if elements[place] > TINY_ELEMENTS or left < 0:
            break
        tiny[place] = True
    return tiny


class Planner:
    """Plans one problem at any number of budgets: the order of steps is found once."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._blocks = problem.tiny.size
        experts = range(len(problem.experts))
        self._leads = [problem.experts[k].leaders == k for k in experts]
        self._weights = self._group_weights()
        self._steps = self._order_steps()
        self._everything = int(self._steps.cost.sum())

    def plan(self, budget_bytes: int | None = None) -> Plan:
        """The plan within ``budget_bytes`` stored bytes of experts; None is a full read."""
        return self.state(self._choose(budget_bytes), budget_bytes)

    def curve(self, percents: Sequence[int] = CURVE) -> list[tuple[int, Plan]]:
        """Plans at budgets in per cent of the raw bytes."""
        raw = self.problem.raw_bytes
        return [(percent, self.plan(raw * percent // 100)) for percent in percents]

    def _group_weights(self) -> list[Reals]:
        """Weights by which errors count: those that share stored bytes make the same error."""
        weights = [expert.weights.astype(np.float64) for expert in self.problem.experts]
        for k, expert in enumerate(self.problem.experts):
            for leader in np.unique(expert.leaders):
                if leader != k:
                    shared = expert.leaders == leader
                    weights[leader][shared] += weights[k][shared]
        return weights

    def _order_steps(self) -> _Steps:
        parts: list[tuple[npt.NDArray[Any], ...]] = []
        for k, expert in enumerate(self.problem.experts):
            mine = (expert.depths > 0) & self._leads[k]
            if expert.units is not None:
                mine &= expert.units == np.arange(self._blocks)
            parts.extend(self._hull(k, np.flatnonzero(mine)))
        if not parts:
            nothing = np.zeros(0, np.int64)
            return _Steps(nothing, nothing.astype(np.uint8), nothing.astype(np.uint8), nothing, 0)
        ladder, start, stop, cost, slope = (
            np.concatenate(column) for column in zip(*parts, strict=True)
        )
        tiny = self.problem.tiny[ladder % self._blocks]
        order = np.lexsort((-slope, ~tiny))
        count = int(np.count_nonzero(tiny))
        return _Steps(ladder[order], start[order], stop[order], cost[order], count)

    def _hull(self, k: int, blocks: Ints) -> list[tuple[npt.NDArray[Any], ...]]:
        """Steps along the concave hulls of an expert's ladders, with error removed per byte.

        From where a ladder stands, the next step goes to the layer that removes most per byte on
        the way, the farther one where two are equal.
        """
        expert = self.problem.experts[k]
        layers = expert.costs.shape[1]
        depth = expert.depths[blocks].astype(np.int64)
        total = np.zeros((blocks.size, layers + 1), np.int64)
        np.cumsum(expert.costs[blocks], axis=1, out=total[:, 1:])
        error = self._errors(k, blocks)
        tiny = self.problem.tiny[blocks]
        first = np.minimum(self.problem.first_step, depth)
        rows = np.arange(blocks.size)
        at = np.zeros(blocks.size, np.int64)
        last_slope = np.full(blocks.size, np.inf)
        parts: list[tuple[npt.NDArray[Any], ...]] = []
        while rows.size:
            here_cost, here_error = total[rows, at[rows]], error[rows, at[rows]]
            best = np.full(rows.size, -1.0)
            target = np.zeros(rows.size, np.int64)
            for layer in range(1, layers + 1):
                open_to = (layer > at[rows]) & (layer <= depth[rows]) & (layer >= first[rows])
                open_to &= ~tiny[rows] | (layer == depth[rows])
                gain = np.maximum(here_error - error[rows, layer], 0.0)
                cost = np.maximum(total[rows, layer] - here_cost, 1)
                slope = np.where(open_to, gain / cost, -2.0)
                better = slope >= best
                best, target = np.where(better, slope, best), np.where(better, layer, target)
            best = np.minimum(best, last_slope[rows])
            last_slope[rows] = best
            parts.append(
                (
                    k * self._blocks + blocks[rows],
                    at[rows].astype(np.uint8),
                    target.astype(np.uint8),
                    total[rows, target] - here_cost,
                    best,
                )
            )
            at[rows] = target
            rows = rows[at[rows] < depth[rows]]
        return parts

    def _errors(self, k: int, blocks: Ints) -> Reals:
        """The squared error that is left after each layer of an expert's blocks, or of the units
        that they lead."""
        expert, weights = self.problem.experts[k], self._weights[k] ** 2
        if expert.units is None:
            return expert.remaining[blocks] * weights[blocks][:, None]
        together = np.zeros_like(expert.remaining)
        np.add.at(together, expert.units, expert.remaining * weights[:, None])
        return together[blocks]

    def _choose(self, budget_bytes: int | None) -> npt.NDArray[np.uint8]:
        """How many layers of each (expert, block) are read."""
        steps = self._steps
        chosen = np.zeros(len(self.problem.experts) * self._blocks, np.uint8)
        if budget_bytes is None or budget_bytes >= self._everything:
            prefix = steps.cost.size
        else:
            spent = np.cumsum(steps.cost)
            prefix = int(np.searchsorted(spent, budget_bytes, side="right"))
        # Later steps of a ladder come later in the order: the last assignment stands.
        chosen[steps.ladder[:prefix]] = steps.stop[:prefix]
        if prefix < steps.cost.size:
            assert budget_bytes is not None
            self._fill(chosen, prefix, budget_bytes - int(steps.cost[:prefix].sum()))
        choice = chosen.reshape(len(self.problem.experts), self._blocks)
        for k, expert in enumerate(self.problem.experts):
            if expert.units is not None:
                choice[k] = np.where(expert.depths > 0, choice[k][expert.units], 0)
            for leader in np.unique(expert.leaders):
                if leader != k:
                    shared = (expert.leaders == leader) & (expert.depths > 0)
                    choice[k][shared] = choice[leader][shared]
        return choice

    def _fill(self, chosen: npt.NDArray[np.uint8], prefix: int, left: int) -> None:
        """Spend what is left of the budget on later steps that still fit, in order.

        Nothing else is read before the tiny tensors are: a larger budget, which reads one more of
        them, could else not afford what a smaller one reads, and be worse.
        """
        steps = self._steps
        end = steps.tiny if prefix < steps.tiny else steps.cost.size
        candidates = prefix + np.flatnonzero(steps.cost[prefix:end] <= left)
        while candidates.size:
            ready = chosen[steps.ladder[candidates]] == steps.start[candidates]
            fits = steps.cost[candidates] <= left
            usable = np.flatnonzero(ready & fits)
            if not usable.size:
                return
            # As many as fit at once, one step of a ladder at a time.
            take = candidates[usable]
            spent = np.cumsum(steps.cost[take])
            count = max(int(np.searchsorted(spent, left, side="right")), 1)
            take = take[:count]
            chosen[steps.ladder[take]] = steps.stop[take]
            left -= int(steps.cost[take].sum())
            candidates = candidates[usable[count - 1] + 1 :]

    def state_if_possible(
        self, choice: npt.NDArray[np.uint8], budget_bytes: int | None
    ) -> Plan | None:
        """``state``, or None where a block has fewer layers than ``choice`` reads of it."""
        if any((choice[k] > e.depths).any() for k, e in enumerate(self.problem.experts)):
            return None
        return self.state(choice, budget_bytes)

    def state(self, choice: npt.NDArray[np.uint8], budget_bytes: int | None) -> Plan:
        """The plan that reads ``choice`` (experts by N): so many layers of each block."""
        problem = self.problem
        rows = np.arange(self._blocks)
        experts = []
        squared = 0.0
        worst = np.zeros(self._blocks)
        other_bases = 0
        for k, expert in enumerate(problem.experts):
            layers = choice[k]
            paid = np.where(self._leads[k], layers, 0)
            if expert.base_costs is not None:
                other_bases += int(expert.base_costs[paid > 0].sum())
            layer_bytes = tuple(
                int(expert.costs[paid > layer, layer].sum())
                for layer in range(expert.costs.shape[1])
            )
            unread = np.where(expert.depths > 0, expert.remaining[rows, layers], 0.0)
            mine = expert.weights**2
            whole = float(mine @ np.where(expert.depths > 0, expert.remaining[:, 0], 0.0))
            squared += float((self._weights[k] ** 2)[self._leads[k]] @ unread[self._leads[k]])
            worst += expert.limits * np.sqrt(unread)
            free = int(np.count_nonzero(expert.depths == 0))
            read = int(np.count_nonzero(layers))
            experts.append(
                ExpertPlan(
                    ref=expert.ref,
                    commit=expert.commit,
                    raw_bytes=expert.raw_bytes,
                    planned_bytes=sum(layer_bytes),
                    layer_bytes=layer_bytes,
                    blocks_read=read,
                    blocks_free=free,
                    blocks_skipped=self._blocks - free - read,
                    predicted_error=_relative(float(mine @ unread), whole),
                    layers=layers.tobytes(),
                )
            )
        touched = choice.any(axis=0)
        if problem.together is not None:
            groups = np.unique(problem.together[touched])
            touched |= np.isin(problem.together, groups[groups >= 0])
        touched |= problem.always
        bound = _relative(float(worst @ worst), problem.merged_energy)
        return Plan(
            recipe=problem.recipe,
            base=problem.base,
            tensors=problem.tensors,
            kept=problem.kept,
            raw_bytes=problem.raw_bytes,
            budget_bytes=budget_bytes,
            planned_bytes=sum(expert.planned_bytes for expert in experts),
            base_bytes=int(problem.base_bytes[touched].sum()) + other_bases,
            write_bytes=int(problem.write_bytes[touched].sum()),
            merged_norm=round_error(math.sqrt(problem.merged_energy)),
            predicted_error=_with_flips(_relative(squared, problem.merged_energy), problem.flips),
            error_bound=bound if problem.additive else None,
            experts=tuple(experts),
        )


def _with_flips(error: float, flips: float) -> float:
    """The error with what thresholds and votes add, where little errors turn them.

    An element near a threshold, or a vote that is nearly even, turns with a probability in
    proportion to the error, and then the whole element is wrong: the squared error grows by
    ``flips * error``, as far as elements are left that have not turned.
    """
    if not flips or error >= 1.0:
        return error
    return round_error(math.sqrt(error * error + flips * error * (1.0 - error)))


def _relative(error: float, energy: float) -> float:
    """The root of error over energy; nothing is no error, and nothing can be lost of nothing."""
    if error <= 0.0:
        return 0.0
    return round_error(math.sqrt(error / energy)) if energy > 0.0 else 1.0
