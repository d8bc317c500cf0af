"""DELLA against plain torch: ranks within rows, probabilities, and what is kept."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from mergegit.errors import BadRecipe
from mergegit.kernels.combine import Coefficients
from mergegit.merge.methods import METHODS
from mergegit.merge.methods.dare import stream_key
from tests.families import generator
from tests.merge import reference_sparse as reference
from tests.merge.reference import Models
from tests.merge.tensors import (
    NAMES,
    coefficients_of,
    context_of,
    merge_tensor,
    random_models,
    recipe_of,
)
from tests.merge.test_methods import DTYPES, WEIGHTS, same

ROWS, COLUMNS = 30, 200
both = pytest.mark.parametrize("name", ["della", "della_linear"])
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=[NAMES[dtype] for dtype in DTYPES])
weighted = pytest.mark.parametrize("weights", ["different", "both signs", "cancelling"])


def matrices(
    *key: object, dtype: torch.dtype = torch.bfloat16, experts: int = 3,
    shape: tuple[int, ...] = (ROWS, COLUMNS),
) -> tuple[torch.Tensor, list[torch.Tensor]]:  # fmt: skip
    base, moved = random_models(*key, n=math.prod(shape), experts=experts, dtype=dtype)
    return base.reshape(shape), [expert.reshape(shape) for expert in moved]


def keys(count: int, seed: int = 0, name: str = "weight") -> list[int]:
    return [stream_key(seed, b"expert%d" % place, name) for place in range(count)]


@both
@every_dtype
@weighted
def test_each_row_is_sampled_by_rank_and_fused(name: str, dtype: torch.dtype, weights: str) -> None:
    base, experts = matrices("della", dtype=dtype)
    densities = [0.3, 0.75, 1.0]
    for rescale, normalize in ((True, True), (False, True), (True, False)):
        got = merge_tensor(
            name, base, experts, weights=WEIGHTS[weights], densities=densities, seed=5,
            parameters={
                "normalize": normalize, "lambda": 0.8, "rescale": rescale, "epsilon": 0.2,
            },
        )  # fmt: skip
        models = Models(base, experts, WEIGHTS[weights], densities=densities)
        want = reference.della(
            models, [0.2] * 3, keys(3, seed=5), normalize=normalize, lam=0.8, rescale=rescale,
            ties=name == "della",
        )  # fmt: skip
        assert same(got, want)


def test_larger_deltas_of_a_row_are_kept_more_often() -> None:
    n, rounds = 64, 700
    expert = torch.arange(1.0, n + 1)[torch.randperm(n, generator=generator("order"))]
    kept = torch.zeros(n, dtype=torch.float64)
    for seed in range(rounds):
        kept += merge_tensor(
            "della_linear", torch.zeros(n), [expert], densities=[0.5], seed=seed,
            parameters={"epsilon": 0.3},
        ) != 0  # fmt: skip
    share = (kept / rounds)[expert.argsort()]
    want = torch.linspace(0.2, 0.8, n, dtype=torch.float64)
    noise = torch.sqrt(want * (1 - want) / rounds)
    assert float(((share - want) / noise).abs().max()) < 4.5
    assert float(((share - want) / noise).square().mean()) == pytest.approx(1.0, abs=0.5)


def test_the_share_that_is_kept_of_every_row_is_the_density() -> None:
    base, experts = matrices("share", dtype=torch.float32, experts=1, shape=(400, 1000))
    # Rows of all sizes, that a threshold over the whole tensor would not treat alike.
    experts[0] = base + (experts[0] - base) * torch.logspace(-3, 3, 400)[:, None]
    moved = experts[0] != base
    for density in (0.2, 0.6):
        got = merge_tensor("della_linear", base, experts, densities=[density], dtype=torch.float32)
        kept = ((got != base) & moved).double()
        by_row = kept.sum(1) / moved.double().sum(1)
        # A tenth of each row did not move: those that did are kept a little more often.
        assert float(by_row.mean()) == pytest.approx(density + 0.015, abs=0.004)
        assert float(by_row.std()) == pytest.approx(
            math.sqrt(density * (1 - density) / 900), rel=0.2
        )


def test_what_is_dropped_is_made_up_for() -> None:
    base, experts = matrices("expectation", dtype=torch.float32, experts=2, shape=(20, 100))
    weights, densities, rounds = [0.6, -0.4], [0.3, 0.6], 300
    mean = torch.zeros(base.shape, dtype=torch.float64)
    for seed in range(rounds):
        merged = merge_tensor(
            "della_linear", base, experts, weights=weights, densities=densities, seed=seed
        )
        mean += (merged - base).double() / rounds
    deltas = [(expert - base) for expert in experts]
    want = sum(w * d.double() for w, d in zip(weights, deltas, strict=True))
    variance = torch.zeros(base.shape, dtype=torch.float64)
    for w, d, p in zip(weights, deltas, densities, strict=True):
        chance = reference.probabilities(d, p, 0.15)
        variance += w**2 * d.double() ** 2 * (1 - chance) / chance
    scaled = (mean - want) / (torch.sqrt(variance / rounds) + 1e-7)
    assert float(scaled.abs().max()) < 6
    assert float(scaled[variance > 0].square().mean()) == pytest.approx(1.0, abs=0.2)


def test_without_rescaling_what_is_kept_stays_as_it_is() -> None:
    base, experts = matrices("as it is", experts=1, dtype=torch.float32)
    got = merge_tensor(
        "della_linear", base, experts, densities=[0.5], parameters={"rescale": False}
    )
    assert bool(((got == base) | ((got - experts[0]).abs() < 1e-7)).all())
    assert 0.4 < float((got != base).double().mean()) < 0.6


def test_equal_magnitudes_are_kept_alike() -> None:
    n = 200_000
    signs = torch.where(torch.rand(n, generator=generator("signs")) < 0.5, -1.0, 1.0)
    got = merge_tensor(
        "della_linear", torch.zeros(n), [signs], densities=[0.4], parameters={"epsilon": 0.3}
    )
    assert set(got.abs().unique().tolist()) == {0.0, np.float32(1 / 0.4)}
    kept = (got != 0).double()
    deviation = math.sqrt(0.24 / n)
    assert float(kept.mean()) == pytest.approx(0.4, abs=4.5 * deviation)
    for half in kept.view(2, -1):
        assert float(half.mean()) == pytest.approx(0.4, abs=6.5 * deviation)


@both
def test_a_density_of_one_drops_nothing_whatever_epsilon_is(name: str) -> None:
    base, experts = matrices("all", experts=1)
    got = merge_tensor(name, base, experts, densities=[1.0], parameters={"epsilon": 0.4})
    assert same(got, experts[0])


@both
@pytest.mark.parametrize(("density", "epsilon"), [(0.9, 0.15), (0.1, 0.1), (0.5, 0.5)])
def test_probabilities_outside_0_and_1_are_refused(
    name: str, density: float, epsilon: float
) -> None:
    recipe = recipe_of(name, densities=[density], parameters={"epsilon": epsilon})
    base, experts = matrices("refused", experts=1)
    with pytest.raises(BadRecipe, match=f"density {density:g} and epsilon {epsilon:g}") as error:
        recipe.method.rule(context_of(recipe, base, experts))
    assert "weight" in error.value.message
    assert "an epsilon below" in error.value.hint


@both
@pytest.mark.parametrize(
    "shape", [(), (0,), (0, 4), (4, 0), (1,), (7,), (5, 1), (3, 4, 2), (2, 3, 4, 5), (40, 24)]
)
def test_a_row_is_a_run_along_the_last_axis(name: str, shape: tuple[int, ...]) -> None:
    base, experts = matrices("shapes", experts=2, shape=shape)
    got = merge_tensor(name, base, experts, densities=[0.5, 0.4])
    models = Models(base, experts, [1.0] * 2, densities=[0.5, 0.4])
    normalize = name == "della"
    want = reference.della(models, [0.15] * 2, keys(2), normalize=normalize, ties=name == "della")
    assert got.shape == want.shape
    assert torch.equal(got, want)


@both
@pytest.mark.parametrize("block", [1, 7, 200, 300, 2048])
def test_blocks_change_nothing(name: str, block: int) -> None:
    """Rows lie across blocks, and are longer than some."""
    shape = (3, 40) if block == 1 else (20, 600)
    base, experts = matrices("blocks", experts=2, dtype=torch.float32, shape=shape)
    whole, parts = (
        merge_tensor(name, base, experts, densities=[0.5, 0.3], block=size)
        for size in (None, block)
    )
    assert torch.equal(whole, parts)


@both
def test_a_mask_does_not_depend_on_the_other_experts_or_their_order(name: str) -> None:
    base, (one, two) = matrices("others", experts=2, dtype=torch.float32)

    def kept(experts: list[torch.Tensor], named: list[bytes], weights: list[float]) -> torch.Tensor:
        merged = merge_tensor(
            name, base, experts, densities=[0.4] * len(experts), keys=named, weights=weights
        )
        return merged != base

    alone = kept([one], [b"me"], [1.0])
    assert torch.equal(alone, kept([one, two], [b"me", b"other"], [1.0, 0.0]))
    assert torch.equal(alone, kept([two, one], [b"other", b"me"], [0.0, 1.0]))
    assert 0 < int(alone.sum()) < alone.numel() / 2
    assert not torch.equal(alone, kept([one], [b"other"], [1.0]))


@both
def test_the_seed_and_the_tensors_name_decide_what_is_drawn(name: str) -> None:
    base, experts = matrices("seeds", experts=2)
    options = {"densities": [0.5, 0.5]}
    first = merge_tensor(name, base, experts, seed=1, **options)
    assert torch.equal(first, merge_tensor(name, base, experts, seed=1, **options))
    assert not torch.equal(first, merge_tensor(name, base, experts, seed=2, **options))
    assert not torch.equal(first, merge_tensor(name, base, experts, seed=1, name="x", **options))


@both
def test_experts_that_are_the_base_change_nothing(name: str) -> None:
    base, _ = matrices("still", experts=1)
    assert same(merge_tensor(name, base, [base, base], densities=[0.3, 0.5]), base)


@both
def test_planning_counts_with_the_mean_probability(name: str) -> None:
    base, experts = matrices("planned", experts=2)
    recipe = recipe_of(name, 2, weights=[0.5, 1.0], densities=[0.4, 0.8])
    nearest = coefficients_of(recipe, base, experts)
    total = 1.0 if name == "della_linear" else nearest.limits[1] / (1 / 0.8)
    assert nearest.amplitudes == pytest.approx([0.5 * total, 1.0 * total])
    assert nearest.spreads**2 == pytest.approx([0.25 / 0.4, 1.0 / 0.8])
    assert nearest.keeps_base


@both
def test_what_drops_nothing_is_one_weighted_sum(name: str) -> None:
    base, experts = matrices("plain", experts=2)
    recipe = recipe_of(name, 2)
    assert isinstance(recipe.method.rule(context_of(recipe, base, experts)), Coefficients)


def test_the_defaults_are_mergekits() -> None:
    for name, normalize in (("della", True), ("della_linear", False)):
        assert {p.name: p.default for p in METHODS[name].parameters} == {
            "weight": 1.0, "density": 1.0, "epsilon": 0.15, "normalize": normalize, "lambda": 1.0,
            "lines": 0.0, "rescale": True,
        }  # fmt: skip
