from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergegit.errors import BadRecipe
from mergegit.merge.settings import Rule, Scalar, Setting

numbers = st.floats(allow_nan=False, allow_infinity=False)
scalars = numbers | st.booleans() | st.text(max_size=8)
values = st.tuples(scalars) | st.lists(numbers, min_size=2, max_size=5).map(tuple)
filters = st.none() | st.text(min_size=1, max_size=8).filter(lambda text: text != "*")
settings_ = st.lists(st.builds(Rule, filters, values), min_size=1, max_size=4).map(
    lambda rules: Setting(tuple(rules))
)
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["filter", "value"]) | st.text(), inner, max_size=3)
    ),
    max_leaves=10,
)


def parse(value: object) -> Setting:
    return Setting.parse(value, "weight")


@pytest.mark.parametrize("value", [0.5, 1, True, False, "large"])
def test_a_scalar_holds_for_every_tensor_at_every_depth(value: Scalar) -> None:
    setting = parse(value)
    for name, position in [("lm_head.weight", 0.0), ("", 0.3), ("layers.7.mlp", 1.0)]:
        found = setting.at(name, position)
        assert found == value
        assert isinstance(found, bool) == isinstance(value, bool)


def test_whole_numbers_become_floats() -> None:
    assert [type(value) for value in parse([1, 2.0]).values] == [float, float]
    assert type(Setting.constant(3).values[0]) is float


@pytest.mark.parametrize(
    ("position", "expected"),
    [(0.0, 0.0), (0.25, 0.5), (0.5, 1.0), (0.75, 0.75), (1.0, 0.5)],
)
def test_a_gradient_is_linear_between_its_points(position: float, expected: float) -> None:
    assert parse([0, 1, 0.5]).at("any", position) == expected


@given(st.lists(numbers, min_size=2, max_size=6), st.floats(0, 1))
def test_a_gradient_stays_within_its_two_neighbours(points: list[float], position: float) -> None:
    before = math.floor(position * (len(points) - 1))
    near = points[before : before + 2]
    found = parse(points).at("any", position)
    slack = 1e-12 * max(abs(point) for point in near) + 1e-300
    assert isinstance(found, float)
    assert min(near) - slack <= found <= max(near) + slack


@given(st.lists(numbers, min_size=1, max_size=6))
def test_a_gradient_passes_through_its_points(points: list[float]) -> None:
    steps = len(points) - 1
    assert parse(points).at("any", 0) == points[0]
    assert parse(points).at("any", 1) == points[-1]
    if steps in (2, 4):
        assert [parse(points).at("any", place / steps) for place in range(steps + 1)] == points


@pytest.mark.parametrize("position", [-0.1, 1.1, math.nan])
def test_a_depth_outside_the_model_is_a_mistake_of_the_caller(position: float) -> None:
    with pytest.raises(ValueError, match="within 0 and 1"):
        parse(1).at("any", position)


def test_the_first_rule_that_matches_counts() -> None:
    setting = parse(
        [
            {"filter": "self_attn", "value": [0, 1]},
            {"filter": "attn", "value": 0.7},
            {"value": 0.1},
        ]
    )
    assert setting.at("layers.0.self_attn.q_proj.weight", 0.25) == 0.25
    assert setting.at("layers.0.cross_attn.q_proj.weight", 0.25) == 0.7
    assert setting.at("model.norm.weight", 0.25) == 0.1


def test_a_tensor_that_no_rule_matches_has_no_value() -> None:
    setting = parse([{"filter": "mlp", "value": 0.5}])
    assert setting.at("layers.0.mlp.up_proj.weight", 0) == 0.5
    assert setting.at("layers.0.self_attn.q_proj.weight", 0) is None


def test_a_single_rule_needs_no_list() -> None:
    assert parse({"filter": "mlp", "value": 0.5}) == parse([{"filter": "mlp", "value": 0.5}])


@pytest.mark.parametrize(
    ("pattern", "name", "matches"),
    [
        ("mlp", "layers.0.mlp.up_proj.weight", True),
        ("MLP", "layers.0.mlp.up_proj.weight", False),
        ("*.weight", "layers.0.mlp.up_proj.weight", True),
        ("*.weight", "layers.0.mlp.up_proj.weight_scale", False),
        ("mlp*", "layers.0.mlp.up_proj.weight", False),
        ("layers.?.mlp*", "layers.3.mlp.up_proj.weight", True),
        ("layers.?.mlp*", "layers.13.mlp.up_proj.weight", False),
        ("layers.[12].*", "layers.2.mlp.up_proj.weight", True),
        ("layers.[12]", "layers.2.mlp.up_proj.weight", False),
        ("layers.[12]", "odd.layers.[12].name", True),
        ("**", "anything", True),
    ],
)
def test_filters_are_parts_of_names_or_patterns_for_whole_names(
    pattern: str, name: str, matches: bool
) -> None:
    assert parse([{"filter": pattern, "value": 1}]).at(name, 0) == (1 if matches else None)


@pytest.mark.parametrize("rule", [{"filter": "*", "value": 1}, {"filter": None, "value": 1}])
def test_a_star_alone_and_nothing_are_no_filter(rule: dict[str, Any]) -> None:
    assert parse([rule]) == Setting.constant(1)


def test_what_comes_after_an_unfiltered_rule_is_dropped() -> None:
    rules = [{"filter": "a", "value": 1}, {"filter": "*", "value": 2}, {"filter": "b", "value": 3}]
    assert parse(rules) == parse(rules[:2])
    assert parse(rules).values == (1, 2)


def test_otherwise_fills_what_is_left_open() -> None:
    nearer = parse([{"filter": "mlp", "value": 1}])
    farther = parse([{"filter": "mlp", "value": 2}, {"filter": "attn", "value": 3}])
    both = nearer.otherwise(farther).otherwise(Setting.constant(4))
    assert [both.at(name, 0) for name in ("mlp", "attn", "norm")] == [1, 3, 4]
    assert nearer.otherwise(None) == nearer
    assert both.otherwise(Setting.constant(5)) == both


@given(settings_, settings_, st.text(max_size=8), st.floats(0, 1))
def test_otherwise_asks_the_other_where_this_one_is_silent(
    nearer: Setting, farther: Setting, name: str, position: float
) -> None:
    own = nearer.at(name, position)
    expected = own if own is not None else farther.at(name, position)
    assert nearer.otherwise(farther).at(name, position) == expected


@pytest.mark.parametrize(
    ("value", "is_gradient"),
    [
        (1, False),
        ([1], False),
        ([1, 1], True),
        ([{"filter": "mlp", "value": 1}], False),
        ([{"filter": "mlp", "value": 1}, {"value": [0, 1]}], True),
    ],
)
def test_a_gradient_has_several_values_somewhere(value: object, is_gradient: bool) -> None:
    assert parse(value).is_gradient == is_gradient


@pytest.mark.parametrize(
    ("value", "simplest"),
    [
        (1, 1.0),
        ([0.5], 0.5),
        (True, True),
        ((0, 1), [0.0, 1.0]),
        ([{"filter": "*", "value": "wide"}], "wide"),
        ({"filter": "mlp", "value": [2]}, [{"filter": "mlp", "value": 2.0}]),
        (
            [{"filter": "mlp", "value": [0, 1]}, {"value": 2}],
            [{"filter": "mlp", "value": [0.0, 1.0]}, {"value": 2.0}],
        ),
    ],
)
def test_json_has_the_simplest_form(value: object, simplest: object) -> None:
    assert repr(parse(value).to_json()) == repr(simplest)


@given(settings_)
def test_json_leads_back(setting: Setting) -> None:
    back = Setting.parse(json.loads(json.dumps(setting.to_json())), "weight")
    assert back == setting
    assert repr(back) == repr(setting)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.5, "0.5"),
        (True, "true"),
        ("wide", "wide"),
        ([0, 1], "[0, 1]"),
        (1e-7, "1e-07"),
        (123456789, "123456789"),
        (
            [
                {"filter": "self_attn", "value": 0.5},
                {"filter": "mlp", "value": [0, 1]},
                {"value": 0.3},
            ],
            "self_attn: 0.5, mlp: [0, 1], else 0.3",
        ),
        ([{"filter": "mlp", "value": 1}], "mlp: 1"),
        ([{"filter": "a\nb", "value": "c\nd"}], r"'a\nb': 'c\nd'"),
    ],
)
def test_text_is_short(value: object, text: str) -> None:
    assert parse(value).text() == text


@given(settings_)
def test_text_is_one_line(setting: Setting) -> None:
    assert len(setting.text().splitlines()) <= 1


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (None, "weight has no value"),
        ([], "weight is an empty list"),
        (math.nan, "weight is nan, not a finite number"),
        (math.inf, "weight is inf, not a finite number"),
        (10**400, "weight is inf, not a finite number"),
        ([0, -math.inf], r"weight\[1\] is -inf, not a finite number"),
        ([0, "a"], r"weight\[1\] is 'a', not a number"),
        (["a", "b"], r"weight\[0\] is 'a', not a number"),
        ([True, False], r"weight\[0\] is true, not a number"),
        ([1, None], r"weight\[1\] is empty, not a number"),
        ([[0, 1], [1, 0]], r"weight\[0\] is a list: nested too deep"),
        ([1, {"value": 1}], r"weight\[0\] is 1 among rules"),
        ([{"value": 1, "fliter": "mlp"}], r"weight\[0\] has an unknown key 'fliter'"),
        ([{"value": 1, 3: 4}], r"weight\[0\] has an unknown key 3"),
        ({}, "weight is a rule without a value"),
        ([{"filter": "mlp"}], r"weight\[0\] is a rule without a value"),
        ([{"filter": "mlp", "value": None}], r"weight\[0\] has no value"),
        ([{"filter": "mlp", "value": []}], r"weight\[0\] is an empty list"),
        ([{"filter": "mlp", "value": {"value": 1}}], r"weight\[0\] is a mapping, not one value"),
        ([{"filter": "mlp", "value": [[1]]}], r"weight\[0\]\[0\] is a list: nested too deep"),
        ([{"filter": "", "value": 1}], r"weight\[0\]\.filter is empty"),
        ([{"filter": 3, "value": 1}], r"weight\[0\]\.filter is 3, not text"),
        ([{"filter": ["a"], "value": 1}], r"weight\[0\]\.filter is a list, not text"),
        ("\ud800", "weight is not valid Unicode"),
        (b"1", "weight is of type bytes, not one value"),
    ],
)
def test_what_is_no_setting_is_refused(value: object, what: str) -> None:
    with pytest.raises(BadRecipe, match=f"^{what}"):
        parse(value)


def test_a_misspelt_key_of_a_rule_gets_a_suggestion() -> None:
    with pytest.raises(BadRecipe) as error:
        parse([{"fliter": "mlp", "value": 1}])
    assert "did you mean filter?" in error.value.hint


def test_a_constant_must_be_finite() -> None:
    with pytest.raises(BadRecipe, match="not a finite number"):
        Setting.constant(math.nan)


def outcome(value: object) -> Setting | BadRecipe:
    try:
        return parse(value)
    except BadRecipe as error:
        return error


@given(anything)
def test_any_value_makes_a_setting_or_a_bad_recipe(value: object) -> None:
    made = outcome(value)
    if isinstance(made, Setting):
        assert parse(made.to_json()) == made
    else:
        assert made.message.startswith("weight")
        assert made.message.isprintable()
