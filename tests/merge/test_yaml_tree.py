from __future__ import annotations

import math
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergegit.errors import BadRecipe
from mergegit.merge.yaml_tree import MAX_BYTES, MAX_DEPTH, MAX_NODES, plain, read_trees


def read(text: str) -> Any:
    (root,) = read_trees(text)
    return plain(root)


def refusal(text: str) -> BadRecipe:
    with pytest.raises(BadRecipe) as error:
        read_trees(text)
    assert error.value.message.isprintable()
    assert error.value.hint
    return error.value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12", 12), ("-3", -3), ("+4", 4), ("0", 0), ("0.5", 0.5), (".5", 0.5), ("5.", 5.0),
        ("1e-5", 1e-5), ("2E3", 2000.0), ("1.5e+3", 1500.0), ("00.5", 0.5), ("-.inf", -math.inf),
        ("true", True), ("Yes", True), ("ON", True), ("false", False), ("no", False),
        ("null", None), ("~", None),
        ("010", "010"), ("0x1F", "0x1F"), ("1:30", "1:30"), ("1_000", "1_000"),
        ("2024-01-01", "2024-01-01"), ("1e", "1e"), ("yEs", "yEs"), ("7b", "7b"),
        ("'12'", "12"), ('"null"', "null"), ("!!str 12", "12"), ("! 12", "12"),
        ("|\n  a\n  b\n", "a\nb\n"), ("9" * 5000, math.inf), ("9" * 400, int("9" * 400)),
    ],
)  # fmt: skip
def test_scalars_mean_what_they_look_like(text: str, value: object) -> None:
    assert read(f"- {text}") == [value]
    assert type(read(f"- {text}")[0]) is type(value)


def test_not_a_number_is_read_as_such() -> None:
    assert math.isnan(read("- .NaN")[0])


@pytest.mark.parametrize("key", ["yes", "12", "~", "null", "1e-5", "'yes'", "<|im_start|>", "''"])
def test_keys_are_taken_as_they_are_written(key: str) -> None:
    assert read(f"{key}: 1") == {key.strip("'"): 1}


def test_parts_know_their_lines() -> None:
    (root,) = read_trees("# a comment\n\na: 1\nb:\n  - x\n  - {c: 2,\n     d: 3}\n")
    assert isinstance(root.value, dict)
    assert (root.line, root.value["a"].line, root.value["b"].line) == (3, 3, 4)
    items = root.value["b"].node.value
    assert [item.line for item in items] == [5, 6]
    assert (items[1].value["c"].line, items[1].value["d"].line) == (6, 7)


def test_empty_documents_are_none() -> None:
    assert read_trees("") == ()
    assert [
        plain(root) for root in read_trees("---\n---\na: 1\n---\n# nothing\n---\nb\n...\n")
    ] == [
        {"a": 1},
        "b",
    ]


def test_a_byte_order_mark_is_passed_over() -> None:
    assert read("\ufeffa: 1") == {"a": 1}


def test_aliases_stand_for_what_they_name() -> None:
    assert read("a: &x [1, 2]\nb: *x\nc: {d: *x}") == {
        "a": [1, 2], "b": [1, 2], "c": {"d": [1, 2]},
    }  # fmt: skip


def test_an_anchor_ends_with_its_document() -> None:
    assert "alias *x on line 3 has no anchor" in refusal("a: &x 1\n---\nb: *x").message


def test_a_merge_key_brings_in_what_is_not_there() -> None:
    text = "one: &one {a: 1, b: 1}\ntwo: &two {b: 2, c: 2}\n"
    assert read(text + "x: {b: 3, <<: *one}")["x"] == {"a": 1, "b": 3}
    assert read(text + "x: {<<: [*one, *two]}")["x"] == {"a": 1, "b": 1, "c": 2}
    assert read(text + "x: {'<<': 5}")["x"] == {"<<": 5}


@pytest.mark.parametrize("text", ["<<: 3", "<<: [{a: 1}, 3]", "<<:"])
def test_only_mappings_are_merged(text: str) -> None:
    assert "<< on line 1 takes in what is not a mapping" in refusal(text).message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3", "key 'a' stands twice, on lines 1 and 3"),
        ("x:\n  b: 1\n  'b': 1", "key 'b' stands twice, on lines 2 and 3"),
        ("1: 1\n'1': 1", "key '1' stands twice, on lines 1 and 2"),
        ("<<: {a: 1}\n<<: {b: 1}", "key '<<' stands twice, on lines 1 and 2"),
        ("&k a: 1\n*k : 2", "key 'a' stands twice, on lines 1 and 2"),
    ],
)
def test_a_key_stands_once(text: str, message: str) -> None:
    assert refusal(text).message == message


@pytest.mark.parametrize("text", ["? [a]\n: 1", "? {a: 1}\n: 1", "a: &x [1]\n*x : 2"])
def test_keys_are_text(text: str) -> None:
    assert "is a list or a mapping" in refusal(text).message


@pytest.mark.parametrize(
    "text",
    [
        "a: !!python/object/apply:os.system ['true']", "a: !!int 5", "a: !custom {b: 1}",
        "a: !!binary aGk=", "a: !!set {b}", "a: !!str [b]", "a: !!map [b]", "a: !!timestamp 2024",
    ],
)  # fmt: skip
def test_tags_are_refused(text: str) -> None:
    message = refusal(text).message
    assert "tag !" in message
    assert "on line 1" in message


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a: 1\nb: [1,", 2), ("a:\n\tb: 1", 2), ("a: 'b", 1), ("a: b: c", 1), ("a: 1\n- b", 2),
        ("a: @b", 1), ("\na\x00b", 2), ("a\n\n\ud800", 3), ("%YAML 7.0\n---\na", 1),
        ("a: !x!y 1", 1),
    ],
)  # fmt: skip
def test_what_is_no_yaml_is_refused_with_its_line(text: str, line: int) -> None:
    message = refusal(text).message
    assert message.startswith("the recipe is not YAML: ")
    assert message.endswith(f" on line {line}")


@pytest.mark.parametrize(
    "text", [r'"\UFFFFFFFF"', r'"\U00110000"', f"%YAML {'9' * 5000}.1\n---\na"]
)
def test_numbers_that_no_machine_takes_are_refused(text: str) -> None:
    assert "too large" in refusal(text).message


def test_halves_of_a_character_are_put_together() -> None:
    assert read(r'"\ud83d\ude00": "\ud83d\ude00"') == {"😀": "😀"}
    assert "line 2 is not valid Unicode" in refusal('a: 1\nb: "\\ud83d"').message


def test_an_alias_may_not_stand_within_what_it_names() -> None:
    assert "alias *x on line 1 stands within what it names" in refusal("a: &x [*x]").message


def laughs(levels: int, width: int) -> str:
    lines = ["a0: &a0 ha"]
    lines += [
        f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * width)}]"
        for level in range(1, levels)
    ]
    return "\n".join(lines)


@pytest.mark.parametrize(
    "text",
    [
        laughs(10, 10),
        laughs(30, 2),
        "a: &a {b: 1}\n" + "x: &x {<<: [*a, *a]}\n" + "y: [" + "*x," * 20_000 + "]",
        "- 1\n" * (MAX_NODES + 1),
        "---\n" * (MAX_NODES + 2),
    ],
)
def test_what_would_grow_is_refused_at_once(text: str) -> None:
    began = time.perf_counter()
    assert f"more than {MAX_NODES} parts" in refusal(text).message
    assert time.perf_counter() - began < 10


@pytest.mark.parametrize("text", ["[" * 500_000, "- " * 500_000, "{a: " * 200_000, "a: &x " * 9])
def test_depth_is_bounded(text: str) -> None:
    assert refusal(text)


def test_depth_is_counted_through_aliases() -> None:
    deepest = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert read(deepest)
    assert f"more than {MAX_DEPTH} deep" in refusal(f"[{deepest}]").message
    chain = ["- &a0 [x]", *(f"- &a{level} [*a{level - 1}]" for level in range(1, 40))]
    assert read("\n".join(chain[: MAX_DEPTH - 1]))
    assert f"deep on line {MAX_DEPTH}" in refusal("\n".join(chain)).message


def test_length_is_bounded_in_bytes() -> None:
    assert read("x" * MAX_BYTES)
    assert "longer than 1 MiB" in refusal("x" * (MAX_BYTES + 1)).message
    assert "longer than 1 MiB" in refusal("ä" * (MAX_BYTES // 2 + 1)).message


marks = st.text(alphabet="ab1 \n\t-:?[]{},&*!|>'\"%@#~<.=\\\u2028\ud800\U0001f600x0", max_size=60)


@given(st.text() | marks)
def test_any_text_is_a_tree_or_a_bad_recipe(text: str) -> None:
    try:
        roots = read_trees(text)
    except BadRecipe:
        return
    for root in roots:
        plain(root)
