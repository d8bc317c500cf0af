"""Nearswap and Arcee's fusion against plain torch."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from mergegit.kernels.combine import ALWAYS
from mergegit.merge.methods import METHODS, pairs
from tests.families import generator
from tests.merge import reference_spherical as reference
from tests.merge.methods.rounding import rounded_once
from tests.merge.tensors import context_of, merge_tensor, random_models, recipe_of

Tensor = torch.Tensor
SHAPE = (40, 75)


def family(dtype: torch.dtype = torch.float32, sigma: float = 5e-3) -> tuple[Tensor, list[Tensor]]:
    base, models = random_models("pair", n=3000, experts=2, dtype=dtype, sigma=sigma)
    return base.reshape(SHAPE), [model.reshape(SHAPE) for model in models]


def swapped(base: Tensor, models: list[Tensor], t: float, block: int | None = None) -> Tensor:
    return merge_tensor("nearswap", base, models, parameters={"t": t}, block=block)


# -- nearswap ------------------------------------------------------------------------------------


@pytest.mark.parametrize("t", [0.0, 1e-7, 1e-5, 2e-3, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("from_first", [True, False])
def test_nearswap_weighs_the_second_model_by_how_near_it_is(
    t: float, dtype: torch.dtype, from_first: bool
) -> None:
    base, models = family(dtype)
    got = swapped(models[0] if from_first else base, models, t)
    want = reference.nearswap(models[0].double(), models[1].double(), t)
    assert rounded_once(got, want, [base, *models])


def test_nearswap_moves_no_element_by_more_than_t() -> None:
    first = torch.tensor([1.0, 1.0, 1.0, 1.0])
    second = torch.tensor([1.25, 1.5, 3.0, -1.0])
    assert swapped(first, [first, second], 0.5).tolist() == [1.25, 1.5, 1.5, 0.5]


def test_nearswap_at_its_ends_is_one_of_the_models() -> None:
    _, models = family(torch.bfloat16)
    assert torch.equal(swapped(models[0], models, 0.0), models[0])
    assert torch.equal(swapped(models[0], models, 10.0), models[1])


def test_nearswap_takes_differences_below_a_millionth_for_a_millionth() -> None:
    first, second = torch.zeros(2), torch.tensor([4e-7, 1e-6])
    got = swapped(first, [first, second], 5e-7)
    assert got.tolist() == pytest.approx([2e-7, 5e-7])


def test_planning_counts_each_models_error_where_the_element_is_its_own() -> None:
    base, models = family()
    n = base.numel()
    gram = np.zeros((3, 3))
    gram[1, 1], gram[2, 2] = 1.5 * n, 0.5 * n
    gram[1, 2] = gram[2, 1] = 0.5 * n
    context = context_of(recipe_of("nearswap", 2, parameters={"t": 1.0}), base, models)
    found = METHODS["nearswap"].coefficients(replace(context, gram=gram))
    # Differences of variance 1.5 + 0.5 - 2 * 0.5 = 1: 68% are within 1.
    within = math.erf(math.sqrt(0.5))
    assert (found.keep / ALWAYS).tolist() == pytest.approx([1 - within, within], abs=1e-6)
    assert found.keeps_base


@pytest.mark.parametrize("t", [0.0, 1.0])
def test_planning_reads_nothing_into_models_that_do_not_differ(t: float) -> None:
    base, _ = family()
    context = context_of(recipe_of("nearswap", 2, parameters={"t": t}), base, [base, base])
    keep = METHODS["nearswap"].coefficients(context).keep
    assert int(keep.sum()) == ALWAYS


# -- arcee_fusion --------------------------------------------------------------------------------


def fused(base: Tensor, models: list[Tensor], block: int | None = None) -> Tensor:
    return merge_tensor("arcee_fusion", base, models, block=block)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sigma", [1e-3, 0.1, 3.0])
@pytest.mark.parametrize("from_first", [True, False])
def test_fusion_takes_what_is_important_enough(
    dtype: torch.dtype, sigma: float, from_first: bool
) -> None:
    base, models = family(dtype, sigma)
    got = fused(models[0] if from_first else base, models)
    first, second = (model.double() for model in models)
    importance = reference.fusion_importance(first, second)
    threshold = reference.fusion_threshold(importance)
    decided = (importance / threshold - 1).abs() > 1e-6
    assert decided.double().mean() > 0.99
    want = torch.where(importance >= threshold, models[1], models[0])
    # A float32 model is its base and its delta to the last bits only.
    slack = 2.0**-22 * float(models[1].abs().max()) if dtype == torch.float32 else 0.0
    torch.testing.assert_close(got[decided], want[decided], rtol=0, atol=slack)
    assert 0.01 < float((importance >= threshold).double().mean()) < 0.25


def test_fusion_looks_at_all_of_a_large_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The quartiles are those of every element, worked on some rows at a time."""
    base, models = family()
    whole = fused(base, models)
    monkeypatch.setattr(pairs, "_PIECE", 200)
    assert torch.equal(fused(base, models), whole)


def test_fusion_weighs_rows_by_how_much_their_softmax_moves() -> None:
    """Two rows move by the same amounts, one of them all in one direction."""
    generator_ = generator("rows")
    first = torch.zeros(2, 64)
    moves = 0.1 * torch.randn(64, generator=generator_).abs() + 0.5
    signs = torch.randint(0, 2, (64,), generator=generator_) * 2.0 - 1.0
    second = torch.stack([moves, moves * signs])
    taken = fused(first, [first, second]) != first
    assert not taken[0].any()
    importance = reference.fusion_importance(first.double(), second.double())
    assert importance[0].max() < importance[1].min()


def test_fusion_of_equal_models_is_the_model() -> None:
    base, (model, _) = family(torch.bfloat16)
    assert torch.equal(fused(base, [model, model]), model)


@pytest.mark.parametrize("shape", [(), (1,), (5, 1)])
def test_rows_of_one_element_tell_nothing_and_are_taken_over(shape: tuple[int, ...]) -> None:
    first, second = torch.zeros(shape), torch.ones(shape)
    assert torch.equal(fused(first, [first, second]), second)


def test_fusion_of_large_weights_does_not_overflow() -> None:
    first = torch.tensor([[1e4, -1e4, 0.0, 5.0]] + 9 * [[0.0, 1.0, 2.0, 3.0]])
    second = first + 0.125
    second[0] = first[0].flip(0)
    got = fused(first, [first, second])
    assert torch.equal(got[0], second[0])


@pytest.mark.parametrize("block", [1000, 75, 7])
def test_blocks_may_be_cut_anywhere(block: int) -> None:
    base, models = family()
    assert torch.equal(fused(base, models, block), fused(base, models))
    assert torch.equal(swapped(base, models, 2e-3, block), swapped(base, models, 2e-3))
