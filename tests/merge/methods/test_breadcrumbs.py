"""Model Breadcrumbs against plain torch: what it drops at both ends."""

from __future__ import annotations

import pytest
import torch

from mergegit.merge.methods import METHODS
from tests.merge import reference_sparse as reference
from tests.merge.reference import Models, close_elections
from tests.merge.tensors import coefficients_of, merge_tensor, random_models, recipe_of
from tests.merge.test_methods import N, either_way, every_dtype, every_weights, same

both = pytest.mark.parametrize("name", ["breadcrumbs", "breadcrumbs_ties"])


@both
@every_dtype
@every_weights
@either_way
def test_the_largest_and_the_smallest_are_dropped_and_the_rest_is_merged(
    name: str, dtype: torch.dtype, weights: list[float], normalize: bool
) -> None:
    base, experts = random_models("crumbs", n=N, experts=3, dtype=dtype)
    densities, gamma = [0.8, 0.4, 0.97], 0.05
    got = merge_tensor(
        name, base, experts, weights=weights, densities=densities,
        parameters={"normalize": normalize, "lambda": 0.7, "gamma": gamma},
    )  # fmt: skip
    models = Models(base, experts, weights, densities=densities)
    want = reference.breadcrumbs(
        models, [gamma] * 3, normalize=normalize, lam=0.7, ties=name.endswith("ties")
    )
    # What equals an edge is kept by both.
    but = reference.near_an_inexact_edge(models, [gamma] * 3)
    assert but.float().mean() < 0.02
    assert same(got, want, but)


@pytest.mark.parametrize(("density", "gamma"), [(0.5, 0.1), (0.9, 0.01), (0.25, 0.5), (0.7, 0.0)])
def test_so_many_are_dropped_at_both_ends(density: float, gamma: float) -> None:
    n = 1000
    expert = torch.arange(1.0, n + 1)[torch.randperm(n, generator=torch.manual_seed(1))]
    got = merge_tensor(
        "breadcrumbs", torch.zeros(n), [expert], densities=[density], parameters={"gamma": gamma}
    )
    kept = expert[got != 0].sort().values
    highest = n - int(gamma * n)
    assert kept.tolist() == list(range(highest - int(density * n) + 1, highest + 1))


def test_fewer_outliers_are_dropped_where_the_density_leaves_no_room() -> None:
    expert = torch.arange(1.0, 101.0)
    got = merge_tensor(
        "breadcrumbs", torch.zeros(100), [expert], densities=[0.95], parameters={"gamma": 0.2}
    )
    assert got[got != 0].tolist() == list(range(1, 96))


@both
def test_a_density_of_one_drops_nothing(name: str) -> None:
    base, experts = random_models("all", n=N, experts=1, dtype=torch.bfloat16)
    got = merge_tensor(name, base, experts, densities=[1.0], parameters={"gamma": 0.3})
    assert same(got, experts[0])


@both
def test_a_density_of_zero_keeps_nothing(name: str) -> None:
    base, experts = random_models("none", n=N, experts=2, dtype=torch.bfloat16)
    assert same(merge_tensor(name, base, experts, densities=[0.0, 0.0]), base)


def test_without_outliers_to_drop_nothing_is_cut_above() -> None:
    base, experts = random_models("no outliers", n=N, experts=1, dtype=torch.bfloat16)
    crumbs = merge_tensor("breadcrumbs", base, experts, densities=[0.4], parameters={"gamma": 1e-9})
    trimmed = merge_tensor("ties", base, experts, densities=[0.4])
    assert same(crumbs, trimmed)
    assert not same(crumbs, base)


def test_equal_magnitudes_at_an_edge_are_all_kept() -> None:
    expert = torch.tensor([4.0, -3.0, 3.0, 3.0, -2.0, 2.0, 1.0, 1.0, 0.5, 0.0])
    got = merge_tensor(
        "breadcrumbs", torch.zeros(10), [expert], densities=[0.4], parameters={"gamma": 0.2}
    )
    # The two largest are 4 and one of the threes, and the sixth largest is one of the twos.
    assert got.tolist() == [0.0, -3.0, 3.0, 3.0, -2.0, 2.0, 0.0, 0.0, 0.0, 0.0]


def test_deltas_of_one_magnitude_are_no_outliers() -> None:
    expert = torch.full((50,), -0.25)
    got = merge_tensor(
        "breadcrumbs", torch.zeros(50), [expert], densities=[0.5], parameters={"gamma": 0.2}
    )
    assert torch.equal(got, expert)


def test_an_expert_that_moved_in_no_more_than_its_outliers_is_dropped() -> None:
    expert = torch.zeros(100)
    expert[:5] = torch.arange(1.0, 6.0)
    options = {"densities": [0.5], "parameters": {"gamma": 0.05}}
    assert not merge_tensor("breadcrumbs", torch.zeros(100), [expert], **options).any()
    expert[5] = 0.5
    assert merge_tensor("breadcrumbs", torch.zeros(100), [expert], **options).sum() == 0.5


def test_each_expert_has_a_density_and_a_gamma_of_its_own() -> None:
    base, experts = random_models("own", n=N, experts=2, dtype=torch.float16)
    recipe = recipe_of("breadcrumbs", 2, densities=[0.2, 0.7], parameters={"gamma": 0.1})
    ceilings = coefficients_of(recipe, base, experts).ceilings
    assert ceilings is not None
    kept = reference.kept_of(Models(base, experts, [1.0] * 2, densities=[0.2, 0.7]), [0.1, 0.1])
    for ceiling, part in zip(ceilings, kept, strict=True):
        assert part.largest < ceiling <= part.largest * (1 + 2.0**-22)


def test_rescaling_keeps_the_l1_norm() -> None:
    base, experts = random_models("rescale", n=N, experts=1, dtype=torch.float32)
    got = merge_tensor(
        "breadcrumbs", base, experts, densities=[0.6], parameters={"rescale": True, "gamma": 0.05}
    )
    before = (experts[0] - base).double().abs().sum()
    after = (got - base).double().abs().sum()
    assert float(after / before) == pytest.approx(1.0, abs=1e-3)
    assert 0.5 < float((got != base).double().mean()) < 0.61


@both
@pytest.mark.parametrize("shape", [(), (0,), (0, 4), (1,), (5,), (3, 1, 2)])
def test_small_tensors_are_the_reference(name: str, shape: tuple[int, ...]) -> None:
    base = torch.zeros(shape)
    experts = [torch.randn(shape, generator=torch.manual_seed(k)).bfloat16() for k in (1, 2)]
    densities = [0.5, 0.9]
    got = merge_tensor(name, base, experts, densities=densities, parameters={"gamma": 0.3})
    models = Models(base, experts, [1.0] * 2, densities=densities)
    want = reference.breadcrumbs(models, [0.3] * 2, ties=name.endswith("ties"))
    assert torch.equal(got, want)
    if base.numel() == 1:
        assert got.item() != 0.0


@both
@pytest.mark.parametrize("block", [1, 77, 4096])
def test_blocks_change_nothing(name: str, block: int) -> None:
    base, experts = random_models(
        "blocks", n=400 if block == 1 else N, experts=2, dtype=torch.float32
    )
    whole, parts = (
        merge_tensor(name, base, experts, densities=[0.5, 0.8], block=size)
        for size in (None, block)
    )
    assert torch.equal(whole, parts)


@both
def test_the_order_of_experts_changes_roundings_alone(name: str) -> None:
    base, experts = random_models("order", n=N, experts=3, dtype=torch.float32)
    densities = [0.5, 0.8, 0.9]
    one = merge_tensor(name, base, experts, densities=densities)
    other = merge_tensor(name, base, experts[::-1], densities=densities[::-1])
    settled = ~close_elections(Models(base, experts, [1.0] * 3, densities=densities))
    assert float((one - other)[settled].abs().max()) < 1e-7


def test_the_defaults_are_mergekits() -> None:
    for name in ("breadcrumbs", "breadcrumbs_ties"):
        defaults = {p.name: p.default for p in METHODS[name].parameters}
        assert defaults == {
            "weight": 1.0, "density": 1.0, "gamma": 0.01, "normalize": False, "lambda": 1.0,
            "lines": 0.0, "rescale": False,
        }  # fmt: skip
        assert METHODS[name].trims
