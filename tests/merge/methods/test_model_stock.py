"""Model Stock against plain torch, in float64."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from mergegit.merge.method import Banded
from mergegit.merge.methods import METHODS
from tests.families import generator
from tests.merge import reference_spherical as reference
from tests.merge.methods.rounding import rounded_once
from tests.merge.tensors import context_of, merge_tensor, recipe_of

Tensor = torch.Tensor
SHAPE = (40, 75)
either = pytest.mark.parametrize("filter_wise", [False, True], ids=["tensor", "rows"])


def family(
    count: int, dtype: torch.dtype, common: float = 1.0, shape: tuple[int, ...] = SHAPE
) -> tuple[Tensor, list[Tensor]]:
    """Experts whose deltas have a part in common that is ``common`` times as large as their own."""

    def noise(*key: object) -> Tensor:
        return torch.randn(shape, generator=generator("stock", *key))

    base = 0.02 * noise("base")
    shared = common * noise("shared")
    experts = [base + 1e-3 * (shared + noise(place)) for place in range(count)]
    return base.to(dtype), [expert.to(dtype) for expert in experts]


@either
@pytest.mark.parametrize("count", [2, 3, 6])
@pytest.mark.parametrize("common", [0.0, 0.5, 5.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_average_is_drawn_to_the_base_by_the_mean_cosine(
    filter_wise: bool, count: int, common: float, dtype: torch.dtype
) -> None:
    base, experts = family(count, dtype, common)
    got = merge_tensor("model_stock", base, experts, parameters={"filter_wise": filter_wise})
    want = reference.model_stock(
        base.double(), [expert.double() for expert in experts], filter_wise=filter_wise
    )
    assert rounded_once(got, want, [base, *experts])


def test_the_ratio_of_two_experts_at_sixty_degrees() -> None:
    base = torch.tensor([1.0, 2.0])
    experts = [base + torch.tensor([2.0, 0.0]), base + torch.tensor([0.5, math.sqrt(0.75)])]
    got = merge_tensor("model_stock", base, experts)
    # 2 cos / (1 + cos) = 2/3 of the average (1.25, 0.433) away from the base.
    assert got.tolist() == pytest.approx([1 + 2.5 / 3, 2 + math.sqrt(0.75) / 3], abs=1e-6)


@either
def test_experts_that_agree_give_their_average(filter_wise: bool) -> None:
    base, (expert, _) = family(2, torch.bfloat16)
    got = merge_tensor("model_stock", base, [expert] * 4, parameters={"filter_wise": filter_wise})
    assert torch.equal(got, expert)


@either
def test_experts_at_right_angles_give_the_base(filter_wise: bool) -> None:
    base = torch.ones(2, 4)
    experts = [base.clone(), base.clone()]
    experts[0][:, 0] += 1.0
    experts[1][:, 1] += 1.0
    got = merge_tensor("model_stock", base, experts, parameters={"filter_wise": filter_wise})
    assert torch.equal(got, base)


@either
def test_where_deltas_balance_nothing_is_moved(filter_wise: bool) -> None:
    """The ratio is minus one over nothing there."""
    base = torch.zeros(1, 2)
    delta = torch.tensor([[0.5, 0.25]])
    for experts in ([delta, -delta], [delta, -delta, torch.zeros(1, 2)]):
        got = merge_tensor("model_stock", base, experts, parameters={"filter_wise": filter_wise})
        assert bool(got.isfinite().all())
        if len(experts) == 2:
            assert torch.equal(got, base)


@either
def test_a_delta_of_zeros_agrees_with_none(filter_wise: bool) -> None:
    base, experts = family(2, torch.float32, common=3.0)
    got = merge_tensor(
        "model_stock", base, [*experts, base], parameters={"filter_wise": filter_wise}
    )
    want = reference.model_stock(
        base.double(), [e.double() for e in (*experts, base)], filter_wise=filter_wise
    )
    assert rounded_once(got, want, [base, *experts])


@pytest.mark.parametrize("scale", [1.0, 1e-4, 1e-12])
def test_the_ratio_does_not_depend_on_how_small_deltas_are(scale: float) -> None:
    """Rows of small deltas have products of norms far below one in a million."""
    base = torch.zeros(SHAPE)
    _, experts = family(3, torch.float32)
    deltas = [1e-3 * torch.sign(expert) for expert in experts]
    small = merge_tensor(
        "model_stock", base, [scale * d for d in deltas], parameters={"filter_wise": True}
    )
    whole = merge_tensor("model_stock", base, deltas, parameters={"filter_wise": True})
    torch.testing.assert_close(small / scale, whole, rtol=1e-6, atol=1e-12)


@either
@pytest.mark.parametrize("block", [1000, 75, 7])
def test_blocks_may_be_cut_anywhere(filter_wise: bool, block: int) -> None:
    base, experts = family(3, torch.float32)
    options = {"filter_wise": filter_wise}
    whole = merge_tensor("model_stock", base, experts, parameters=options)
    cut = merge_tensor("model_stock", base, experts, parameters=options, block=block)
    assert torch.equal(cut, whole)


def test_by_rows_a_vector_is_one_row() -> None:
    base, experts = family(3, torch.float32, shape=(50,))
    by_rows = merge_tensor("model_stock", base, experts, parameters={"filter_wise": True})
    torch.testing.assert_close(by_rows, merge_tensor("model_stock", base, experts))


@either
@pytest.mark.parametrize("surveyed", [True, False])
def test_the_base_is_kept_where_nothing_was_read(filter_wise: bool, surveyed: bool) -> None:
    base, experts = family(3, torch.float32)
    recipe = recipe_of("model_stock", 3, parameters={"filter_wise": filter_wise})
    context = context_of(recipe, base, experts)
    method = METHODS["model_stock"]
    assert method.survey is not None
    if surveyed:
        survey = method.survey(context)
        assert survey is not None
        context = replace(context, surveyed=survey.finish())
    rule = method.rule(context)
    assert isinstance(rule, Banded) == (filter_wise and surveyed)
    found = method.coefficients(context)
    assert found.keeps_base
    assert bool(np.isfinite(found.weights).all())


def test_before_the_survey_the_ratio_is_that_of_the_estimates() -> None:
    base, experts = family(3, torch.float32)
    context = context_of(recipe_of("model_stock", 3), base, experts)
    gram = np.full((4, 4), 0.5)
    np.fill_diagonal(gram, 1.0)
    found = METHODS["model_stock"].coefficients(replace(context, gram=gram))
    # A mean cosine of 1/2: 3 * 1/2 / (1 + 2 * 1/2) = 3/4 of a third each.
    assert found.weights.tolist() == [0.25] * 3
