"""Consensus task arithmetic against plain torch."""

from __future__ import annotations

import pytest
import torch

from mergegit.errors import BadRecipe
from mergegit.merge.methods import METHODS
from tests.merge import reference_sparse as reference
from tests.merge.reference import Models, task_arithmetic
from tests.merge.tensors import context_of, merge_tensor, random_models, recipe_of
from tests.merge.test_methods import N, every_dtype, every_weights, same


@every_dtype
@every_weights
def test_what_matters_to_several_experts_is_added_up(
    dtype: torch.dtype, weights: list[float]
) -> None:
    base, experts = random_models("consensus", n=N, experts=3, dtype=dtype)
    models = Models(base, experts, weights)
    for share, agree in ((0.4, 2.0), (0.0, 3.0), (1.0, 1.0)):
        got = merge_tensor(
            "consensus", base, experts, weights=weights,
            parameters={"tall_lambda": share, "agree": agree, "lambda": 0.7},
        )  # fmt: skip
        want = reference.consensus(models, tall_lambda=share, agree=agree, lam=0.7)
        assert same(got, want)


def test_some_elements_are_kept_and_some_are_not() -> None:
    base, experts = random_models("some", n=N, experts=4, dtype=torch.float32)
    shares = []
    for agree in (0, 1, 2, 3, 4):
        got = merge_tensor("consensus", base, experts, parameters={"agree": float(agree)})
        shares.append(float((got != base).double().mean()))
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 0.99
    assert 0.1 < shares[4] < shares[2] < 0.95


def test_asked_of_nobody_it_is_task_arithmetic() -> None:
    base, experts = random_models("nobody", n=N, experts=3, dtype=torch.bfloat16)
    weights = [0.3, 0.5, -0.2]
    got = merge_tensor("consensus", base, experts, weights=weights, parameters={"agree": 0.0})
    assert same(got, task_arithmetic(Models(base, experts, weights)))


def test_selfish_elements_are_dropped_and_shared_ones_kept() -> None:
    base = torch.zeros(3)
    one = torch.tensor([1.0, 1.0, 0.2])
    two = torch.tensor([0.0, 0.8, 0.2])
    three = torch.tensor([0.1, -0.1, 0.2])
    got = merge_tensor("consensus", base, [one, two, three])
    assert got.tolist() == pytest.approx([0.0, 1.7, 0.6])


def test_masks_do_not_depend_on_a_factor_of_all_weights() -> None:
    base = torch.zeros(N)
    _, experts = random_models("factor", n=N, experts=3, dtype=torch.float32)
    one = merge_tensor("consensus", base, experts)
    half = merge_tensor("consensus", base, experts, weights=[0.5] * 3)
    assert torch.equal(half, one / 2)
    assert torch.equal(half, merge_tensor("consensus", base, experts, parameters={"lambda": 0.5}))


def test_an_expert_of_weight_zero_has_no_vote() -> None:
    base, experts = random_models("no vote", n=N, experts=3, dtype=torch.bfloat16)
    with_it = merge_tensor("consensus", base, experts, weights=[0.5, 0.7, 0.0])
    assert same(with_it, merge_tensor("consensus", base, experts[:2], weights=[0.5, 0.7]))


def test_experts_that_are_the_base_change_nothing() -> None:
    base, _ = random_models("still", n=N, experts=1, dtype=torch.bfloat16)
    assert same(merge_tensor("consensus", base, [base, base]), base)


@pytest.mark.parametrize("shape", [(), (0,), (0, 4), (1,), (5,), (3, 1, 2)])
def test_small_tensors_are_the_reference(shape: tuple[int, ...]) -> None:
    base = torch.zeros(shape)
    experts = [torch.randn(shape, generator=torch.manual_seed(k)).bfloat16() for k in (1, 2, 3)]
    got = merge_tensor("consensus", base, experts)
    want = reference.consensus(Models(base, experts, [1.0] * 3))
    assert got.shape == want.shape
    assert torch.equal(got, want)


@pytest.mark.parametrize("block", [1, 77, 4096, 4097])
def test_blocks_change_nothing(block: int) -> None:
    n = 300 if block == 1 else N
    base, experts = random_models("blocks", n=n, experts=3, dtype=torch.float32)
    whole, parts = (merge_tensor("consensus", base, experts, block=size) for size in (None, block))
    assert torch.equal(whole, parts)


def test_the_order_of_experts_changes_roundings_alone() -> None:
    base, experts = random_models("order", n=N, experts=3, dtype=torch.float32)
    weights = [0.3, 0.9, 0.6]
    one = merge_tensor("consensus", base, experts, weights=weights)
    other = merge_tensor("consensus", base, experts[::-1], weights=weights[::-1])
    close = reference.close_votes(Models(base, experts, weights), 0.4)
    assert float(close.double().mean()) < 0.01
    assert float((one - other)[~close].abs().max()) < 1e-7


def test_more_votes_than_experts_are_refused() -> None:
    base, experts = random_models("votes", n=8, experts=2, dtype=torch.float32)
    recipe = recipe_of("consensus", 2, parameters={"agree": 3.0})
    with pytest.raises(BadRecipe, match="agree is 3, and only 2 experts take part"):
        recipe.method.rule(context_of(recipe, base, experts))


def test_one_expert_alone_can_agree_with_nobody() -> None:
    with pytest.raises(BadRecipe, match="merges at least 2"):
        recipe_of("consensus", 1)


def test_planning_counts_with_the_plain_sum() -> None:
    base, experts = random_models("planned", n=N, experts=2, dtype=torch.bfloat16)
    recipe = recipe_of("consensus", 2, weights=[0.3, -0.6], parameters={"lambda": 0.5})
    nearest = recipe.method.coefficients(context_of(recipe, base, experts))
    assert nearest.amplitudes == pytest.approx([0.15, -0.3])
    assert nearest.keeps_base


def test_the_defaults_are_those_of_the_documents() -> None:
    assert {p.name: p.default for p in METHODS["consensus"].parameters} == {
        "weight": 1.0, "tall_lambda": 0.4, "agree": 2.0, "lambda": 1.0, "lines": 0.0,
    }  # fmt: skip
