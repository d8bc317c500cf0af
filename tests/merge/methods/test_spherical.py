"""Slerp and its kin against plain torch, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch

from mergegit.kernels.combine import Coefficients
from mergegit.merge.method import Banded, Rule, TensorContext
from mergegit.merge.methods import METHODS
from mergegit.merge.settings import Scalar
from tests.merge import reference_spherical as reference
from tests.merge.methods.rounding import rounded_once
from tests.merge.tensors import (
    bands_of,
    context_of,
    merge_tensor,
    random_models,
    random_tensor,
    recipe_of,
)

Tensor = torch.Tensor
SHAPE = (40, 75)
WEIGHTS = (0.3, 0.6, 0.4)


@dataclass(frozen=True, slots=True)
class Case:
    """A method with its parameters, and what it is of a base and models in float64."""

    method: str
    exact: Callable[[Tensor, list[Tensor]], Tensor]
    models: int = 3
    weighted: bool = False
    parameters: Mapping[str, Scalar] = field(default_factory=dict)

    def merge(self, base: Tensor, models: list[Tensor], block: int | None = None) -> Tensor:
        return merge_tensor(
            self.method, base, models[: self.models], parameters=self.parameters, block=block,
            weights=WEIGHTS[: self.models] if self.weighted else None,
        )  # fmt: skip

    def context(self, base: Tensor, models: list[Tensor]) -> TensorContext:
        weights = WEIGHTS[: self.models] if self.weighted else None
        recipe = recipe_of(self.method, self.models, weights, parameters=self.parameters)
        return context_of(recipe, base, models[: self.models])

    def wanted(self, base: Tensor, models: list[Tensor]) -> Tensor:
        return self.exact(base.double(), [model.double() for model in models[: self.models]])


def nuslerp(deltas: bool, **options: bool) -> Case:
    def exact(base: Tensor, models: list[Tensor]) -> Tensor:
        return reference.nuslerp(*models, WEIGHTS[:2], base=base if deltas else None, **options)

    named = {f"nuslerp_{name}": value for name, value in options.items()}
    return Case("nuslerp", exact, 2, True, {"deltas": deltas, **named})


def multislerp(deltas: bool, normalize: bool) -> Case:
    def exact(base: Tensor, models: list[Tensor]) -> Tensor:
        return reference.multislerp(
            models, WEIGHTS, base=base if deltas else None, normalize=normalize
        )

    parameters = {"deltas": deltas, "normalize_weights": normalize}
    return Case("multislerp", exact, 3, True, parameters)


CASES = {
    "slerp": Case("slerp", lambda b, e: reference.slerp(*e, 0.3), 2, False, {"t": 0.3}),
    "slerp, beyond the end": Case(
        "slerp", lambda b, e: reference.slerp(*e, 1.4), 2, False, {"t": 1.4}
    ),
    "nuslerp": nuslerp(False),
    "nuslerp of rows": nuslerp(False, flatten=False),
    "nuslerp of columns": nuslerp(False, flatten=False, row_wise=True),
    "nuslerp of deltas": nuslerp(True),
    "nuslerp of deltas' rows": nuslerp(True, flatten=False),
    "nuslerp of deltas' columns": nuslerp(True, flatten=False, row_wise=True),
    "multislerp": multislerp(False, True),
    "multislerp, weights as they are": multislerp(False, False),
    "multislerp of deltas": multislerp(True, True),
    "karcher": Case("karcher", lambda b, e: reference.karcher(e)),
    "karcher, one step": Case(
        "karcher", lambda b, e: reference.karcher(e, max_iter=1), 3, False, {"max_iter": 1.0}
    ),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
SIGMAS = {"alike": 1e-4, "near": 5e-3, "far": 0.1}


def family(sigma: float, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    n = math.prod(SHAPE)
    base, models = random_models("arc", n=n, experts=3, dtype=dtype, sigma=sigma)
    return base.reshape(SHAPE), [model.reshape(SHAPE) for model in models]


def rule_of(case: Case, base: Tensor, models: list[Tensor], *, survey: bool = True) -> Rule:
    """The rule of a tensor; without ``survey``, of one of which nothing was read."""
    context = case.context(base, models)
    method = METHODS[case.method]
    assert method.survey is not None
    found = method.survey(context)
    assert found is not None
    if survey:
        for band in bands_of(base, models[: case.models]):
            found.add(found.measure(band))
    return method.rule(replace(context, surveyed=found.finish()))


def nearest(rule: Rule) -> Coefficients:
    return rule.nearest if isinstance(rule, Banded) else rule


@every_case
@pytest.mark.parametrize("sigma", SIGMAS.values(), ids=SIGMAS.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_it_is_the_methods_definition(case: Case, sigma: float, dtype: torch.dtype) -> None:
    base, models = family(sigma, dtype)
    got = case.merge(base, models)
    assert got.shape == base.shape
    assert rounded_once(got, case.wanted(base, models), [base, *models])


@every_case
@pytest.mark.parametrize("block", [1000, 75, 64, 7])
def test_blocks_may_be_cut_anywhere(case: Case, block: int) -> None:
    base, models = family(5e-3, torch.float32)
    assert torch.equal(case.merge(base, models, block), case.merge(base, models))


@pytest.mark.parametrize("name", [name for name in CASES if "deltas" not in name])
def test_models_without_a_common_base_are_merged_against_any_of_them(name: str) -> None:
    case = CASES[name]
    models = [random_tensor("own", place, n=3000).reshape(SHAPE) for place in range(3)]
    want = case.wanted(models[0], models)
    for base in (models[0], models[1], torch.zeros(SHAPE)):
        assert rounded_once(case.merge(base, models), want, models)


@every_case
def test_a_model_merged_with_itself_is_itself(case: Case) -> None:
    base, models = family(5e-3, torch.bfloat16)
    if case.parameters.get("normalize_weights", True):
        assert torch.equal(case.merge(base, [models[0]] * 3), models[0])
        return
    base, model = base.float(), models[0].float()
    got = case.merge(base, [model] * 3)
    assert rounded_once(got, sum(WEIGHTS) * model.double(), [model])


@every_case
@pytest.mark.parametrize("survey", [True, False], ids=["read", "unread"])
def test_where_nothing_moved_or_nothing_was_read_the_base_stays(case: Case, survey: bool) -> None:
    base, _ = family(5e-3, torch.bfloat16)
    found = nearest(rule_of(case, base, [base] * 3, survey=survey))
    normalized = case.parameters.get("normalize_weights", True)
    assert found.keeps_base == normalized
    assert found.base_scale == pytest.approx(1.0 if normalized else sum(WEIGHTS), rel=1e-7)
    assert bool(np.isfinite(found.weights).all())


@every_case
def test_of_deltas_the_base_is_never_scaled(case: Case) -> None:
    base, models = family(5e-3, torch.float32)
    scale = nearest(rule_of(case, base, models)).base_scale
    assert (scale == 1.0) == bool(case.parameters.get("deltas"))


@every_case
def test_before_the_survey_estimates_serve(case: Case) -> None:
    """The base is taken for large, so that the arc between models is nearly a chord."""
    base, models = family(5e-3, torch.float32)
    gram = np.eye(case.models + 1)
    gram[0, 0] = 1e6
    context = replace(case.context(base, models), gram=gram)
    found = METHODS[case.method].coefficients(context)
    if case.parameters.get("deltas"):
        # At right angles: the parts of the directions are more than those of the chord.
        assert found.weights.sum() > 1.1
        return
    t = case.parameters.get("t")
    parts = list(WEIGHTS[: case.models]) if case.weighted else [1.0] * case.models
    if case.parameters.get("normalize_weights", True):
        parts = [part / sum(parts) for part in parts]
    if t is not None:
        parts = [1 - float(t), float(t)]
    assert found.weights.tolist() == pytest.approx(parts, rel=1e-5)


@every_case
@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (5, 1), (1, 5), (2, 3, 4)])
def test_tensors_of_any_shape(case: Case, shape: tuple[int, ...]) -> None:
    n = math.prod(shape)
    models = [random_tensor("shape", shape, place, n=n, scale=1.0).abs() for place in range(3)]
    base = (sum(models) / 3).reshape(shape)
    models = [model.reshape(shape) for model in models]
    if case.parameters.get("deltas"):
        # Deltas of few elements are opposite too easily.
        base = torch.zeros(shape)
    got = case.merge(base, models)
    assert got.shape == base.shape
    assert rounded_once(got, case.wanted(base, models), [base, *models])


@every_case
@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0)])
def test_empty_tensors(case: Case, shape: tuple[int, ...]) -> None:
    assert case.merge(torch.zeros(shape), [torch.zeros(shape)] * 3).shape == shape


@every_case
def test_a_model_with_nan_does_not_undo_what_the_others_are(case: Case) -> None:
    """NaN stays where it is; coefficients are numbers all the same."""
    base, models = family(5e-3, torch.float32)
    models[1] = models[1].clone()
    models[1][3, 4] = torch.nan
    got = case.merge(base, models)
    assert bool(got[3, 4].isnan())
    assert int(got.isnan().sum()) == 1


# -- slerp ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slerp_ends_at_its_models(dtype: torch.dtype) -> None:
    base, models = family(5e-3, dtype)
    for t, end in ((0.0, models[0]), (1.0, models[1])):
        got = merge_tensor("slerp", base, models[:2], parameters={"t": t})
        assert rounded_once(got, end.double(), [base, *models])


def test_slerp_keeps_the_length_of_models_of_one_length() -> None:
    first, second = (random_tensor("length", place, n=3000) for place in range(2))
    second *= first.norm() / second.norm()
    for t in (0.1, 0.5, 0.8):
        got = merge_tensor("slerp", first, [first, second], parameters={"t": t})
        assert float(got.norm() / first.norm()) == pytest.approx(1.0, abs=1e-6)
        # The chord is shorter.
        assert float(((1 - t) * first + t * second).norm() / first.norm()) < 0.96


def test_slerp_turns_evenly() -> None:
    first, second = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    for t in (0.0, 0.25, 1 / 3, 0.5, 1.0):
        got = merge_tensor("slerp", first, [first, second], parameters={"t": t})
        angle = math.atan2(float(got[1]), float(got[0]))
        assert angle == pytest.approx(t * math.pi / 2, abs=1e-6)


@pytest.mark.parametrize(
    ("degrees", "straight"),
    [(0.0, True), (1.8, True), (1.82, False), (90.0, False), (178.1, False), (178.3, True)],
)
def test_slerp_goes_along_the_chord_beyond_a_cosine_of_0_9995(
    degrees: float, straight: bool
) -> None:
    radians = math.radians(degrees)
    first = torch.tensor([1.0, 0.0], dtype=torch.float32)
    second = torch.tensor([math.cos(radians), math.sin(radians)], dtype=torch.float32)
    case = replace(CASES["slerp"], parameters={"t": 0.25})
    rule = rule_of(case, first, [first, second])
    assert isinstance(rule, Coefficients)
    chord = rule.weights.tolist() == pytest.approx([0.75, 0.25], rel=1e-7)
    assert chord == straight
    assert (rule.base_scale == 1.0) == straight


def test_slerp_of_a_model_of_zeros_goes_along_the_chord() -> None:
    model = torch.tensor([2.0, -4.0])
    for models in ([torch.zeros(2), model], [model, torch.zeros(2)]):
        for base in models:
            got = merge_tensor("slerp", base, models, parameters={"t": 0.25})
            share = 0.25 if models[1] is model else 0.75
            assert got.tolist() == pytest.approx([2.0 * share, -4.0 * share], abs=1e-6)


# -- nuslerp -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weights", "t"), [((1.0, 1.0), 0.5), ((3.0, 1.0), 0.25), ((1.0, -1.0), 0.5), ((0.0, 2.0), 1.0)]
)
def test_the_weights_of_nuslerp_say_where_on_the_arc(
    weights: tuple[float, float], t: float
) -> None:
    base, models = family(0.05, torch.float32)
    got = merge_tensor("nuslerp", base, models[:2], weights=weights)
    want = reference.slerp(models[0].double(), models[1].double(), t)
    assert rounded_once(got, want, [base, *models])


def test_nuslerp_of_rows_turns_each_row_by_its_own_angle() -> None:
    first = torch.tensor([[1.0, 0.0], [2.0, 0.0], [3.0, 3.0]])
    second = torch.tensor([[0.0, 1.0], [2.0, 0.0], [0.0, 0.0]])
    got = merge_tensor("nuslerp", first, [first, second], parameters={"nuslerp_flatten": False})
    half = math.sqrt(0.5)
    want = [half, half, 2.0, 0.0, 1.5, 1.5]
    assert got.flatten().tolist() == pytest.approx(want, abs=1e-6)


def test_nuslerp_of_columns_is_that_of_the_transposed_rows() -> None:
    base, models = family(0.05, torch.float32)
    options = {"nuslerp_flatten": False}
    columns = merge_tensor(
        "nuslerp", base, models[:2], parameters={**options, "nuslerp_row_wise": True}
    )
    rows = merge_tensor(
        "nuslerp", base.T.contiguous(), [m.T.contiguous() for m in models[:2]], parameters=options
    )
    torch.testing.assert_close(columns, rows.T, rtol=0, atol=1e-8)


def test_opposite_deltas_are_averaged_along_the_chord() -> None:
    base, models = family(5e-3, torch.float32)
    delta = models[0] - base
    opposite = [base + delta, base - delta]
    got = merge_tensor("nuslerp", base, opposite, weights=[3.0, 1.0], parameters={"deltas": True})
    torch.testing.assert_close(got, base + 0.5 * delta, rtol=0, atol=1e-7)


def test_a_delta_of_zeros_counts_by_its_weight() -> None:
    base, models = family(5e-3, torch.float32)
    got = merge_tensor(
        "nuslerp", base, [base, models[0]], weights=[3.0, 1.0], parameters={"deltas": True}
    )
    torch.testing.assert_close(got, base + 0.25 * (models[0] - base), rtol=0, atol=1e-7)


# -- multislerp and karcher ----------------------------------------------------------------------


def test_multislerp_of_two_equal_parts_is_the_middle_of_the_arc() -> None:
    first, second = (random_tensor("middle", place, n=3000) for place in range(2))
    second *= first.norm() / second.norm()
    want = reference.slerp(first.double(), second.double(), 0.5)
    for method in ("multislerp", "karcher"):
        got = merge_tensor(method, first, [first, second])
        assert rounded_once(got, want, [first, second]), method


@pytest.mark.parametrize("method", ["multislerp", "karcher"])
def test_the_mean_is_as_long_as_the_models_are_on_average(method: str) -> None:
    models = [random_tensor("long", place, n=3000) * (place + 1) for place in range(3)]
    got = merge_tensor(method, models[0], models)
    mean = sum(float(model.norm()) for model in models) / 3
    assert float(got.norm()) == pytest.approx(mean, rel=1e-6)


@pytest.mark.parametrize("method", ["multislerp", "karcher"])
def test_the_order_of_the_models_does_not_matter(method: str) -> None:
    base, models = family(0.05, torch.float32)
    forwards, backwards = (
        merge_tensor(method, base, models),
        merge_tensor(method, base, models[::-1]),
    )
    torch.testing.assert_close(forwards, backwards, rtol=0, atol=3e-8)


@pytest.mark.parametrize("deltas", [True, False])
def test_where_directions_balance_multislerp_is_the_weighted_average(deltas: bool) -> None:
    turns = [0.0, 120.0, 240.0]
    models = [torch.tensor([math.cos(math.radians(a)), math.sin(math.radians(a))]) for a in turns]
    models = [model * length for model, length in zip(models, (1.0, 2.0, 3.0), strict=True)]
    base = torch.zeros(2) if deltas else torch.tensor([0.3, 0.1])
    got = merge_tensor("multislerp", base, models, parameters={"deltas": deltas})
    torch.testing.assert_close(got, sum(models) / 3, rtol=0, atol=1e-6)


def test_eps_says_how_short_a_mean_direction_counts_as_none() -> None:
    first = torch.tensor([1.0, 0.0])
    second = torch.tensor([-1.0, 0.02])
    base = torch.zeros(2)
    arc = merge_tensor("multislerp", base, [first, second])
    assert float(arc.norm()) == pytest.approx(1.0, abs=1e-3)
    chord = merge_tensor("multislerp", base, [first, second], parameters={"eps": 0.1})
    assert chord.tolist() == pytest.approx([0.0, 0.01], abs=1e-6)


def test_deltas_of_zeros_take_part_by_their_length() -> None:
    base, models = family(5e-3, torch.float32)
    got = merge_tensor("multislerp", base, [base, base, models[0]], parameters={"deltas": True})
    torch.testing.assert_close(got, base + (models[0] - base) / 3, rtol=0, atol=1e-7)


def test_the_karcher_mean_is_where_logarithms_sum_to_nothing() -> None:
    models = [random_tensor("log", place, n=40) + 0.01 for place in range(4)]
    models[3] = models[3] + 0.03
    base = torch.zeros(40)
    got = merge_tensor(
        "karcher", base, models, parameters={"max_iter": 100.0, "tol": 1e-9}, dtype=torch.float64
    ).double()
    units = [(model.double() / model.double().norm()) for model in models]
    pull = sum(reference.logarithm(got / got.norm(), unit) for unit in units)
    assert isinstance(pull, Tensor)
    assert float(pull.norm()) < 1e-6
    # The mean of the directions is somewhere else.
    straight = torch.stack(units).mean(dim=0)
    away = sum(reference.logarithm(straight / straight.norm(), unit) for unit in units)
    assert isinstance(away, Tensor)
    assert float(away.norm()) > 1e-3


def test_karcher_stops_where_a_step_is_smaller_than_its_tolerance() -> None:
    models = [random_tensor("stop", place, n=40) for place in range(3)]
    base = torch.zeros(40)

    def mean(**parameters: float) -> Tensor:
        return merge_tensor("karcher", base, models, parameters=parameters)

    assert torch.equal(mean(tol=3.0), mean(max_iter=0.0))
    assert not torch.equal(mean(tol=3.0), mean())
    assert torch.equal(mean(tol=1e-12, max_iter=1.0), mean(max_iter=1.0))


def test_karcher_of_opposite_models_is_the_first_as_long_as_both_are_on_average() -> None:
    first = torch.tensor([3.0, 4.0])
    got = merge_tensor("karcher", torch.zeros(2), [first, -3 * first])
    torch.testing.assert_close(got, 2 * first)


def test_karcher_leaves_out_models_of_zeros_but_for_the_length() -> None:
    first, second = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    got = merge_tensor("karcher", torch.zeros(2), [first, torch.zeros(2), second])
    half = math.sqrt(0.5) * 2 / 3
    assert got.tolist() == pytest.approx([half, half], abs=1e-6)
