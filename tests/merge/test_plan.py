from __future__ import annotations

import dataclasses
import itertools
import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from mergegit.encoding import encode
from mergegit.merge.plan import (
    CURVE,
    TINY_ELEMENTS,
    TINY_SHARE,
    Planner,
    Problem,
    tiny_tensors,
)
from mergegit.objects import Plan
from tests.merge.problems import (
    cost_of,
    every_choice,
    everything,
    hull_steps,
    ladders,
    layers_of,
    problem_of,
    problems,
    squared_error_of,
)

many = settings(deadline=None, max_examples=80)
shares = st.floats(0, 1)


def budget_of(problem: Problem, share: float) -> int:
    return int(share * everything(problem) * 1.1)


def relative(problem: Problem, layers: np.ndarray) -> float:
    squared = squared_error_of(problem, layers)
    if squared <= 0:
        return 0.0
    return math.sqrt(squared / problem.merged_energy) if problem.merged_energy else 1.0


# -- the budget ----------------------------------------------------------------------------------


@many
@given(problems(), shares)
def test_no_plan_costs_more_than_its_budget(problem: Problem, share: float) -> None:
    budget = budget_of(problem, share)
    assert Planner(problem).plan(budget).planned_bytes <= budget


@many
@given(problems(), shares)
def test_what_is_planned_is_the_cost_of_the_layers(problem: Problem, share: float) -> None:
    plan = Planner(problem).plan(budget_of(problem, share))
    layers = layers_of(plan)
    assert plan.planned_bytes == cost_of(problem, layers)
    for k, (expert, asked) in enumerate(zip(plan.experts, problem.experts, strict=True)):
        assert expert.planned_bytes == sum(expert.layer_bytes)
        for layer, nbytes in enumerate(expert.layer_bytes):
            mine = (asked.leaders == k) & (layers[k] > layer)
            assert nbytes == asked.costs[mine, layer].sum()


@many
@given(problems(), shares, shares)
def test_a_larger_budget_never_has_a_larger_error(
    problem: Problem, one: float, other: float
) -> None:
    low, high = sorted((budget_of(problem, one), budget_of(problem, other)))
    planner = Planner(problem)
    # Plans state errors to six digits, and sums of floats in another order differ in the last.
    slack = 1 + 2e-6
    assert planner.plan(high).predicted_error <= planner.plan(low).predicted_error * slack


@settings(deadline=None, max_examples=60)
@given(problems(max_experts=2, max_blocks=4))
def test_errors_fall_with_every_single_byte(problem: Problem) -> None:
    planner = Planner(problem)
    errors = [
        squared_error_of(problem, layers_of(planner.plan(budget)))
        for budget in range(everything(problem) + 2)
    ]
    assert all(b <= a * (1 + 1e-9) for a, b in itertools.pairwise(errors))


@many
@given(problems())
def test_a_budget_of_nothing_reads_nothing_that_costs(problem: Problem) -> None:
    plan = Planner(problem).plan(0)
    assert plan.planned_bytes == 0
    assert cost_of(problem, layers_of(plan)) == 0


def test_a_budget_of_nothing_reads_no_block_of_any_expert() -> None:
    expert = ladders(0, [[5], [5]], [[1.0, 0.0]] * 2)
    plan = Planner(problem_of([expert])).plan(0)
    assert plan.experts[0].layers == bytes(2)
    assert (plan.experts[0].blocks_read, plan.experts[0].blocks_skipped) == (0, 2)
    assert plan.predicted_error == 1.0


@many
@given(problems(), st.integers(0, 10**6))
def test_a_budget_of_everything_and_more_reads_everything(problem: Problem, more: int) -> None:
    planner = Planner(problem)
    whole = planner.plan(None)
    enough = planner.plan(everything(problem) + more)
    depths = np.stack([expert.depths for expert in problem.experts])
    assert np.array_equal(layers_of(whole), depths)
    assert np.array_equal(layers_of(enough), depths)
    assert whole.planned_bytes == enough.planned_bytes == everything(problem)
    assert whole.predicted_error == enough.predicted_error == 0.0
    assert whole.budget_bytes is None


@many
@given(problems(), shares)
def test_a_plan_at_its_own_cost_is_itself(problem: Problem, share: float) -> None:
    planner = Planner(problem)
    plan = planner.plan(budget_of(problem, share))
    again = planner.plan(plan.planned_bytes)
    assert np.array_equal(layers_of(plan), layers_of(again))


@many
@given(problems(), shares)
def test_no_step_that_still_fits_is_left_out(problem: Problem, share: float) -> None:
    """Within the rules, nothing that would help could have been read with what is left."""
    budget = budget_of(problem, share)
    plan = Planner(problem).plan(budget)
    left = budget - plan.planned_bytes
    layers = layers_of(plan)
    tiny_left = any(
        expert.depths[block] and not layers[k, block]
        for k, expert in enumerate(problem.experts)
        for block in np.flatnonzero(problem.tiny)
    )
    assume(not tiny_left)
    for k, expert in enumerate(problem.experts):
        for block in range(problem.tiny.size):
            if expert.leaders[block] == k and layers[k, block] < expert.depths[block]:
                rest = expert.costs[block, layers[k, block] : expert.depths[block]].sum()
                assert rest > left


# -- determinism ---------------------------------------------------------------------------------


@many
@given(problems(), shares)
def test_the_same_problem_gives_the_same_plan(problem: Problem, share: float) -> None:
    budget = budget_of(problem, share)
    copy = dataclasses.replace(
        problem,
        experts=[
            dataclasses.replace(
                expert,
                weights=expert.weights.copy(),
                costs=np.asfortranarray(expert.costs),
                remaining=np.asfortranarray(expert.remaining),
            )
            for expert in problem.experts
        ],
    )
    assert encode(Planner(problem).plan(budget)) == encode(Planner(copy).plan(budget))


@many
@given(problems(), st.lists(shares, min_size=1, max_size=4))
def test_earlier_plans_of_a_planner_change_no_later_one(
    problem: Problem, some: list[float]
) -> None:
    planner = Planner(problem)
    for share in some:
        planner.plan(budget_of(problem, share))
    budget = budget_of(problem, some[0])
    assert encode(planner.plan(budget)) == encode(Planner(problem).plan(budget))


def test_planning_leaves_the_problem_as_it_was() -> None:
    shared = ladders(1, [[5, 5]], [[4.0, 2.0, 0.0]], weights=0.5, leaders=[0])
    problem = problem_of([ladders(0, [[5, 5]], [[4.0, 2.0, 0.0]]), shared])
    Planner(problem).plan(5)
    assert [expert.weights.tolist() for expert in problem.experts] == [[1.0], [0.5]]
    assert problem.experts[1].remaining.tolist() == [[4.0, 2.0, 0.0]]


def test_equal_steps_are_taken_by_expert_then_block() -> None:
    experts = [ladders(k, [[5]] * 3, [[1.0, 0.0]] * 3) for k in range(2)]
    planner = Planner(problem_of(experts))
    assert layers_of(planner.plan(10)).tolist() == [[1, 1, 0], [0, 0, 0]]
    assert layers_of(planner.plan(20)).tolist() == [[1, 1, 1], [1, 0, 0]]


@many
@given(problems())
def test_a_curve_is_the_plans_at_its_budgets(problem: Problem) -> None:
    planner = Planner(problem)
    curve = planner.curve()
    assert [percent for percent, _ in curve] == list(CURVE)
    for percent, plan in curve:
        alone = Planner(problem).plan(problem.raw_bytes * percent // 100)
        assert encode(plan) == encode(alone)


# -- the choice ----------------------------------------------------------------------------------


@settings(deadline=None, max_examples=100)
@given(problems(max_experts=2, max_blocks=3, max_layers=3, tiny=False), shares)
def test_the_choice_is_within_one_step_of_the_best(problem: Problem, share: float) -> None:
    budget = budget_of(problem, share)
    best = min(
        squared_error_of(problem, layers)
        for layers in every_choice(problem)
        if cost_of(problem, layers) <= budget
    )
    planned = squared_error_of(problem, layers_of(Planner(problem).plan(budget)))
    assert best * (1 - 1e-9) - 1e-9 <= planned
    largest = max((step.gain for step in hull_steps(problem)), default=0.0)
    assert planned <= best + largest * (1 + 1e-9)


@settings(deadline=None, max_examples=60)
@given(problems(max_experts=2, max_blocks=3, max_layers=3, tiny=False))
def test_where_the_budget_ends_behind_a_step_the_choice_is_the_best(problem: Problem) -> None:
    planner = Planner(problem)
    choices = [(cost_of(problem, c), squared_error_of(problem, c)) for c in every_choice(problem)]
    steps = hull_steps(problem)
    spent = 0
    for step, following in itertools.pairwise(steps):
        spent += step.cost
        # Steps that bring as much per byte may come in either order.
        if step.slope > following.slope * (1 + 1e-9):
            planned = squared_error_of(problem, layers_of(planner.plan(spent)))
            best = min(error for cost, error in choices if cost <= spent)
            assert planned == pytest.approx(best, rel=1e-9, abs=1e-9)


def test_the_best_gain_per_byte_comes_first() -> None:
    # Gains per byte: 10, 2, 6.
    expert = ladders(0, [[1], [5], [1]], [[10.0, 0.0], [10.0, 0.0], [6.0, 0.0]])
    planner = Planner(problem_of([expert]))
    assert layers_of(planner.plan(1)).tolist() == [[1, 0, 0]]
    assert layers_of(planner.plan(2)).tolist() == [[1, 0, 1]]
    assert layers_of(planner.plan(7)).tolist() == [[1, 1, 1]]


def test_a_layer_that_pays_only_with_the_next_is_read_with_it() -> None:
    # The first layer alone removes 1 for 10 bytes; both remove 100 for 20: 5 a byte.
    pair = ladders(0, [[10, 10], [10, 10]], [[100.0, 99.0, 0.0], [40.0, 10.0, 0.0]])
    planner = Planner(problem_of([pair]))
    assert layers_of(planner.plan(20)).tolist() == [[2, 0]]
    assert layers_of(planner.plan(30)).tolist() == [[2, 1]]


def test_precision_goes_where_it_removes_most_error() -> None:
    # Two blocks, each of three layers that halve the error: first layers come before seconds.
    rows = [[64.0, 16.0, 4.0, 0.0], [60.0, 15.0, 3.75, 0.0]]
    planner = Planner(problem_of([ladders(0, [[4, 4, 8]] * 2, rows)]))
    assert layers_of(planner.plan(8)).tolist() == [[1, 1]]
    assert layers_of(planner.plan(16)).tolist() == [[2, 2]]


def test_an_expert_of_twice_the_weight_counts_four_times() -> None:
    light = ladders(0, [[1]] * 2, [[3.0, 0.0], [5.0, 0.0]])
    heavy = ladders(1, [[1]] * 2, [[1.0, 0.0], [1.1, 0.0]], weights=2.0)
    planner = Planner(problem_of([light, heavy]))
    assert layers_of(planner.plan(1)).tolist() == [[0, 1], [0, 0]]
    assert layers_of(planner.plan(2)).tolist() == [[0, 1], [0, 1]]
    assert layers_of(planner.plan(3)).tolist() == [[0, 1], [1, 1]]


def test_what_is_left_goes_to_a_later_step_that_fits() -> None:
    expert = ladders(0, [[2], [10], [3]], [[20.0, 0.0], [50.0, 0.0], [3.0, 0.0]])
    planner = Planner(problem_of([expert]))
    assert layers_of(planner.plan(6)).tolist() == [[1, 0, 1]]
    assert layers_of(planner.plan(12)).tolist() == [[1, 1, 0]]


@many
@given(problems())
def test_a_layer_is_read_only_after_those_before_it(problem: Problem) -> None:
    """A plan holds one number of layers for a block: what is read is a prefix of its ladder."""
    planner = Planner(problem)
    for budget in (0, everything(problem) // 3, everything(problem) // 2):
        for expert, asked in zip(planner.plan(budget).experts, problem.experts, strict=True):
            layers = np.frombuffer(expert.layers, np.uint8)
            assert layers.size == problem.tiny.size
            assert (layers <= asked.depths).all()


# -- free, shared and tiny blocks ----------------------------------------------------------------


@many
@given(problems(), shares)
def test_free_blocks_are_never_read(problem: Problem, share: float) -> None:
    for budget in (budget_of(problem, share), None):
        plan = Planner(problem).plan(budget)
        for expert, asked in zip(plan.experts, problem.experts, strict=True):
            layers = np.frombuffer(expert.layers, np.uint8)
            assert not layers[asked.depths == 0].any()
            assert expert.blocks_free == (asked.depths == 0).sum()


def test_free_blocks_cost_nothing_and_lose_nothing() -> None:
    expert = ladders(0, [[7], [7]], [[5.0, 0.0], [0.0, 0.0]], depths=[1, 0])
    plan = Planner(problem_of([expert])).plan(7)
    assert plan.planned_bytes == 7
    assert plan.predicted_error == 0.0
    nothing = ladders(0, [[7], [7]], [[0.0, 0.0]] * 2, depths=[0, 0])
    empty = Planner(problem_of([nothing])).plan(None)
    assert (empty.planned_bytes, empty.predicted_error, empty.base_bytes) == (0, 0.0, 0)


@many
@given(problems(), shares)
def test_the_counts_of_blocks_add_up(problem: Problem, share: float) -> None:
    for budget in (budget_of(problem, share), None):
        for expert in Planner(problem).plan(budget).experts:
            blocks = expert.blocks_read, expert.blocks_free, expert.blocks_skipped
            assert sum(blocks) == problem.tiny.size
            assert min(blocks) >= 0
            assert expert.blocks_read == sum(layer > 0 for layer in expert.layers)


@many
@given(problems(), shares)
def test_experts_that_share_a_block_read_as_many_layers_of_it(
    problem: Problem, share: float
) -> None:
    layers = layers_of(Planner(problem).plan(budget_of(problem, share)))
    for k, expert in enumerate(problem.experts):
        for block in np.flatnonzero(expert.depths):
            assert layers[k, block] == layers[expert.leaders[block], block]


def test_a_shared_block_is_paid_once_and_read_by_all() -> None:
    rows = [[9.0, 0.0]]
    experts = [
        ladders(0, [[10]], rows), ladders(1, [[10]], rows, leaders=[0]),
        ladders(2, [[10]], rows, leaders=[0]),
    ]  # fmt: skip
    plan = Planner(problem_of(experts)).plan(10)
    assert [expert.planned_bytes for expert in plan.experts] == [10, 0, 0]
    assert [expert.blocks_read for expert in plan.experts] == [1, 1, 1]
    assert plan.predicted_error == 0.0


def test_a_shared_block_counts_with_the_weights_of_all() -> None:
    # Alone it would come last: 4 against 5. Shared, its error counts (1 + 1)^2 = 4 times.
    shared, single = [[4.0, 0.0], [0.0, 0.0]], [[0.0, 0.0], [5.0, 0.0]]
    experts = [
        ladders(0, [[1], [1]], shared, depths=[1, 0]),
        ladders(1, [[1], [1]], shared, depths=[1, 0], leaders=[0, 1]),
        ladders(2, [[1], [1]], single, depths=[0, 1]),
    ]
    assert layers_of(Planner(problem_of(experts)).plan(1)).tolist() == [[1, 0], [1, 0], [0, 0]]


@many
@given(problems(), shares)
def test_blocks_of_tiny_tensors_are_read_whole_or_not_at_all(
    problem: Problem, share: float
) -> None:
    layers = layers_of(Planner(problem).plan(budget_of(problem, share)))
    for k, expert in enumerate(problem.experts):
        for block in np.flatnonzero(problem.tiny):
            assert layers[k, block] in (0, expert.depths[block])


@many
@given(problems(), shares)
def test_nothing_is_read_before_the_tiny_tensors(problem: Problem, share: float) -> None:
    layers = layers_of(Planner(problem).plan(budget_of(problem, share)))
    costs_something = [
        layers[k, block] and expert.costs[block, : layers[k, block]].sum() > 0
        for k, expert in enumerate(problem.experts)
        for block in np.flatnonzero(~problem.tiny)
    ]
    if any(costs_something):
        for k, expert in enumerate(problem.experts):
            for block in np.flatnonzero(problem.tiny):
                assert layers[k, block] == expert.depths[block]


def test_tiny_tensors_come_first_however_little_they_bring() -> None:
    expert = ladders(0, [[2, 2], [2, 2]], [[1000.0, 1.0, 0.0], [0.1, 0.05, 0.0]])
    planner = Planner(problem_of([expert], tiny=[False, True]))
    assert layers_of(planner.plan(4)).tolist() == [[0, 2]]
    assert layers_of(planner.plan(6)).tolist() == [[1, 2]]


def test_a_tiny_tensor_that_does_not_fit_makes_no_larger_budget_worse() -> None:
    # Five bytes would buy the large block; with six, the tiny one stands before it.
    expert = ladders(0, [[6], [5]], [[0.01, 0.0], [100.0, 0.0]])
    planner = Planner(problem_of([expert], tiny=[True, False]))
    errors = [planner.plan(budget).predicted_error for budget in range(12)]
    assert errors == sorted(errors, reverse=True)


def test_tensors_are_tiny_while_all_that_are_hold_little_together() -> None:
    large = 1 << 24
    assert tiny_tensors([large, 16, 4096, large]) == [False, True, True, False]
    assert tiny_tensors([large, 1 << 14, (1 << 14) + 1]) == [False, True, False]
    # A model of small tensors alone has no tiny ones: together they would be everything.
    assert tiny_tensors([4096] * 10) == [False] * 10
    assert tiny_tensors([]) == []


@given(st.lists(st.integers(0, 1 << 20), max_size=20))
def test_tiny_tensors_are_the_smallest_and_no_more_than_their_share(sizes: list[int]) -> None:
    tiny = tiny_tensors(sizes)
    chosen = [size for size, is_tiny in zip(sizes, tiny, strict=True) if is_tiny]
    others = [size for size, is_tiny in zip(sizes, tiny, strict=True) if not is_tiny]
    assert max(chosen, default=0) <= min(others, default=max(sizes, default=0))
    assert max(chosen, default=0) <= TINY_ELEMENTS
    assert sum(chosen) * TINY_SHARE <= sum(sizes)


# -- the first step ------------------------------------------------------------------------------


@many
@given(problems(), shares)
def test_a_first_step_takes_its_number_of_layers(problem: Problem, share: float) -> None:
    layers = layers_of(Planner(problem).plan(budget_of(problem, share)))
    for k, expert in enumerate(problem.experts):
        read = layers[k] > 0
        assert (layers[k][read] >= np.minimum(problem.first_step, expert.depths[read])).all()


def test_one_layer_is_not_enough_where_two_are_the_first_step() -> None:
    expert = ladders(0, [[3, 3, 3]], [[9.0, 2.0, 1.0, 0.0]])
    planner = Planner(problem_of([expert], first_step=2))
    assert layers_of(planner.plan(5)).tolist() == [[0]]
    assert layers_of(planner.plan(6)).tolist() == [[2]]
    assert layers_of(planner.plan(9)).tolist() == [[3]]
    short = ladders(0, [[3, 0, 0]], [[9.0, 0.0, 0.0, 0.0]], depths=[1])
    assert layers_of(Planner(problem_of([short], first_step=2)).plan(3)).tolist() == [[1]]


# -- what a plan states --------------------------------------------------------------------------


@many
@given(problems(), shares)
def test_the_predicted_error_is_the_energy_left_unread(problem: Problem, share: float) -> None:
    plan = Planner(problem).plan(budget_of(problem, share))
    layers = layers_of(plan)
    assert plan.predicted_error == pytest.approx(relative(problem, layers), rel=1e-5, abs=1e-12)
    for k, (expert, asked) in enumerate(zip(plan.experts, problem.experts, strict=True)):
        contributes = asked.depths > 0
        rest = asked.remaining[np.arange(layers.shape[1]), layers[k]][contributes].sum()
        whole = asked.remaining[contributes, 0].sum()
        want = math.sqrt(rest / whole) if rest > 0 else 0.0
        assert expert.predicted_error == pytest.approx(want, rel=1e-5, abs=1e-12)


@many
@given(problems(), shares)
def test_the_bound_is_there_for_additive_methods_and_no_smaller_than_the_prediction(
    problem: Problem, share: float
) -> None:
    plan = Planner(problem).plan(budget_of(problem, share))
    assert (plan.error_bound is not None) == problem.additive
    if plan.error_bound is not None:
        assert plan.error_bound >= plan.predicted_error * (1 - 1e-5)


def test_the_bound_adds_errors_of_experts_in_a_block_and_squares_those_of_blocks() -> None:
    experts = [
        ladders(0, [[1], [1]], [[9.0, 0.0], [4.0, 0.0]]),
        ladders(1, [[1], [1]], [[16.0, 0.0], [1.0, 0.0]], weights=0.5),
    ]
    plan = Planner(problem_of(experts, merged_energy=100.0)).plan(0)
    assert plan.predicted_error == pytest.approx(math.sqrt((9 + 4 + 4 + 0.25) / 100), rel=1e-5)
    bound = math.sqrt(((3 + 0.5 * 4) ** 2 + (2 + 0.5) ** 2) / 100)
    assert plan.error_bound == pytest.approx(bound, rel=1e-5)


def test_the_bound_takes_the_largest_factor_and_the_prediction_the_expected_one() -> None:
    expert = ladders(0, [[1]], [[4.0, 0.0]], weights=0.5, limits=[3.0])
    plan = Planner(problem_of([expert], merged_energy=4.0)).plan(0)
    assert plan.predicted_error == pytest.approx(0.5)
    assert plan.error_bound == pytest.approx(3.0)


def test_errors_are_relative_to_the_merged_delta() -> None:
    expert = ladders(0, [[1]], [[1.0, 0.0]])
    assert Planner(problem_of([expert], merged_energy=16.0)).plan(0).merged_norm == 4.0
    assert Planner(problem_of([expert], merged_energy=16.0)).plan(0).predicted_error == 0.25
    lost = Planner(problem_of([expert], merged_energy=0.0)).plan(0)
    assert lost.predicted_error == 1.0
    assert Planner(problem_of([expert], merged_energy=0.0)).plan(1).predicted_error == 0.0


@many
@given(problems(), shares)
def test_base_and_output_are_counted_where_blocks_are_computed(
    problem: Problem, share: float
) -> None:
    plan = Planner(problem).plan(budget_of(problem, share))
    computed = layers_of(plan).any(axis=0) | problem.always
    assert plan.base_bytes == problem.base_bytes[computed].sum()
    assert plan.write_bytes == problem.write_bytes[computed].sum()


def test_a_plan_carries_what_it_was_made_from() -> None:
    experts = [ladders(k, [[3]], [[1.0, 0.0]], raw_bytes=100 + k) for k in range(2)]
    problem = problem_of(experts)
    plan = Planner(problem).plan(4)
    assert (plan.budget_bytes, plan.raw_bytes) == (4, 201)
    assert (plan.recipe, plan.base) == (problem.recipe, problem.base)
    assert (plan.tensors, plan.kept) == (problem.tensors, problem.kept)
    assert [expert.ref for expert in plan.experts] == ["expert0", "expert1"]
    assert [expert.commit for expert in plan.experts] == [e.commit for e in experts]


def test_a_problem_without_blocks_has_a_plan() -> None:
    expert = ladders(0, np.zeros((0, 1)), np.zeros((0, 2)))  # type: ignore[arg-type]
    for budget in (0, 100, None):
        plan = Planner(problem_of([expert], merged_energy=0.0)).plan(budget)
        assert (plan.planned_bytes, plan.predicted_error) == (0, 0.0)
        assert plan.experts[0].layers == b""


# -- size ----------------------------------------------------------------------------------------


def large_problem(experts: int, blocks: int, layers: int) -> Problem:
    """Experts of one model of ``blocks`` full blocks, each with its own energies."""
    rng = np.random.default_rng(5)
    planes = np.array([33_000] * (layers - 1) + [200_000])
    fractions = 4.0 ** -np.arange(layers + 1)
    fractions[-1] = 0.0
    out = []
    for k in range(experts):
        energy = rng.lognormal(0, 1, blocks)
        expert = ladders(0, np.broadcast_to(planes, (blocks, layers)), energy[:, None] * fractions)
        leaders = np.full(blocks, k, np.int16)
        out.append(dataclasses.replace(expert, leaders=leaders, raw_bytes=blocks << 20))
    return problem_of(out)


def planned_with_peak(problem: Problem) -> tuple[Plan, int]:
    tracemalloc.start()
    try:
        plan = Planner(problem).plan(problem.raw_bytes // 10)
        return plan, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.slow
def test_a_plan_of_twenty_experts_of_a_large_model_takes_memory_in_proportion() -> None:
    small = large_problem(20, 14_000, layers=5)
    large = large_problem(20, 140_000, layers=5)
    _, small_peak = planned_with_peak(small)
    plan, large_peak = planned_with_peak(large)
    assert large_peak < 10.5 * small_peak
    own = sum(expert.costs.nbytes + expert.remaining.nbytes for expert in large.experts)
    assert large_peak < 8 * own
    assert 0.999 * plan.budget_bytes < plan.planned_bytes <= plan.budget_bytes  # type: ignore[operator]
    assert sum(len(expert.layers) for expert in plan.experts) == 20 * 140_000


@given(st.data())
@settings(deadline=None, max_examples=20)
@example(None)
def test_many_blocks_fill_the_budget_almost_wholly(data: st.DataObject | None) -> None:
    share = data.draw(st.floats(0.02, 0.6)) if data else 0.1
    problem = large_problem(3, 400, layers=3)
    plan = Planner(problem).plan(int(share * everything(problem)))
    assert plan.budget_bytes is not None
    assert plan.budget_bytes - plan.planned_bytes < 233_000
