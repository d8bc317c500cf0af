from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from mergegit.encoding import canonical_json
from mergegit.errors import BadRecipe
from mergegit.merge.methods import METHODS
from mergegit.merge.recipe import Recipe, Settings, make_recipe
from mergegit.merge.settings import Setting
from tests.merge.examples import EXAMPLE, experts_for, needed_parameters
from tests.merge.tensors import commit_id


def make(
    method: str = "ties",
    parameters: Mapping[str, object] | None = None,
    own: Sequence[Mapping[str, object]] | None = None,
    **rest: Any,
) -> Recipe:
    """A recipe of as few experts as the method merges, but of two where it merges any number."""
    if method in METHODS:
        own = own if own is not None else [{} for _ in experts_for(method, "ab")]
        parameters = {**needed_parameters(method), **(parameters or {})}
    own, parameters = [{}] if own is None else own, parameters or {}
    return make_recipe(
        method_name=method,
        base=("base", commit_id(0)),
        experts=[(f"expert{place}", commit_id(place + 1)) for place in range(len(own))],
        parameters=settings(parameters),
        expert_parameters=[settings(given) for given in own],
        **rest,
    )


def settings(given: Mapping[str, object]) -> Settings:
    return {name: Setting.parse(value, name) for name, value in given.items()}


def values(given: Settings) -> dict[str, object]:
    return {name: value.to_json() for name, value in given.items()}


@pytest.mark.parametrize("name", METHODS)
def test_every_parameter_has_a_value(name: str) -> None:
    recipe = make(name)
    for parameter in METHODS[name].parameters:
        expected = EXAMPLE if parameter.default is None else parameter.default
        if parameter.per_expert:
            assert [values(e.parameters)[parameter.name] for e in recipe.experts] == [
                expected
            ] * len(recipe.experts)
            assert parameter.name not in recipe.parameters
        else:
            assert values(recipe.parameters)[parameter.name] == expected
            assert all(parameter.name not in expert.parameters for expert in recipe.experts)


def test_an_experts_own_value_stands_before_the_one_for_all() -> None:
    recipe = make(parameters={"density": 0.5, "weight": 2}, own=[{"density": 0.1}, {}])
    assert [values(expert.parameters) for expert in recipe.experts] == [
        {"weight": 2.0, "density": 0.1},
        {"weight": 2.0, "density": 0.5},
    ]


def test_experts_keep_their_order_refs_and_commits() -> None:
    recipe = make(own=[{}, {}, {}])
    assert [(e.ref, e.commit) for e in recipe.experts] == [
        ("expert0", commit_id(1)), ("expert1", commit_id(2)), ("expert2", commit_id(3)),
    ]  # fmt: skip
    assert (recipe.base_ref, recipe.base) == ("base", commit_id(0))


@pytest.mark.parametrize("key", ["densty", "wieght", "", "Weight", "lamda"])
def test_a_misspelt_parameter_is_refused(key: str) -> None:
    with pytest.raises(BadRecipe, match=f"no parameter {key!r}"):
        make(parameters={key: 1.0})
    with pytest.raises(BadRecipe, match=f"no parameter {key!r}"):
        make(own=[{}, {key: 1.0}])


def test_a_parameter_of_another_method_is_refused() -> None:
    with pytest.raises(BadRecipe, match="method linear has no parameter 'density'"):
        make("linear", parameters={"density": 0.5})


@pytest.mark.parametrize("key", ["lambda", "normalize"])
def test_an_expert_cannot_have_a_parameter_of_all_for_itself(key: str) -> None:
    with pytest.raises(BadRecipe, match=rf"expert1\.{key}: an expert can't have") as error:
        make(own=[{}, {key: METHODS["ties"].parameter(key).default}])
    assert f"as {key}" in error.value.hint


def test_a_bad_value_of_one_expert_is_named_with_the_expert() -> None:
    with pytest.raises(BadRecipe, match=r"expert1\.density is 2; it must be"):
        make(own=[{}, {"density": 2.0}])


def test_a_bad_value_for_all_is_refused_even_where_every_expert_has_its_own() -> None:
    with pytest.raises(BadRecipe, match=r"density is -1"):
        make(parameters={"density": -1.0}, own=[{"density": 0.5}, {"density": 0.5}])


def test_a_merge_of_nothing_is_refused() -> None:
    with pytest.raises(BadRecipe, match="at least one expert"):
        make(own=[])


def test_an_unknown_method_is_refused() -> None:
    with pytest.raises(BadRecipe, match="no method 'tie'"):
        make("tie")


@pytest.mark.parametrize("dtype", ["I8", "BOOL", "F4", "F8_E8M0", "bfloat16", "", "nonsense"])
def test_only_dtypes_of_numbers_can_be_merged_to(dtype: str) -> None:
    with pytest.raises(BadRecipe, match="no dtype to merge to") as error:
        make(dtype=dtype)
    assert "BF16" in error.value.hint


@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", None])
def test_a_float_dtype_or_none_is_taken(dtype: str | None) -> None:
    assert make(dtype=dtype).dtype == dtype


def test_a_method_is_a_method_whatever_the_integers_of_its_parameters() -> None:
    assert make(parameters={"weight": 1}) == make(parameters={"weight": 1.0})


RECIPES: dict[str, Recipe] = {
    **{name: make(name) for name in METHODS},
    "everything": make(
        parameters={"density": 0.25, "normalize": False, "lambda": 0.3, "rescale": True},
        own=[{"weight": -0.1}, {"weight": 1e-9, "density": 1.0}],
        seed=2**40,
        dtype="F32",
        ignore_extra=True,
        allow_nonfinite=True,
    ),
}


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES.keys())
def test_a_recipe_survives_json(recipe: Recipe) -> None:
    text = canonical_json(recipe.to_json())
    back = Recipe.from_json(json.loads(text))
    assert back == recipe
    assert canonical_json(back.to_json()) == text


def _without(key: str) -> Callable[[dict[str, Any]], None]:
    def change(value: dict[str, Any]) -> None:
        del value[key]

    return change


def _with(key: str, value_: Any) -> Callable[[dict[str, Any]], None]:
    def change(value: dict[str, Any]) -> None:
        value[key] = value_

    return change


def _expert_with(key: str, value_: Any) -> Callable[[dict[str, Any]], None]:
    def change(value: dict[str, Any]) -> None:
        value["experts"][0][key] = value_

    return change


@pytest.mark.parametrize(
    "change",
    [
        *[_without(key) for key in RECIPES["ties"].to_json()],
        _with("method", "unheard of"),
        _with("method", 5),
        _with("base", None),
        _with("base", {"ref": "base", "commit": "not hex"}),
        _with("base", {"ref": "base"}),
        _with("experts", []),
        _with("experts", 7),
        _with("experts", [{}]),
        _with("parameters", {"unheard": 1.0}),
        _with("parameters", {"lambda": "much"}),
        _with("parameters", [1, 2]),
        _expert_with("parameters", {"density": 7.0}),
        _expert_with("parameters", None),
        _expert_with("commit", 5),
        _with("dtype", "I8"),
        _with("dtype", 5),
        _with("seed", "7"),
        _with("seed", 1.5),
        _with("seed", True),
        _with("ignore_extra", "no"),
        _with("allow_nonfinite", 0),
    ],
)
def test_a_recipe_that_is_none_is_refused(change: Callable[[dict[str, Any]], None]) -> None:
    value = copy.deepcopy(RECIPES["ties"].to_json())
    change(value)
    with pytest.raises(BadRecipe):
        Recipe.from_json(value)


@pytest.mark.parametrize("value", [None, 5, "text", []])
def test_what_is_no_mapping_is_no_recipe(value: Any) -> None:
    with pytest.raises(BadRecipe):
        Recipe.from_json(value)
