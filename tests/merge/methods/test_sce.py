"""SCE against plain torch: what it selects, how it weights, whom it erases."""

from __future__ import annotations

import pytest
import torch

from mergegit.merge.method import Banded
from mergegit.merge.methods import METHODS
from tests.merge import reference_sparse as reference
from tests.merge.reference import Models, close_elections, ulps
from tests.merge.tensors import (
    bands_of,
    context_of,
    merge_tensor,
    random_models,
    random_tensor,
    recipe_of,
)
from tests.merge.test_methods import N, every_dtype, same


def uneven(
    *key: object, dtype: torch.dtype, n: int = N, experts: int = 3
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Experts of which each moves by its own measure, so that their weights are far apart."""
    base, moved = random_models(*key, n=n, experts=experts, dtype=dtype)
    return base, [
        (base.float() + (expert.float() - base.float()) * (1 + place)).to(dtype)
        for place, expert in enumerate(moved)
    ]


def models_of(base: torch.Tensor, experts: list[torch.Tensor], **options: object) -> Models:
    return Models(base, experts, [1.0] * len(experts), **options)  # type: ignore[arg-type]


@every_dtype
@pytest.mark.parametrize("experts", [1, 2, 3, 5])
@pytest.mark.parametrize("lam", [1.0, 0.6])
def test_experts_are_weighted_by_energy_and_minorities_erased(
    dtype: torch.dtype, experts: int, lam: float
) -> None:
    base, moved = uneven("sce", dtype=dtype, experts=experts)
    got = merge_tensor("sce", base, moved, parameters={"lambda": lam})
    assert same(got, reference.sce(models_of(base, moved), lam=lam))


@every_dtype
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_the_top_share_by_variance_is_selected(dtype: torch.dtype, share: float) -> None:
    base, experts = uneven("selected", dtype=dtype)
    got = merge_tensor("sce", base, experts, parameters={"select_topk": share}, dtype=torch.float32)
    want = reference.sce(models_of(base, experts, dtype=torch.float32), select_topk=share)
    deltas = models_of(base, experts).deltas()
    spread = reference.spread(deltas)
    mask, least = reference.select(deltas, share)
    # The threshold is known to the cell of the histogram in which it lies.
    sure = (spread - least).abs() > 2.0**-9 * least
    assert float(sure.double().mean()) > 0.95
    moved = (got != base.float()) & sure
    assert not bool((moved & ~mask).any())
    assert float((moved == (mask & sure)).double().mean()) > 0.999
    # And so are the energies: weights differ by what the elements of one cell hold.
    error = (got.double() - want.double())[sure].norm()
    assert float(error) < 2e-3 * float((want.double() - base.double()).norm())


def test_in_a_large_tensor_the_threshold_is_all_but_exact() -> None:
    base, experts = uneven("large", dtype=torch.bfloat16, n=400_000)
    options = {"select_topk": 0.3}
    got = merge_tensor("sce", base, experts, parameters=options)
    want = reference.sce(models_of(base, experts), select_topk=0.3)
    apart = ulps(got, want)
    # Weights that are 3e-5 apart turn a rounding here and there.
    assert float((apart > 0).double().mean()) < 1e-3
    assert float((apart > 1).double().mean()) < 1e-4
    count = int((reference.spread(models_of(base, experts).deltas()) > 0).sum())
    delta = merge_tensor("sce", base, experts, parameters=options, dtype=torch.float32)
    assert int((delta != base.float()).sum()) == pytest.approx(int(0.3 * count), abs=20)


def test_a_share_of_nothing_keeps_the_base() -> None:
    base, experts = uneven("nothing", dtype=torch.bfloat16)
    assert same(merge_tensor("sce", base, experts, parameters={"select_topk": 0.0}), base)


def test_elements_in_which_experts_agree_are_not_selected() -> None:
    base = torch.zeros(6)
    one = torch.tensor([1.0, 0.3, 0.1, 2.0, -1.0, 0.0])
    two = torch.tensor([1.0, 0.3, 0.1, 1.0, 1.5, 0.0])
    got = merge_tensor("sce", base, [one, two, one], parameters={"select_topk": 0.99})
    assert got.tolist()[:3] == [0.0, 0.0, 0.0]
    assert got[4] != 0.0
    whole = merge_tensor("sce", base, [one, two, one])
    assert whole[:3].tolist() == pytest.approx([1.0, 0.3, 0.1])


def test_energies_count_the_selected_elements_alone() -> None:
    base = torch.zeros(4)
    # The experts differ most in the last two elements, where the first has nine times the energy.
    one = torch.tensor([0.1, 0.1, 3.0, 0.0])
    two = torch.tensor([0.2, 0.2, 0.0, 1.0])
    three = torch.tensor([0.1, 0.2, 1.0, 1.0])
    got = merge_tensor("sce", base, [one, two, three], parameters={"select_topk": 0.5})
    weights = [9.0, 1.0, 2.0]
    third = (weights[0] * 3.0 + weights[2] * 1.0) / (weights[0] + weights[2])
    assert got.tolist() == pytest.approx([0.0, 0.0, third, 1.0])


def test_the_sign_is_elected_without_weights() -> None:
    base = torch.zeros(3)
    # The first expert's energy is by far the largest, but it is outvoted in the first element.
    one = torch.tensor([-1.0, 9.0, 9.0])
    others = [torch.tensor([0.6, 0.1, -0.1]), torch.tensor([0.6, 0.1, 0.1])]
    got = merge_tensor("sce", base, [one, *others])
    assert got[0].item() == pytest.approx(0.6)


def test_a_sum_of_zero_counts_as_positive() -> None:
    up, down = torch.full((3,), 0.5), torch.full((3,), -0.5)
    for experts in ([up, down], [down, up]):
        assert torch.equal(merge_tensor("sce", torch.zeros(3), experts), up)


@pytest.mark.parametrize("share", [1.0, 0.4])
@pytest.mark.parametrize("exponent", [-60, -20, 20])
def test_the_scale_of_the_deltas_changes_nothing(share: float, exponent: int) -> None:
    base = torch.zeros(N)
    experts = [random_tensor("scale", k, n=N) * (1 + k) for k in range(3)]
    options = {"select_topk": share}
    small = merge_tensor(
        "sce", base, [expert * 2.0**exponent for expert in experts], parameters=options
    )
    assert torch.equal(
        small, merge_tensor("sce", base, experts, parameters=options) * 2.0**exponent
    )


def test_one_expert_has_no_variance_to_select_by() -> None:
    base, (expert,) = uneven("alone", dtype=torch.bfloat16, experts=1)
    assert same(merge_tensor("sce", base, [expert]), expert)
    assert same(merge_tensor("sce", base, [expert], parameters={"select_topk": 0.5}), base)


@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("shape", [(), (0,), (0, 4), (1,), (5,), (3, 1, 2)])
def test_small_tensors_are_the_reference(share: float, shape: tuple[int, ...]) -> None:
    base = torch.zeros(shape)
    experts = [torch.randn(shape, generator=torch.manual_seed(k)).bfloat16() for k in (1, 2, 3)]
    got = merge_tensor("sce", base, experts, parameters={"select_topk": share})
    want = reference.sce(models_of(base, experts), select_topk=share)
    assert got.shape == want.shape
    assert torch.allclose(got, want, rtol=1e-6, atol=0)
    if base.numel() == 1:
        assert got.item() != 0.0


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_experts_that_are_the_base_change_nothing(share: float) -> None:
    base, experts = uneven("still", dtype=torch.bfloat16)
    options = {"select_topk": share}
    assert same(merge_tensor("sce", base, [base, base], parameters=options), base)
    if share == 1.0:
        # One that did not move joins no side: the others are merged as without it.
        assert same(
            merge_tensor("sce", base, [*experts, base], parameters=options),
            merge_tensor("sce", base, experts, parameters=options),
        )


@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("block", [1, 77, 4096, 4097])
def test_blocks_change_nothing(share: float, block: int) -> None:
    base, experts = uneven("blocks", dtype=torch.float32, n=300 if block == 1 else N)
    whole, parts = (
        merge_tensor("sce", base, experts, parameters={"select_topk": share}, block=size)
        for size in (None, block)
    )
    assert torch.equal(whole, parts)


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_the_order_of_experts_changes_roundings_alone(share: float) -> None:
    base, experts = uneven("order", dtype=torch.float32)
    one, other = (
        merge_tensor("sce", base, order, parameters={"select_topk": share})
        for order in (experts, experts[::-1])
    )
    settled = ~close_elections(models_of(base, experts, densities=[1.0] * 3))
    assert float((one - other)[settled].abs().max()) < 1e-7


def test_a_tensor_is_surveyed_only_where_something_is_selected() -> None:
    base, experts = uneven("surveys", dtype=torch.bfloat16)
    sce = METHODS["sce"]
    assert sce.survey is not None
    for share, surveyed in ((1.0, False), (0.5, True), (0.0, False)):
        recipe = recipe_of("sce", 3, parameters={"select_topk": share})
        assert (sce.survey(context_of(recipe, base, experts)) is not None) == surveyed


@pytest.mark.parametrize("sizes", [(1.0,), (1.0, 1.0, 1.0, 1.0), (1.0, 3.0, 0.2), (0.01, 1.0)])
def test_planning_counts_experts_as_far_as_they_come_through(sizes: tuple[float, ...]) -> None:
    n = 200_000
    base = torch.zeros(n)
    experts = [random_tensor("through", k, n=n) * size for k, size in enumerate(sizes)]
    recipe = recipe_of("sce", len(sizes), parameters={"lambda": 0.5})
    nearest = METHODS["sce"].coefficients(context_of(recipe, base, experts))
    weights = torch.tensor([float(expert.double().square().sum()) for expert in experts])
    stacked = torch.stack(experts)
    own = weights[:, None] * (stacked.sign() == torch.where(stacked.sum(0) >= 0, 1.0, -1.0))
    came_through = (own / own.sum(0)).mean(1).sqrt()
    assert nearest.limits == pytest.approx((0.5 * came_through).tolist(), rel=0.12)
    assert nearest.keeps_base


def test_an_expert_that_did_not_move_is_not_read() -> None:
    base, experts = uneven("unmoved", dtype=torch.bfloat16)
    recipe = recipe_of("sce", 4)
    limits = METHODS["sce"].coefficients(context_of(recipe, base, [*experts, base])).limits
    assert (limits[:3] > 0).all()
    assert limits[3] == 0


def test_weights_are_of_the_whole_deltas_whatever_was_read() -> None:
    """The first expert as one plane tells it: the sign, and one magnitude for all."""
    base, (one, two, three) = uneven("unread", dtype=torch.float32)
    delta = one - base
    read = base + delta.sign() * delta.abs().mean()
    context = context_of(recipe_of("sce", 3), base, [one, two, three])
    rule = METHODS["sce"].rule(context)
    assert isinstance(rule, Banded)
    (band,) = bands_of(base, [read, two, three])
    merged = torch.from_numpy(rule.apply(band)) - base
    energies = [float((e - base).double().square().sum()) for e in (one, two, three)]
    first, second, third = (torch.from_numpy(delta) for delta in band.deltas)
    agree = (first > 0) & (second > 0) & (third > 0)
    want = energies[0] * first + energies[1] * second + energies[2] * third
    assert torch.allclose(merged[agree], (want / sum(energies))[agree], atol=1e-7)


def test_the_defaults_are_mergekits() -> None:
    assert {p.name: p.default for p in METHODS["sce"].parameters} == {
        "select_topk": 1.0, "lambda": 1.0, "lines": 0.0,
    }  # fmt: skip
