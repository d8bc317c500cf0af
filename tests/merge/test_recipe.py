from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from mergegit.encoding import canonical_json
from mergegit.errors import BadRecipe
from mergegit.merge.methods import METHODS
from mergegit.merge.recipe import (
    Recipe,
    Settings,
    Slice,
    Source,
    TokenRequest,
    VocabularyRequest,
    make_recipe,
    resolved,
)
from mergegit.merge.settings import Setting
from tests.merge.examples import experts_for, needed_parameters
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


def sliced(
    *slices: Slice,
    method: str = "ties",
    parameters: Mapping[str, object] | None = None,
    experts: int = 2,
    **rest: Any,
) -> Recipe:
    return make_recipe(
        method_name=method,
        base=("base", commit_id(0)),
        experts=[(f"expert{place}", commit_id(place + 1)) for place in range(experts)],
        parameters=settings(parameters or {}),
        expert_parameters=[{} for _ in range(experts)],
        slices=slices,
        **rest,
    )


def source(expert: int, first: int, end: int, **parameters: object) -> Source:
    return Source(expert, (first, end), settings(parameters))


def a_slice(*sources: Source, base: tuple[int, int] = (0, 2), **parameters: object) -> Slice:
    return Slice(sources, base, settings(parameters))


def values(given: Settings) -> dict[str, object]:
    return {name: value.to_json() for name, value in given.items()}


@pytest.mark.parametrize("name", METHODS)
def test_every_parameter_has_a_value(name: str) -> None:
    recipe = make(name)
    for parameter in METHODS[name].parameters:
        expected = needed_parameters(name).get(parameter.name, parameter.default)
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


def test_parameters_of_a_source_go_before_its_slices_and_these_before_the_recipes() -> None:
    recipe = sliced(
        a_slice(
            source(0, 0, 2, weight=[{"filter": "mlp", "value": 0.1}]),
            source(1, 0, 2, weight=5),
            weight=[{"filter": "attn", "value": 0.2}],
            normalize=False,
        ),
        a_slice(source(1, 2, 4)),
        parameters={"weight": 0.3, "density": 0.4, "lambda": [0, 1]},
    )
    first, second = recipe.slices
    weight = first.sources[0].parameters["weight"]
    assert [weight.at(name, 0.0) for name in ("x.mlp.w", "x.attn.w", "norm")] == [0.1, 0.2, 0.3]
    assert values(first.sources[1].parameters) == {"weight": 5.0, "density": 0.4}
    assert values(second.sources[0].parameters) == {"weight": 0.3, "density": 0.4}
    assert values(first.parameters)["normalize"] is False
    assert values(second.parameters)["normalize"] is True
    assert values(second.parameters)["lambda"] == [0.0, 1.0]


def test_of_slices_every_parameter_stands_with_them_and_none_outside() -> None:
    recipe = sliced(a_slice(source(0, 0, 2), source(1, 0, 2)), parameters={"density": 0.5})
    assert recipe.parameters == {}
    assert [expert.parameters for expert in recipe.experts] == [{}, {}]
    (part,) = recipe.slices
    for parameter in METHODS["ties"].parameters:
        own = [parameter.name in source.parameters for source in part.sources]
        assert own == [parameter.per_expert] * 2
        assert (parameter.name in part.parameters) is not parameter.per_expert


def test_parts_are_the_slices_or_the_whole() -> None:
    whole = make(own=[{"weight": 2}, {}])
    ((experts, own, shared),) = whole.parts()
    assert experts == (0, 1)
    assert [values(given)["weight"] for given in own] == [2.0, 1.0]
    assert shared == whole.parameters
    recipe = sliced(
        a_slice(source(1, 0, 2, weight=3), source(0, 0, 2)),
        a_slice(source(1, 2, 4), **{"lambda": 2}),
    )
    (first, own, _), (second, _, shared) = recipe.parts()
    assert (first, second) == ((1, 0), (1,))
    assert values(own[0])["weight"] == 3.0
    assert values(shared)["lambda"] == 2.0


def test_a_slice_has_sources_of_one_length() -> None:
    with pytest.raises(BadRecipe, match=r"takes 2 layers of expert0 and 3 of expert1"):
        sliced(a_slice(source(0, 0, 2), source(1, 1, 4)))


@pytest.mark.parametrize("layers", [(0, 0), (2, 2), (3, 1), (-1, 1)])
def test_layers_that_are_no_range_are_refused(layers: tuple[int, int]) -> None:
    with pytest.raises(BadRecipe, match=r"layers \[-?\d, \d\] of expert1 are no range"):
        sliced(a_slice(source(0, 0, 2), source(1, *layers)))
    with pytest.raises(BadRecipe, match="are no range"):
        sliced(a_slice(source(0, 0, layers[1] - layers[0]), base=layers))


def test_the_bases_layers_are_as_many_as_the_sources() -> None:
    with pytest.raises(BadRecipe, match="takes 2 layers of expert0 and 3 of the base"):
        sliced(a_slice(source(0, 0, 2), base=(0, 3)))


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"densty": 0.5}, "no parameter 'densty'"),
        ({"density": 2}, r"expert0\.density is 2; it must be"),
        ({"lambda": 2}, r"expert0\.lambda: an expert can't have a lambda of its own"),
    ],
)
def test_a_bad_parameter_of_a_source_is_refused(
    parameters: dict[str, object], message: str
) -> None:
    with pytest.raises(BadRecipe, match=message):
        sliced(a_slice(source(0, 0, 2, **parameters)))


def test_a_gradient_over_a_switch_is_refused() -> None:
    with pytest.raises(BadRecipe, match=r"normalize is 0\.0, not true or false"):
        make(parameters={"normalize": [0, 1]})
    with pytest.raises(BadRecipe, match=r"normalize\[0\] is true, not a number"):
        make(parameters={"normalize": [True, False]})


def test_every_point_of_a_gradient_must_be_a_value() -> None:
    with pytest.raises(BadRecipe, match=r"expert0\.density is 1\.5; it must be"):
        make(own=[{"density": [0, 1.5, 0.5]}, {}])
    with pytest.raises(BadRecipe, match=r"lambda is 'x', not a number"):
        make(parameters={"lambda": [{"filter": "mlp", "value": "x"}, {"value": 1}]})


def test_a_slice_merges_as_many_models_as_the_method_does() -> None:
    with pytest.raises(BadRecipe, match="slerp merges 2 models, and 1 are named: expert1"):
        sliced(
            a_slice(source(0, 0, 2), source(1, 0, 2)), a_slice(source(1, 2, 4)), method="slerp",
            parameters={"t": 0.5},
        )  # fmt: skip


def test_what_a_method_must_be_told_may_be_told_by_every_slice() -> None:
    halves = [a_slice(source(0, n, n + 2), source(1, n, n + 2), t=n / 4) for n in (0, 2)]
    recipe = sliced(*halves, method="slerp")
    assert [values(part.parameters) for part in recipe.slices] == [{"t": 0.0}, {"t": 0.5}]
    with pytest.raises(BadRecipe, match="t is not given, and slerp needs it"):
        sliced(halves[0], a_slice(source(0, 2, 4), source(1, 2, 4)), method="slerp")
    only_mlp = a_slice(source(0, 2, 4), source(1, 2, 4), t=[{"filter": "mlp", "value": 1}])
    with pytest.raises(BadRecipe, match="t has no value for some tensors, and slerp needs it"):
        sliced(halves[0], only_mlp, method="slerp")
    assert sliced(halves[0], only_mlp, method="slerp", parameters={"t": 0.5})


def test_an_expert_has_no_parameters_outside_the_slices() -> None:
    with pytest.raises(BadRecipe, match="an expert has parameters outside the slices"):
        make(own=[{"weight": 1}, {}], slices=[a_slice(source(0, 0, 2))])


@pytest.mark.parametrize("files_from", [-1, 2, 7])
def test_files_come_from_an_expert_that_there_is(files_from: int) -> None:
    assert [make(files_from=place).files_from for place in (None, 0, 1)] == [None, 0, 1]
    with pytest.raises(BadRecipe, match=f"files come from expert {files_from}, and there are 2"):
        make(files_from=files_from)


def test_a_parent_that_comes_twice_is_named_once() -> None:
    recipe = make_recipe(
        method_name="linear",
        base=("base", commit_id(0)),
        experts=[("a", commit_id(1)), ("base", commit_id(0)), ("a", commit_id(1))],
        parameters={},
        expert_parameters=[{}, {}, {}],
    )
    assert recipe.parents == (commit_id(0), commit_id(1))


def test_parameters_are_resolved_by_name_and_position() -> None:
    given = settings({"weight": [{"filter": "mlp", "value": [0, 2]}, {"value": 5}], "density": 0.5})
    assert resolved(given, "layers.3.mlp.w", 0.25) == {"weight": 0.5, "density": 0.5}
    assert resolved(given, "norm", 0.25) == {"weight": 5.0, "density": 0.5}


RECIPES: dict[str, Recipe] = {
    **{name: make(name) for name in METHODS},
    "sliced": sliced(
        a_slice(
            source(0, 0, 2, weight=[0, 1], density=[{"filter": "mlp", "value": [0.1, 0.9]}]),
            source(1, 7, 9),
        ),
        a_slice(source(1, 2, 4), base=(4, 6), normalize=False),
        files_from=1,
        given="# mine\nmerge_method: ties\n",
    ),
    "copied": sliced(a_slice(source(0, 0, 2, scale=0.5)), method="passthrough", experts=1),
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


def _slice_with(key: str, value_: Any) -> Callable[[dict[str, Any]], None]:
    def change(value: dict[str, Any]) -> None:
        value["slices"][0][key] = value_

    return change


def _source_with(key: str, value_: Any) -> Callable[[dict[str, Any]], None]:
    def change(value: dict[str, Any]) -> None:
        value["slices"][0]["sources"][0][key] = value_

    return change


@pytest.mark.parametrize(
    "change",
    [
        _with("slices", 5),
        _with("slices", [5]),
        _with("slices", [{}]),
        _with("files_from", "expert1"),
        _with("files_from", 9),
        _slice_with("sources", []),
        _slice_with("sources", None),
        _slice_with("base_layers", [0]),
        _slice_with("base_layers", [0, 1.5]),
        _slice_with("base_layers", [0, True]),
        _slice_with("base_layers", [0, 5]),
        _slice_with("parameters", {"density": 0.5, "unheard": 1}),
        _source_with("expert", 2),
        _source_with("expert", -1),
        _source_with("expert", "expert0"),
        _source_with("expert", True),
        _source_with("layers", [2, 0]),
        _source_with("layers", "02"),
        _source_with("parameters", {"lambda": 1}),
    ],
)
def test_slices_that_are_none_are_refused(change: Callable[[dict[str, Any]], None]) -> None:
    value = copy.deepcopy(RECIPES["sliced"].to_json())
    change(value)
    with pytest.raises(BadRecipe):
        Recipe.from_json(value)


@pytest.mark.parametrize("value", [None, 5, "text", []])
def test_what_is_no_mapping_is_no_recipe(value: Any) -> None:
    with pytest.raises(BadRecipe):
        Recipe.from_json(value)


# -- vocabularies ---------------------------------------------------------------------------------

REQUEST = VocabularyRequest(
    1,
    {
        "<z>": TokenRequest(None),
        "<a>": TokenRequest("base", 7, force=True),
        "<b>": TokenRequest(0, "c"),
        "<c>": TokenRequest(1),
    },
    64,
    base_stands_in=False,
)


@pytest.mark.parametrize(
    "request_", [REQUEST, VocabularyRequest("union"), VocabularyRequest("base")]
)
def test_a_vocabulary_outlives_canonical_json(request_: VocabularyRequest) -> None:
    recipe = make(own=[{}, {}], vocabulary=request_, chat_template="{{ messages }}")
    again = Recipe.from_json(json.loads(canonical_json(recipe.to_json())))
    assert again == recipe
    assert again.vocabulary is not None
    # New tokens get their ids in the order in which they were asked for.
    assert list(again.vocabulary.tokens) == list(request_.tokens)


def test_a_recipe_without_vocabulary_says_nothing_of_it() -> None:
    recipe = make()
    assert recipe.to_json().keys().isdisjoint(("vocabulary", "chat_template"))
    assert (recipe.vocabulary, recipe.chat_template) == (None, None)


@pytest.mark.parametrize("model", [2, -1])
def test_tokens_come_from_an_expert_that_there_is(model: int) -> None:
    for asked in (VocabularyRequest(model), VocabularyRequest("base", {"a": TokenRequest(model)})):
        with pytest.raises(BadRecipe, match=f"expert {model}"):
            make(own=[{}, {}], vocabulary=asked)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("source",), "bases"),
        (("source",), True),
        (("pad_to_multiple_of",), "8"),
        (("base_stands_in",), 0),
        (("tokens",), {"<z>": {}}),
        (("tokens", 0, "name"), None),
        (("tokens", 0, "model"), "math"),
        (("tokens", 1, "token"), 0.5),
        (("tokens", 1, "force"), 1),
    ],
)
def test_a_vocabulary_that_was_tampered_with_is_refused(path: tuple[Any, ...], value: Any) -> None:
    facts = make(own=[{}, {}], vocabulary=REQUEST).to_json()
    part: Any = facts["vocabulary"]
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    with pytest.raises(BadRecipe):
        Recipe.from_json(facts)
    with pytest.raises(BadRecipe):
        Recipe.from_json({**make().to_json(), "chat_template": 1})
