"""Planning problems: small ones for hypothesis, and the plainest possible search over all plans."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from mergegit.merge.plan import Ladders, Problem
from mergegit.objects import Plan
from tests.merge.tensors import commit_id


def problem_of(
    experts: Sequence[Ladders],
    *,
    tiny: Sequence[bool] | None = None,
    always: Sequence[bool] | None = None,
    merged_energy: float | None = None,
    additive: bool = True,
    first_step: int = 1,
    base_bytes: Sequence[int] | None = None,
    write_bytes: Sequence[int] | None = None,
) -> Problem:
    blocks = experts[0].depths.size
    if merged_energy is None:
        merged_energy = sum(float(expert.weights**2 @ expert.remaining[:, 0]) for expert in experts)
    return Problem(
        recipe={"method": "task_arithmetic"},
        base=commit_id(0),
        tensors=("weight",),
        kept={},
        experts=experts,
        tiny=np.array(tiny if tiny is not None else [False] * blocks, np.bool_),
        always=np.array(always if always is not None else [False] * blocks, np.bool_),
        base_bytes=np.array(base_bytes if base_bytes is not None else [10] * blocks, np.int64),
        write_bytes=np.array(write_bytes if write_bytes is not None else [12] * blocks, np.int64),
        merged_energy=merged_energy,
        additive=additive,
        first_step=first_step,
    )


def ladders(
    place: int,
    costs: Sequence[Sequence[int]],
    remaining: Sequence[Sequence[float]],
    *,
    weights: Sequence[float] | float = 1.0,
    limits: Sequence[float] | None = None,
    depths: Sequence[int] | None = None,
    leaders: Sequence[int] | None = None,
    raw_bytes: int | None = None,
) -> Ladders:
    """An expert's ladders, from rows of each block."""
    table = np.array(costs, np.int64)
    blocks = table.shape[0]
    each = [weights] * blocks if isinstance(weights, (int, float)) else weights
    return Ladders(
        ref=f"expert{place}",
        commit=commit_id(place + 1),
        raw_bytes=raw_bytes if raw_bytes is not None else 2 * int(table.sum()),
        weights=np.array(each, np.float64),
        limits=np.array(limits if limits is not None else each, np.float64),
        costs=table,
        remaining=np.array(remaining, np.float64),
        depths=np.array(depths if depths is not None else [table.shape[1]] * blocks, np.uint8),
        leaders=np.array(leaders if leaders is not None else [place] * blocks, np.int16),
    )


@st.composite
def problems(
    draw: st.DrawFn,
    *,
    max_experts: int = 4,
    max_blocks: int = 6,
    max_layers: int = 4,
    tiny: bool = True,
    shared: bool = True,
) -> Problem:
    """Any problem: free blocks, shared blocks, tiny tensors, ladders of any height.

    Experts that share a block store the same bytes for it: their ladders are equal but for the
    weights. Weights are per expert, as recipes have them.
    """
    blocks = draw(st.integers(1, max_blocks))
    layers = draw(st.integers(1, max_layers))
    experts: list[Ladders] = []
    for place in range(draw(st.integers(1, max_experts))):
        weight = draw(st.sampled_from([0.0, 0.1, 0.5, 1.0, 1.0, 2.0]))
        rows: list[tuple[list[int], list[float], int, int]] = []
        for block in range(blocks):
            leader = place
            if shared and experts and weight > 0 and draw(st.booleans()):
                leader = draw(st.integers(0, place - 1))
                leader = int(experts[leader].leaders[block])
            if leader != place and experts[leader].depths[block] > 0:
                other = experts[leader]
                rows.append(
                    (
                        other.costs[block].tolist(),
                        other.remaining[block].tolist(),
                        int(other.depths[block]),
                        leader,
                    )
                )
                continue
            depth = draw(st.integers(0, layers)) if weight > 0 else 0
            costs = draw(st.lists(st.integers(0, 20), min_size=layers, max_size=layers))
            energies = draw(st.lists(st.integers(0, 100), min_size=layers + 1, max_size=layers + 1))
            energies = sorted(map(float, energies), reverse=True)
            if depth:
                energies[depth:] = [0.0] * (layers + 1 - depth)
            rows.append((costs, energies, depth, place))
        experts.append(
            ladders(
                place,
                [row[0] for row in rows],
                [row[1] for row in rows],
                weights=weight,
                limits=[weight * draw(st.sampled_from([1.0, 1.5]))] * blocks,
                depths=[row[2] for row in rows],
                leaders=[row[3] for row in rows],
            )
        )
    flags = st.lists(st.booleans(), min_size=blocks, max_size=blocks)
    return problem_of(
        experts,
        tiny=draw(flags) if tiny else None,
        always=draw(flags),
        first_step=draw(st.integers(1, 2)),
        additive=draw(st.booleans()),
    )


def everything(problem: Problem) -> int:
    """The stored bytes of a full read."""
    return sum(
        int(expert.costs[block, : expert.depths[block]].sum())
        for k, expert in enumerate(problem.experts)
        for block in range(problem.tiny.size)
        if expert.leaders[block] == k
    )


def layers_of(plan: Plan) -> np.ndarray:
    """How many layers are read, by expert and block."""
    return np.stack([np.frombuffer(expert.layers, np.uint8) for expert in plan.experts])


def cost_of(problem: Problem, layers: np.ndarray) -> int:
    """The stored bytes of a choice; bytes that experts share count once."""
    return sum(
        int(expert.costs[block, : layers[k, block]].sum())
        for k, expert in enumerate(problem.experts)
        for block in range(problem.tiny.size)
        if expert.leaders[block] == k
    )


def squared_error_of(problem: Problem, layers: np.ndarray) -> float:
    """Energy that a choice leaves unread; experts that share bytes err together."""
    total = 0.0
    for block in range(problem.tiny.size):
        groups: dict[int, list[int]] = {}
        for k, expert in enumerate(problem.experts):
            if expert.depths[block]:
                groups.setdefault(int(expert.leaders[block]), []).append(k)
        for leader, members in groups.items():
            weight = sum(float(problem.experts[k].weights[block]) for k in members)
            unread = problem.experts[leader].remaining[block, layers[leader, block]]
            total += weight**2 * float(unread)
    return total


def every_choice(problem: Problem) -> Iterator[np.ndarray]:
    """Every choice of layers that the rules allow."""
    blocks = problem.tiny.size
    places, options = [], []
    for k, expert in enumerate(problem.experts):
        for block in range(blocks):
            depth = int(expert.depths[block])
            if depth and expert.leaders[block] == k:
                places.append((k, block))
                first = min(problem.first_step, depth)
                whole = bool(problem.tiny[block])
                options.append([0, depth] if whole else [0, *range(first, depth + 1)])
    for choice in itertools.product(*options):
        layers = np.zeros((len(problem.experts), blocks), np.uint8)
        for (k, block), count in zip(places, choice, strict=True):
            layers[k, block] = count
        for k, expert in enumerate(problem.experts):
            for block in range(blocks):
                if expert.depths[block]:
                    layers[k, block] = layers[expert.leaders[block], block]
        yield layers


@dataclass(frozen=True, slots=True)
class Step:
    """A step on the concave hull of one ladder: the error that it removes, and its cost."""

    gain: float
    cost: int

    @property
    def slope(self) -> float:
        return self.gain / max(self.cost, 1)


def hull_steps(problem: Problem) -> list[Step]:
    """The steps of all ladders, best first."""
    steps = []
    for k, expert in enumerate(problem.experts):
        for block in range(problem.tiny.size):
            depth = int(expert.depths[block])
            if not depth or expert.leaders[block] != k:
                continue
            weight = sum(
                float(other.weights[block])
                for other in problem.experts
                if other.leaders[block] == k and other.depths[block]
            )
            cost = np.concatenate([[0], np.cumsum(expert.costs[block])])
            error = weight**2 * expert.remaining[block]
            allowed = [0, *range(min(problem.first_step, depth), depth + 1)]
            at = 0
            while at < depth:
                ahead = {
                    layer: Step(float(error[at] - error[layer]), int(cost[layer] - cost[at]))
                    for layer in allowed
                    if layer > at
                }
                best = max(step.slope for step in ahead.values())
                at = max(layer for layer, step in ahead.items() if step.slope == best)
                steps.append(ahead[at])
    return sorted(steps, key=lambda step: -step.slope)
