"""RAM against plain torch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from mergegit.merge.methods import METHODS
from tests.families import generator
from tests.merge import reference_spherical as reference
from tests.merge.methods.rounding import rounded_once
from tests.merge.tensors import bands_of, context_of, merge_tensor, recipe_of

Tensor = torch.Tensor
N = 3000
both = pytest.mark.parametrize("method", ["ram", "ramplus_tl"])


def family(
    share: float, count: int = 3, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, list[Tensor]]:
    """Experts that moved about ``share`` of the elements each, every one for itself."""
    base = 0.02 * torch.randn(N, generator=generator("ram"))
    experts = []
    for place in range(count):
        delta = 1e-3 * torch.randn(N, generator=generator("ram", place))
        moved = torch.rand(N, generator=generator("ram", place, "moved")) < share
        experts.append((base.to(dtype).float() + torch.where(moved, delta, 0.0)).to(dtype))
    return base.to(dtype), experts


@pytest.mark.parametrize("share", [0.02, 0.3, 1.0])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("epsilon", [0.0, 1e-5, 1e-3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_what_one_moved_is_added_and_what_several_moved_is_averaged(
    share: float, count: int, epsilon: float, dtype: torch.dtype
) -> None:
    base, experts = family(share, count, dtype)
    exact = [base.double(), [expert.double() for expert in experts]]
    epsilon = float(np.float32(epsilon))
    got = merge_tensor("ram", base, experts, parameters={"epsilon": epsilon})
    assert rounded_once(got, reference.ram(*exact, epsilon=epsilon), [base, *experts])
    for r, alpha in ((0.1, 0.2), (2.0, 10.0), (-0.5, 0.01)):
        got = merge_tensor(
            "ramplus_tl", base, experts,
            parameters={"epsilon": epsilon, "r": r, "alpha": alpha},
        )  # fmt: skip
        want = reference.ram(*exact, epsilon=epsilon, r=r, alpha=alpha)
        assert rounded_once(got, want, [base, *experts])


def test_each_element_by_itself() -> None:
    base = torch.zeros(5)
    experts = [
        torch.tensor([1.0, 1.0, 1.0, 0.0, 1e-6]),
        torch.tensor([0.0, 3.0, 3.0, 0.0, 2.0]),
        torch.tensor([0.0, 0.0, -1.0, 0.0, -1e-6]),
    ]
    assert merge_tensor("ram", base, experts).tolist() == [1.0, 2.0, 1.0, 0.0, 2.0]


def test_ramplus_adds_more_of_what_is_an_experts_own_by_how_much_it_shares() -> None:
    base = torch.zeros(8)
    # The first moved 2 elements with the other and 4 alone; the other only those 2.
    first = torch.tensor([1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 0.0, 0.0])
    other = torch.tensor([0.0, 0.0, 0.0, 0.0, 4.0, 4.0, 0.0, 0.0])
    got = merge_tensor("ramplus_tl", base, [first, other], parameters={"r": 0.5, "alpha": 9.0})
    assert got.tolist() == [1.25] * 4 + [3.0, 3.0, 0.0, 0.0]
    capped = merge_tensor("ramplus_tl", base, [first, other], parameters={"r": 0.5, "alpha": 0.2})
    assert capped.tolist() == pytest.approx([1.1] * 4 + [3.0, 3.0, 0.0, 0.0])


@both
def test_a_delta_of_epsilon_has_not_moved(method: str) -> None:
    epsilon = np.float32(2.0**-10)
    base = torch.zeros(2)
    expert = torch.tensor([float(epsilon), float(np.nextafter(epsilon, np.float32(1)))])
    got = merge_tensor(method, base, [expert], parameters={"epsilon": float(epsilon)})
    assert got.tolist() == [0.0, expert[1].item()]


@both
@pytest.mark.parametrize("block", [1000, 7])
def test_blocks_may_be_cut_anywhere(method: str, block: int) -> None:
    base, experts = family(0.3)
    assert torch.equal(
        merge_tensor(method, base, experts, block=block), merge_tensor(method, base, experts)
    )


@both
def test_what_counts_as_moved_is_read_as_such(method: str) -> None:
    base, experts = family(0.3)
    recipe = recipe_of(method, 3, parameters={"epsilon": 1e-4})
    found = METHODS[method].coefficients(context_of(recipe, base, experts))
    assert bool((found.thresholds > np.float32(1e-4)).all())
    assert found.thresholds == pytest.approx([1e-4] * 3)
    assert found.keeps_base


def test_planning_weighs_deltas_by_how_many_experts_move_an_element_on_average() -> None:
    base, experts = family(0.4)
    context = context_of(recipe_of("ram", 3), base, experts)
    found = METHODS["ram"].coefficients(context)
    deltas = torch.stack([(expert - base).abs() > 1e-5 for expert in experts])
    counts = deltas.sum(dim=0)
    for place, weight in enumerate(found.weights):
        average = float((1 / counts[deltas[place]]).mean())
        assert weight == pytest.approx(average, rel=0.05)


def test_planning_estimates_the_overlap_before_it_is_counted() -> None:
    base, experts = family(0.4)
    options = {"r": 1.0, "alpha": 10.0}
    method = METHODS["ramplus_tl"]
    context = context_of(recipe_of("ramplus_tl", 3, parameters=options), base, experts)
    assert method.survey is not None
    survey = method.survey(context)
    assert survey is not None
    for band in bands_of(base, experts, 500):
        survey.add(survey.measure(band))
    counted = method.coefficients(replace(context, surveyed=survey.finish()))
    estimated = method.coefficients(context)
    assert estimated.weights.tolist() == pytest.approx(counted.weights.tolist(), rel=0.05)
    plain = METHODS["ram"].coefficients(context_of(recipe_of("ram", 3), base, experts))
    assert bool((estimated.weights > 1.2 * plain.weights).all())


def test_where_nothing_was_read_nothing_is_added() -> None:
    base, experts = family(0.3)
    method = METHODS["ramplus_tl"]
    context = context_of(recipe_of("ramplus_tl", 3), base, experts)
    assert method.survey is not None
    survey = method.survey(context)
    assert survey is not None
    found = method.coefficients(replace(context, surveyed=survey.finish()))
    assert found.keeps_base
    assert bool(np.isfinite(found.weights).all())
