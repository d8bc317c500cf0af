"""Planning where blocks are read together or not at all, as those that adapters compute are."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mergegit.merge.plan import Ladders, Planner, Problem
from tests.merge.problems import (
    cost_of,
    every_choice,
    everything,
    hull_steps,
    ladders,
    layers_of,
    problem_of,
    squared_error_of,
)

many = settings(deadline=None, max_examples=80)
shares = st.floats(0, 1)
LAYERS = 3


@st.composite
def adapters(
    draw: st.DrawFn, *, max_tensors: int = 4, max_experts: int = 3, models: bool = True
) -> Problem:
    """Experts of tensors with one to four blocks: adapters, which compute some of the tensors and
    hold some as models do, and models. Adapters may share a tensor with an earlier one."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=max_tensors))
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]]).tolist()
    blocks = sum(sizes)
    experts: list[Ladders] = []
    units: list[np.ndarray | None] = []
    for place in range(draw(st.integers(1, max_experts))):
        weight = draw(st.sampled_from([0.1, 1.0, 2.0]))
        unit = np.arange(blocks)
        rows: list[tuple[list[int], list[float], int, int]] = []
        for start, size in zip(starts, sizes, strict=True):
            kinds = ["computed", "free", "shared", *(["model"] if models else [])]
            kind = draw(st.sampled_from(kinds))
            earlier = [
                expert
                for expert, units_of in zip(experts, units, strict=True)
                if units_of is not None
                and expert.depths[start] == 1
                and (units_of[start : start + size] == start).all()
            ]
            if kind == "shared" and earlier:
                other = earlier[-1]
                unit[start : start + size] = start
                for block in range(start, start + size):
                    first = int(other.leaders[block])
                    rows.append(
                        (other.costs[block].tolist(), other.remaining[block].tolist(), 1, first)
                    )
            elif kind in ("computed", "shared"):
                unit[start : start + size] = start
                cost = draw(st.integers(1, 30))
                for block in range(size):
                    energy = float(draw(st.integers(0, 100)))
                    rows.append(
                        ([cost if not block else 0, 0, 0], [energy, 0.0, 0.0, 0.0], 1, place)
                    )
            elif kind == "free":
                rows += [([0] * LAYERS, [0.0] * (LAYERS + 1), 0, place)] * size
            else:
                for _ in range(size):
                    costs = draw(st.lists(st.integers(1, 20), min_size=LAYERS, max_size=LAYERS))
                    energies = st.lists(st.integers(0, 100), min_size=LAYERS, max_size=LAYERS)
                    falling = sorted(map(float, draw(energies)), reverse=True)
                    rows.append((costs, [*falling, 0.0], LAYERS, place))
        expert = ladders(
            place,
            [row[0] for row in rows],
            [row[1] for row in rows],
            weights=weight,
            depths=[row[2] for row in rows],
            leaders=[row[3] for row in rows],
        )
        grouped = bool((unit != np.arange(blocks)).any()) or draw(st.booleans())
        experts.append(dataclasses.replace(expert, units=unit if grouped else None))
        units.append(unit if grouped else None)
    tiny = [flag for size in sizes for flag in [draw(st.booleans())] * size]
    return problem_of(experts, tiny=tiny, first_step=draw(st.integers(1, 2)))


def budget_of(problem: Problem, share: float) -> int:
    return int(share * everything(problem) * 1.1)


def together(problem: Problem, layers: np.ndarray) -> bool:
    """Whether every unit's blocks are read alike, but for those that are free."""
    for k, expert in enumerate(problem.experts):
        if expert.units is not None:
            first = layers[k][expert.units]
            if not np.array_equal(layers[k], np.where(expert.depths > 0, first, 0)):
                return False
    return True


@many
@given(adapters(), shares)
def test_within_the_budget_all_blocks_of_a_unit_are_read_or_none(
    problem: Problem, share: float
) -> None:
    budget = budget_of(problem, share)
    plan = Planner(problem).plan(budget)
    layers = layers_of(plan)
    assert plan.planned_bytes == cost_of(problem, layers) <= budget
    assert together(problem, layers)
    for k, expert in enumerate(problem.experts):
        assert (layers[k] <= expert.depths).all()


@many
@given(adapters(), shares)
def test_the_predicted_error_is_what_the_choice_leaves(problem: Problem, share: float) -> None:
    plan = Planner(problem).plan(budget_of(problem, share))
    squared = squared_error_of(problem, layers_of(plan))
    energy = problem.merged_energy
    wanted = math.sqrt(squared / energy) if energy and squared > 0 else float(squared > 0)
    assert math.isclose(plan.predicted_error, wanted, rel_tol=1e-5, abs_tol=1e-9)


@many
@given(adapters())
def test_everything_is_read_where_there_is_no_budget_or_enough(problem: Problem) -> None:
    depths = np.stack([expert.depths for expert in problem.experts])
    for budget in (None, everything(problem)):
        plan = Planner(problem).plan(budget)
        assert np.array_equal(layers_of(plan), depths)
        assert plan.planned_bytes == everything(problem)
        assert plan.predicted_error == 0.0


@many
@given(adapters())
def test_without_a_byte_nothing_is_read(problem: Problem) -> None:
    plan = Planner(problem).plan(0)
    assert not layers_of(plan).any()
    assert plan.planned_bytes == 0


@many
@given(adapters(), shares, shares)
def test_a_larger_budget_never_has_a_larger_error(
    problem: Problem, one: float, other: float
) -> None:
    low, high = sorted((budget_of(problem, one), budget_of(problem, other)))
    planner = Planner(problem)
    errors = [squared_error_of(problem, layers_of(planner.plan(b))) for b in (low, high)]
    assert errors[1] <= errors[0] * (1 + 1e-9)


def collapsed(problem: Problem) -> Problem:
    """The same problem with one block in the place of each unit, of adapters alone."""
    firsts = np.unique(np.concatenate([e.units for e in problem.experts if e.units is not None]))
    experts = []
    for expert in problem.experts:
        assert expert.units is not None
        owner = np.searchsorted(firsts, np.arange(problem.tiny.size), side="right") - 1
        remaining = np.zeros((firsts.size, expert.remaining.shape[1]))
        np.add.at(remaining, owner, expert.remaining)
        experts.append(
            dataclasses.replace(
                expert,
                weights=expert.weights[firsts],
                limits=expert.limits[firsts],
                costs=expert.costs[firsts],
                remaining=remaining,
                depths=expert.depths[firsts],
                leaders=expert.leaders[firsts],
                units=None,
            )
        )
    return problem_of(experts, tiny=problem.tiny[firsts].tolist(), first_step=problem.first_step)


@st.composite
def adapters_alone(draw: st.DrawFn) -> Problem:
    """Adapters that compute or share tensors of the same sizes, so that their units are alike."""
    problem = draw(adapters(models=False))
    whole = np.arange(problem.tiny.size)
    for expert in problem.experts:
        if expert.units is not None:
            whole = np.minimum(whole, expert.units)
    experts = [dataclasses.replace(expert, units=whole) for expert in problem.experts]
    return dataclasses.replace(problem, experts=experts)


@many
@given(adapters_alone(), shares)
def test_a_unit_is_planned_as_one_block_with_all_of_its_energy(
    problem: Problem, share: float
) -> None:
    budget = budget_of(problem, share)
    plan = Planner(problem).plan(budget)
    small = Planner(collapsed(problem)).plan(budget)
    assert plan.planned_bytes == small.planned_bytes
    firsts = np.unique(np.concatenate([e.units for e in problem.experts if e.units is not None]))
    assert np.array_equal(layers_of(plan)[:, firsts], layers_of(small))


@settings(deadline=None, max_examples=60)
@given(adapters_alone(), shares)
def test_the_choice_is_within_one_unit_of_the_best(problem: Problem, share: float) -> None:
    small = dataclasses.replace(
        collapsed(problem), tiny=np.zeros(collapsed(problem).tiny.size, np.bool_)
    )
    plain = dataclasses.replace(problem, tiny=np.zeros(problem.tiny.size, np.bool_))
    budget = budget_of(problem, share)
    best = min(
        squared_error_of(small, layers)
        for layers in every_choice(small)
        if cost_of(small, layers) <= budget
    )
    planned = squared_error_of(plain, layers_of(Planner(plain).plan(budget)))
    largest = max((step.gain for step in hull_steps(small)), default=0.0)
    assert best - 1e-9 <= planned <= best + largest + 1e-9


def test_a_unit_goes_by_the_energy_of_all_its_blocks() -> None:
    # 9 of energy in three blocks for 3 bytes; 8 in one for 4.
    expert = ladders(
        0, [[3], [0], [0], [4]], [[3.0, 0.0], [3.0, 0.0], [3.0, 0.0], [8.0, 0.0]]
    )  # fmt: skip
    problem = problem_of([dataclasses.replace(expert, units=np.array([0, 0, 0, 3]))])
    planner = Planner(problem)
    assert layers_of(planner.plan(4)).tolist() == [[1, 1, 1, 0]]
    assert layers_of(planner.plan(2)).tolist() == [[0, 0, 0, 0]]
    assert planner.plan(4).base_bytes == 30
    assert planner.plan(7).planned_bytes == 7


def test_bytes_of_other_bases_are_the_bases() -> None:
    expert = ladders(0, [[3], [0]], [[3.0, 0.0], [3.0, 0.0]])
    below = dataclasses.replace(expert, units=np.zeros(2, np.int64), base_costs=np.array([5, 6]))
    planner = Planner(problem_of([below]))
    assert (planner.plan(3).planned_bytes, planner.plan(3).base_bytes) == (3, 20 + 11)
    assert (planner.plan(2).planned_bytes, planner.plan(2).base_bytes) == (0, 0)
