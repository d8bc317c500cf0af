"""Every method against plain torch, and what is said of its parameters."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from mergegit.errors import BadRecipe
from mergegit.kernels.combine import ALWAYS
from mergegit.merge.methods import METHODS, method
from mergegit.merge.methods.dare import stream_key
from tests.merge import reference
from tests.merge.reference import Models, ulps
from tests.merge.tensors import (
    NAMES,
    coefficients_of,
    merge_tensor,
    random_models,
    random_tensor,
    recipe_of,
)

N = 6000
SUMS = ["linear", "task_arithmetic", "ties", "dare_linear", "dare_ties"]
"""Methods that are one weighted sum of any number of experts' deltas."""
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2]
WEIGHTS = {
    "equal": [1.0, 1.0, 1.0],
    "different": [0.3, 0.55, 0.1],
    "both signs": [0.7, -0.4, 1.2],
    "all negative": [-0.5, -0.25, -1.0],
    "one of zero": [0.6, 0.0, 0.8],
    "all of zero": [0.0, 0.0, 0.0],
    "cancelling": [0.5, -0.5, 0.0],
}

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=[NAMES[dtype] for dtype in DTYPES])
every_weights = pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS.keys())
either_way = pytest.mark.parametrize("normalize", [True, False], ids=["normalized", "plain"])
random_methods = pytest.mark.parametrize("name", ["dare_linear", "dare_ties"])


def same(got: torch.Tensor, want: torch.Tensor, but: torch.Tensor | None = None) -> bool:
    """Equal in every bit, but for signs of zero and the elements in ``but``."""
    apart = ulps(got, want)
    if but is not None:
        assert but.float().mean() < 0.2, "too little is left to compare"
        apart = apart[~but]
    return int(apart.max()) == 0


# -- linear and task arithmetic ------------------------------------------------------------------


@every_dtype
@every_weights
@either_way
def test_linear_is_the_weighted_average(
    dtype: torch.dtype, weights: list[float], normalize: bool
) -> None:
    base, experts = random_models("linear", n=N, experts=3, dtype=dtype)
    total = abs(sum(weights))
    # There is no average under weights that sum to zero: it is the plain sum then.
    divides = normalize and total >= 1e-8
    got = merge_tensor(
        "linear", base, experts, weights=weights, parameters={"normalize": normalize}
    )
    exact = Models(base, experts, weights, precision=torch.float64)
    want = reference.linear(exact, normalize=divides)
    # A float32 result is a few roundings of its largest term away; narrower ones hide them.
    largest = max(float(tensor.float().abs().max()) for tensor in (base, *experts))
    slack = 16 * 2.0**-24 * largest * sum(map(abs, weights)) / (total if divides else 1)
    close = (got.double() - want.double()).abs() <= slack
    assert bool(((ulps(got, want) <= 1) | close).all())
    if dtype.itemsize < 4:
        # Weights like 0.3 and 0.55 put one result in a hundred half way between two values.
        assert (ulps(got, want) == 0).float().mean() > 0.97


def test_linear_of_a_model_with_itself_is_the_model() -> None:
    base, (expert,) = random_models("itself", n=N, experts=1, dtype=torch.bfloat16)
    assert same(merge_tensor("linear", base, [expert, expert, expert]), expert)


@every_dtype
@every_weights
@either_way
@pytest.mark.parametrize("lam", [1.0, 0.4, -1.5])
def test_task_arithmetic_adds_the_weighted_deltas(
    dtype: torch.dtype, weights: list[float], normalize: bool, lam: float
) -> None:
    base, experts = random_models("task", n=N, experts=3, dtype=dtype)
    got = merge_tensor(
        "task_arithmetic", base, experts, weights=weights,
        parameters={"normalize": normalize, "lambda": lam},
    )  # fmt: skip
    models = Models(base, experts, weights)
    assert same(got, reference.task_arithmetic(models, normalize=normalize, lam=lam))


@pytest.mark.parametrize("name", SUMS)
def test_the_defaults_are_those_of_the_table(name: str) -> None:
    defaults = {parameter.name: parameter.default for parameter in METHODS[name].parameters}
    assert defaults == {
        "linear": {"weight": 1.0, "normalize": True},
        "task_arithmetic": {"weight": 1.0, "normalize": False, "lambda": 1.0, "lines": 0.0},
        "ties": {
            "weight": 1.0, "density": 1.0, "normalize": True, "lambda": 1.0, "lines": 0.0,
            "rescale": False,
        },
        "dare_linear": {
            "weight": 1.0, "density": 1.0, "normalize": False, "lambda": 1.0, "lines": 0.0,
            "rescale": True,
        },
        "dare_ties": {
            "weight": 1.0, "density": 1.0, "normalize": False, "lambda": 1.0, "lines": 0.0,
            "rescale": True,
        },
    }[name]  # fmt: skip


@pytest.mark.parametrize("name", SUMS)
def test_an_expert_that_is_the_base_changes_nothing(name: str) -> None:
    base, _ = random_models("still", n=N, experts=1, dtype=torch.bfloat16)
    assert same(merge_tensor(name, base, [base, base]), base)


@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=[NAMES[dtype] for dtype in DTYPES])
def test_one_expert_of_weight_one_gives_that_expert(name: str, dtype: torch.dtype) -> None:
    base, experts = random_models("alone", n=N, experts=1, dtype=dtype)
    assert same(merge_tensor(name, base, experts), experts[0])


# -- ties ----------------------------------------------------------------------------------------


@every_dtype
@every_weights
@either_way
@pytest.mark.parametrize("density", [1.0, 0.5, 0.13])
def test_ties_trims_elects_and_merges(
    dtype: torch.dtype, weights: list[float], normalize: bool, density: float
) -> None:
    base, experts = random_models("ties", n=N, experts=3, dtype=dtype)
    densities = [density, density / 2, min(1.0, density * 2)]
    got = merge_tensor(
        "ties", base, experts, weights=weights, densities=densities,
        parameters={"normalize": normalize, "lambda": 0.7},
    )  # fmt: skip
    models = Models(base, experts, weights, densities=densities)
    want = reference.ties(models, normalize=normalize, lam=0.7)
    # The reference keeps all elements that equal a threshold, as the product does, so that nothing
    # need be excluded where thresholds are exact, as they are for types of at most 16 bits. Those
    # of float32 are known to the cell of the histogram.
    but = reference.undecided(models, cell=2.0**-9) if dtype == torch.float32 else None
    assert same(got, want, but)


def test_ties_of_float32_misplaces_at_most_a_few_elements_in_a_thousand() -> None:
    n = 200_000
    base, experts = random_models("fine", n=n, experts=1, dtype=torch.float32)
    for density in (0.05, 0.2, 0.5, 0.8):
        got = merge_tensor("ties", base, experts, densities=[density])
        want = reference.ties(Models(base, experts, [1.0], densities=[density]))
        assert (got != want).float().mean() < 1e-4
        assert abs(int((got != base).sum()) - int(density * n)) < n * 1e-4


@pytest.mark.parametrize("density", [0.01, 0.1, 0.5, 0.9])
def test_ties_keeps_the_largest_deltas(density: float) -> None:
    base, experts = random_models("largest", n=N, experts=1, dtype=torch.bfloat16)
    got = merge_tensor("ties", base, experts, densities=[density])
    delta = (experts[0].float() - base.float()).abs()
    kept = got != base
    assert delta[kept].min() > delta[~kept].max()
    at_threshold = int((delta == delta[kept].min()).sum())
    assert int(density * N) <= int(kept.sum()) < int(density * N) + at_threshold


def test_ties_takes_a_density_of_each_expert_for_itself() -> None:
    base, experts = random_models("own", n=N, experts=2, dtype=torch.float16)
    densities = [0.2, 0.7]
    got = merge_tensor("ties", base, experts, densities=densities)
    models = Models(base, experts, [1.0, 1.0], densities=densities)
    assert same(got, reference.ties(models))
    swapped = merge_tensor("ties", base, experts, densities=densities[::-1])
    assert not same(got, swapped)


def test_ties_with_rescale_keeps_the_l1_norm() -> None:
    base, experts = random_models("rescale", n=N, experts=1, dtype=torch.float32)
    got = merge_tensor("ties", base, experts, densities=[0.3], parameters={"rescale": True})
    before = (experts[0] - base).double().abs().sum()
    after = (got - base).double().abs().sum()
    # Magnitudes above an edge of the histogram count with the middle of their cell.
    assert float(after / before) == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_ties_with_rescale_is_the_reference_within_the_histograms_cells(dtype: torch.dtype) -> None:
    base, experts = random_models("rescaled", n=N, experts=3, dtype=dtype)
    densities = [0.3, 0.6, 1.0]
    got = merge_tensor("ties", base, experts, densities=densities, parameters={"rescale": True})
    models = Models(base, experts, [1.0] * 3, densities=densities, dtype=torch.float32)
    want = reference.ties(models, rescale=True)
    error = (got.float() - want.to(dtype).float())[~reference.undecided(models)]
    delta = want - base.float()
    assert error.norm() / delta.norm() < 2e-3


def test_ties_counts_a_sum_of_zero_as_positive() -> None:
    base = torch.zeros(4)
    up, down = torch.full((4,), 0.25), torch.full((4,), -0.25)
    assert torch.equal(merge_tensor("ties", base, [up, down]), up)
    assert torch.equal(merge_tensor("ties", base, [down, up]), up)


def test_ties_elects_by_weighted_deltas() -> None:
    base = torch.zeros(1)
    experts = [torch.tensor([0.3]), torch.tensor([-0.2])]
    light = merge_tensor("ties", base, experts, weights=[1.0, 1.0])
    heavy = merge_tensor("ties", base, experts, weights=[1.0, 2.0])
    assert light.item() == pytest.approx(0.3)
    assert heavy.item() == pytest.approx(-0.2)


def test_ties_with_a_negative_weight_votes_for_the_other_side() -> None:
    base = torch.zeros(1)
    experts = [torch.tensor([0.3]), torch.tensor([0.2])]
    got = merge_tensor("ties", base, experts, weights=[1.0, -2.0], parameters={"normalize": False})
    assert got.item() == pytest.approx(-0.4)


def test_ties_divides_by_the_weights_of_those_that_agree() -> None:
    base = torch.zeros(2)
    experts = [torch.tensor([0.4, 0.4]), torch.tensor([0.2, -0.1]), torch.tensor([0.3, 0.1])]
    got = merge_tensor("ties", base, experts, weights=[1.0, 3.0, 2.0])
    assert got.tolist() == pytest.approx([(0.4 + 0.6 + 0.6) / 6, (0.4 + 0.2) / 3])


def test_an_element_that_was_trimmed_joins_neither_side() -> None:
    base = torch.zeros(4)
    a = torch.tensor([4.0, 3.0, 0.5, 0.5])
    b = torch.tensor([0.1, 0.1, 2.0, 2.0])
    got = merge_tensor("ties", base, [a, b], densities=[0.5, 0.5])
    assert got.tolist() == [4.0, 3.0, 2.0, 2.0]


def test_ties_at_a_density_of_zero_keeps_nothing() -> None:
    base, experts = random_models("none", n=N, experts=2, dtype=torch.bfloat16)
    assert same(merge_tensor("ties", base, experts, densities=[0.0, 0.0]), base)


@pytest.mark.parametrize("n", [1, 3, 9])
def test_ties_at_any_other_density_keeps_one_element_at_least(n: int) -> None:
    base, expert = torch.zeros(n), torch.arange(1.0, n + 1)
    got = merge_tensor("ties", base, [expert], densities=[0.1])
    assert got.tolist() == [0.0] * (n - 1) + [float(n)]


# -- dare ----------------------------------------------------------------------------------------


def masks_of(
    name: str, base: torch.Tensor, experts: list[torch.Tensor], densities: list[float], seed: int
) -> list[torch.Tensor]:
    """What each expert keeps when it is merged alone."""
    masks = []
    for place, (expert, density) in enumerate(zip(experts, densities, strict=True)):
        ones = merge_tensor(
            name, torch.zeros(base.shape), [torch.ones(base.shape)], densities=[density],
            keys=[b"expert%d" % place], seed=seed,
        )  # fmt: skip
        masks.append(ones != 0)
        alone = merge_tensor(
            name, base, [expert], densities=[density], keys=[b"expert%d" % place], seed=seed,
        )  # fmt: skip
        assert bool((masks[-1] | (alone == base)).all())
    return masks


@random_methods
@every_dtype
@every_weights
@either_way
@pytest.mark.parametrize("rescale", [True, False], ids=["rescaled", "unscaled"])
def test_dare_is_the_plain_method_on_what_is_kept(
    name: str, dtype: torch.dtype, weights: list[float], normalize: bool, rescale: bool
) -> None:
    base, experts = random_models("dare", n=N, experts=3, dtype=dtype)
    densities = [0.3, 0.75, 1.0]
    masks = masks_of(name, base, experts, densities, seed=7)
    got = merge_tensor(
        name, base, experts, weights=weights, densities=densities, seed=7,
        parameters={"normalize": normalize, "lambda": 0.8, "rescale": rescale},
    )  # fmt: skip
    models = Models(base, experts, weights, masks=masks, densities=densities)
    want = reference.METHODS[name](models, normalize=normalize, lam=0.8, rescale=rescale)
    assert same(got, want)


@random_methods
@pytest.mark.parametrize("density", [0.01, 0.1, 0.5, 0.9])
def test_the_share_that_is_kept_is_the_density(name: str, density: float) -> None:
    n = 400_000
    kept = merge_tensor(name, torch.zeros(n), [torch.ones(n)], densities=[density]) != 0
    deviation = math.sqrt(density * (1 - density) / n)
    assert float(kept.double().mean()) == pytest.approx(density, abs=4.5 * deviation)
    halves = [float(half.double().mean()) for half in kept.view(2, -1)]
    assert halves == pytest.approx([density] * 2, abs=4.5 * math.sqrt(2) * deviation)


@random_methods
def test_a_density_of_one_keeps_everything(name: str) -> None:
    base, experts = random_models("all", n=N, experts=1, dtype=torch.bfloat16)
    assert same(merge_tensor(name, base, experts, densities=[1.0]), experts[0])


@random_methods
def test_the_mask_does_not_depend_on_which_other_experts_take_part(name: str) -> None:
    n = N
    kept = []
    for others in ([], [b"other"], [b"third", b"other"]):
        experts = [torch.ones(n), *(torch.zeros(n) for _ in others)]
        merged = merge_tensor(
            name, torch.zeros(n), experts, densities=[0.4] * len(experts), keys=[b"me", *others]
        )
        kept.append(merged != 0)
        last = merge_tensor(
            name, torch.zeros(n), experts[::-1], densities=[0.4] * len(experts),
            keys=[*others[::-1], b"me"],
        )  # fmt: skip
        kept.append(last != 0)
    assert all(torch.equal(kept[0], other) for other in kept)
    assert 0 < int(kept[0].sum()) < n


@random_methods
def test_the_mask_does_not_depend_on_the_blocks(name: str) -> None:
    base, experts = random_models("blocks", n=N, experts=2, dtype=torch.float32)
    whole = merge_tensor(name, base, experts, densities=[0.5, 0.2])
    for block in (1, 7, 4096, 5999):
        parts = merge_tensor(
            name, base[: 4 * block], [e[: 4 * block] for e in experts],
            densities=[0.5, 0.2], block=block,
        )  # fmt: skip
        assert same(parts, whole[: 4 * block])


@random_methods
def test_the_mask_does_not_depend_on_values_or_dtypes(name: str) -> None:
    def kept(values: torch.Tensor) -> torch.Tensor:
        return merge_tensor(name, torch.zeros_like(values), [values], densities=[0.5]) != 0

    ones = kept(torch.ones(N))
    assert torch.equal(kept(torch.full((N,), -3.0)), ones)
    assert torch.equal(kept(torch.ones(N, dtype=torch.bfloat16)), ones)


@random_methods
def test_seed_expert_and_tensor_each_give_another_mask(name: str) -> None:
    n = 20_000

    def kept(**options: object) -> torch.Tensor:
        merged = merge_tensor(
            name, torch.zeros(n), [torch.ones(n)], densities=[0.5], **options  # type: ignore[arg-type]
        )  # fmt: skip
        return merged != 0

    masks = [
        kept(), kept(seed=1), kept(seed=-1), kept(keys=[b"b"]), kept(name="other"),
        kept(seed=1, keys=[b"b"], name="other"),
    ]  # fmt: skip
    for one, other in itertools.combinations(masks, 2):
        # Independent masks agree on half of the elements.
        assert float((one == other).double().mean()) == pytest.approx(0.5, abs=0.02)
    assert torch.equal(kept(), masks[0])


@random_methods
def test_neighbouring_elements_are_drawn_independently(name: str) -> None:
    n = 400_000
    kept = (merge_tensor(name, torch.zeros(n), [torch.ones(n)], densities=[0.5]) != 0).double()
    centred = kept - 0.5
    for distance in (1, 2, 64, 4096):
        product = centred[:-distance] * centred[distance:]
        assert abs(float(product.mean())) < 5 * 0.25 / math.sqrt(n)


def test_dare_linear_keeps_the_expectation() -> None:
    n = 2000
    base, experts = random_models("expectation", n=n, experts=2, dtype=torch.float32)
    weights, densities, rounds = [0.6, -0.4], [0.3, 0.6], 400
    mean = torch.zeros(n, dtype=torch.float64)
    for seed in range(rounds):
        merged = merge_tensor(
            "dare_linear", base, experts, weights=weights, densities=densities, seed=seed
        )
        mean += (merged - base).double() / rounds
    deltas = [(expert - base).double() for expert in experts]
    want = sum(w * d for w, d in zip(weights, deltas, strict=True))
    variance = sum(
        w**2 * d**2 * (1 - p) / p for w, d, p in zip(weights, deltas, densities, strict=True)
    )
    noise = torch.sqrt(variance / rounds) + 1e-7
    scaled = (mean - want) / noise
    assert float(scaled.abs().max()) < 6
    assert float(scaled[variance > 0].square().mean()) == pytest.approx(1.0, abs=0.2)


def test_dare_without_rescale_shrinks_by_the_density() -> None:
    n = 200_000
    kept = merge_tensor(
        "dare_linear", torch.zeros(n), [torch.ones(n)], densities=[0.25],
        parameters={"rescale": False},
    )  # fmt: skip
    assert set(kept.unique().tolist()) == {0.0, 1.0}
    assert float(kept.mean()) == pytest.approx(0.25, abs=0.01)


def test_streams_depend_on_all_of_seed_expert_and_tensor() -> None:
    seeds = (0, 1, -1, 10, 2**40)
    experts = (bytes(32) + b"0", bytes(32) + b"1", b"\n1" * 16 + b"0", bytes(32) + b"10")
    tensors = ("x", "y", "1\nx", "")
    keys = {
        stream_key(seed, expert, tensor)
        for seed, expert, tensor in itertools.product(seeds, experts, tensors)
    }
    assert len(keys) == len(seeds) * len(experts) * len(tensors)
    assert all(0 <= key < 2**64 for key in keys)


# -- what methods say of themselves --------------------------------------------------------------


@pytest.mark.parametrize("name", SUMS)
def test_a_block_without_contributions_is_the_bases(name: str) -> None:
    base = random_tensor("quiet", n=10)
    coefficients = coefficients_of(recipe_of(name, 2), base, [base, base])
    assert coefficients.base_scale == 1.0


def test_linear_without_normalize_scales_the_base_itself() -> None:
    base = torch.tensor([1.0, 2.0])
    recipe = recipe_of("linear", 2, weights=[0.5, 1.0], parameters={"normalize": False})
    assert coefficients_of(recipe, base, [base, base]).base_scale == 1.5
    got = merge_tensor(
        "linear", base, [base, base], weights=[0.5, 1.0], parameters={"normalize": False}
    )
    assert got.tolist() == [1.5, 3.0]


@pytest.mark.parametrize("name", SUMS)
def test_additive_methods_are_linear_in_each_delta(name: str) -> None:
    base = torch.zeros(N)
    _, (a, b) = random_models("additive", n=N, experts=2, dtype=torch.float32)
    densities = [0.5, 0.5] if any(p.name == "density" for p in METHODS[name].parameters) else None
    both = merge_tensor(name, base, [a, b], densities=densities)
    parts = [
        merge_tensor(name, base, [x, y], densities=densities) for x, y in ((a, base), (base, b))
    ]
    adds_up = torch.allclose(both, parts[0] + parts[1], rtol=0, atol=1e-6)
    assert adds_up == METHODS[name].additive


@pytest.mark.parametrize("name", SUMS)
def test_methods_that_trim_have_thresholds_where_the_density_is_below_one(name: str) -> None:
    base, experts = random_models("trims", n=N, experts=1, dtype=torch.bfloat16)
    has_density = any(parameter.name == "density" for parameter in METHODS[name].parameters)
    recipe = recipe_of(name, densities=[0.5] if has_density else None)
    coefficients = coefficients_of(recipe, base, experts)
    assert bool(coefficients.thresholds[0] > 0) == METHODS[name].trims


@pytest.mark.parametrize("name", SUMS)
def test_only_dare_draws(name: str) -> None:
    base, experts = random_models("draws", n=N, experts=1, dtype=torch.bfloat16)
    has_density = any(parameter.name == "density" for parameter in METHODS[name].parameters)
    recipe = recipe_of(name, densities=[0.5] if has_density else None)
    keep = int(coefficients_of(recipe, base, experts).keep[0])
    assert keep == (ALWAYS // 2 if name.startswith("dare") else ALWAYS)


def test_thresholds_come_from_statistics_and_not_from_what_was_read() -> None:
    base, experts = random_models("before", n=N, experts=1, dtype=torch.bfloat16)
    coefficients = coefficients_of(recipe_of("ties", densities=[0.3]), base, experts)
    want = reference.trim_threshold(experts[0].float() - base.float(), 0.3)
    assert coefficients.thresholds[0] == np.float32(want)


def test_an_unknown_method_is_refused_with_the_names_of_all() -> None:
    with pytest.raises(BadRecipe, match="there is no method 'slurp'") as error:
        method("slurp")
    for name in METHODS:
        assert name in error.value.hint


def test_a_method_is_found_by_its_name() -> None:
    assert all(method(name).name == name for name in METHODS)


# -- parameters ----------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0.0, 1.0, -1.0, 3, 1e9])
def test_a_weight_may_be_any_finite_number(value: float) -> None:
    checked = METHODS["linear"].parameter("weight").check(value, "weight")
    assert checked == value
    assert isinstance(checked, float)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["weight", "density", "lambda"])
def test_no_parameter_may_be_infinite_or_nan(name: str, value: float) -> None:
    with pytest.raises(BadRecipe):
        METHODS["ties"].parameter(name).check(value, name)


@pytest.mark.parametrize(
    ("method_name", "value", "fits"),
    [
        ("ties", 0.0, True), ("ties", 1.0, True), ("ties", -0.01, False), ("ties", 1.01, False),
        ("dare_linear", 0.0, False), ("dare_ties", 0.0, False), ("dare_ties", 1e-6, True),
        ("dare_linear", 1.0, True), ("dare_linear", 1.5, False),
    ],
)  # fmt: skip
def test_a_density_lies_between_its_bounds(method_name: str, value: float, fits: bool) -> None:
    parameter = METHODS[method_name].parameter("density")
    if fits:
        assert parameter.check(value, "density") == value
        return
    with pytest.raises(BadRecipe, match=r"density is .*must be"):
        parameter.check(value, "density")


@pytest.mark.parametrize("value", [1.0, 0, "true"])
def test_a_switch_is_true_or_false(value: object) -> None:
    with pytest.raises(BadRecipe, match="not true or false"):
        METHODS["ties"].parameter("normalize").check(value, "normalize")  # type: ignore[arg-type]


def test_a_number_is_not_true_or_false() -> None:
    with pytest.raises(BadRecipe, match="not a number"):
        METHODS["ties"].parameter("weight").check(True, "weight")


def test_an_unknown_parameter_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(BadRecipe, match="no parameter 'densty'") as error:
        METHODS["ties"].parameter("densty")
    assert "density" in error.value.hint
