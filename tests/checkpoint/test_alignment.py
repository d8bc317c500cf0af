"""Alignment: whose row stands where, what fills the gaps, and what can't be matched."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergegit.checkpoint.alignment import (
    LACKS,
    Addition,
    Alignment,
    Fill,
    TokenOption,
    TokenRow,
    align,
)
from mergegit.checkpoint.vocabulary import AddedToken, Vocabulary
from mergegit.errors import BadRecipe, Mismatch
from tests.checkpoint.tokenizers import vocabulary

BASE = vocabulary("a", "b", "c")
MATH = vocabulary("a", "b", "c", "<think>")
CODE = vocabulary("c", "<fim>", "b", "<think>")


def models(
    *vocabularies: Vocabulary, rows: tuple[int, ...] = ()
) -> list[tuple[str, Vocabulary, int]]:
    counts = rows or tuple(len(own.tokens) for own in vocabularies)
    return [
        (f"model {i}", own, n) for i, (own, n) in enumerate(zip(vocabularies, counts, strict=True))
    ]


def row(model: int, number: int) -> Fill:
    return Fill("row", ((model, number),))


def gathered(alignment: Alignment) -> list[list[int]]:
    return [own.tolist() for own in alignment.gather]


# -- the output's vocabulary ----------------------------------------------------------------------


def test_base_keeps_the_bases_ids() -> None:
    alignment = align(models(BASE, MATH, CODE), base=0, source="base")
    assert (alignment.tokens, alignment.rows, alignment.start) == (BASE.tokens, 3, 0)
    assert gathered(alignment) == [[0, 1, 2], [0, 1, 2], [LACKS, 2, 0]]


def test_a_model_gives_its_own_ids() -> None:
    alignment = align(models(BASE, MATH, CODE), base=0, source=2)
    assert (alignment.tokens, alignment.rows, alignment.start) == (CODE.tokens, 4, 2)
    assert gathered(alignment) == [[2, LACKS, 1, LACKS], [2, LACKS, 1, 3], [0, 1, 2, 3]]


def test_union_appends_what_the_others_have_in_order() -> None:
    alignment = align(models(BASE, MATH, CODE), base=0, source="union")
    assert alignment.tokens == {"a": 0, "b": 1, "c": 2, "<think>": 3, "<fim>": 4}
    assert gathered(alignment) == [
        [0, 1, 2, LACKS, LACKS],
        [0, 1, 2, 3, LACKS],
        [LACKS, 2, 0, 3, 1],
    ]


def test_union_starts_from_the_base_wherever_it_stands() -> None:
    alignment = align(models(MATH, BASE), base=1, source="union")
    assert alignment.tokens == {"a": 0, "b": 1, "c": 2, "<think>": 3}
    assert alignment.start == 1


def test_additions_say_where_they_come_from() -> None:
    flags = AddedToken(special=True)
    code = Vocabulary({"b": 0, "x": 1, "<s>": 2}, {"<s>": flags})
    proper = vocabulary("a", "x", "<s>")
    options = {"<new>": TokenOption("zero")}
    alignment = align(models(BASE, proper, code), base=0, source="union", tokens=options)
    assert alignment.additions == (
        Addition("x", 3, 1, None),
        # What one model has added is added, though the first to have it has it otherwise.
        Addition("<s>", 4, 2, flags),
        Addition("<new>", 5, None, AddedToken()),
    )


def test_tokens_of_the_recipe_are_added_to_the_base_too() -> None:
    options = {"<think>": TokenOption(), "b": TokenOption()}
    alignment = align(models(BASE, MATH), base=0, source="base", tokens=options)
    assert alignment.tokens == {"a": 0, "b": 1, "c": 2, "<think>": 3}
    assert alignment.fills == {3: row(1, 3)}


# -- rows -----------------------------------------------------------------------------------------


def test_one_vocabulary_leaves_all_models_as_they_are() -> None:
    for source in ("base", "union", 1):
        alignment = align(models(BASE, BASE, BASE), base=0, source=source)  # type: ignore[arg-type]
        assert all(alignment.is_identity(model) for model in range(3))
        assert alignment.fills == {}


def test_rows_beyond_the_vocabulary_are_kept() -> None:
    alignment = align(models(BASE, BASE, rows=(8, 8)), base=0, source="union")
    assert alignment.rows == 8
    assert alignment.is_identity(0)
    assert alignment.is_identity(1)


def test_new_tokens_take_rows_that_no_token_had() -> None:
    alignment = align(models(BASE, MATH, rows=(8, 8)), base=0, source="union")
    assert (alignment.rows, alignment.tokens["<think>"]) == (8, 3)
    # What the base has there means nothing.
    assert gathered(alignment)[0] == [0, 1, 2, LACKS, 4, 5, 6, 7]
    assert alignment.fills == {3: row(1, 3)}
    assert alignment.is_identity(1)


def test_a_row_that_has_a_token_does_not_stand_for_one_without() -> None:
    alignment = align(models(BASE, MATH, rows=(8, 8)), base=0, source="base")
    assert gathered(alignment)[1] == [0, 1, 2, LACKS, 4, 5, 6, 7]
    assert alignment.fills == {3: row(0, 3)}


def test_rows_of_experts_beyond_the_bases_go() -> None:
    alignment = align(models(BASE, BASE, rows=(3, 9)), base=0, source="base")
    assert (alignment.rows, gathered(alignment)[1]) == (3, [0, 1, 2])
    assert not alignment.is_identity(1)


def test_rows_are_rounded_up_to_a_multiple() -> None:
    alignment = align(models(BASE, MATH), base=0, source="union", pad_to_multiple_of=8)
    assert alignment.rows == 8
    assert alignment.fills == {3: row(1, 3), **dict.fromkeys(range(4, 8), Fill("centre"))}
    assert alignment.named.tolist() == [0, 1, 2]
    assert align(models(MATH), base=0, source="base", pad_to_multiple_of=4).rows == 4


@pytest.mark.parametrize("multiple", [0, -8, 1 << 20])
def test_a_multiple_that_makes_no_sense_is_refused(multiple: int) -> None:
    with pytest.raises(BadRecipe):
        align(models(BASE), base=0, source="base", pad_to_multiple_of=multiple)


def test_a_token_beyond_a_models_rows_is_none_of_its_tokens() -> None:
    alignment = align(models(BASE, MATH, rows=(3, 3)), base=0, source="union")
    assert alignment.tokens == BASE.tokens
    assert all(alignment.is_identity(model) for model in (0, 1))


def test_a_token_without_a_row_anywhere_adds_none() -> None:
    alignment = align(models(MATH, BASE), base=0, source="base")
    assert alignment.rows == 4
    alignment = align(models(MATH, BASE, rows=(3, 3)), base=0, source="base")
    assert (alignment.rows, alignment.tokens["<think>"]) == (3, 3)
    assert alignment.is_identity(0)


def test_a_token_that_only_an_expert_has_a_row_for_gets_one() -> None:
    alignment = align(models(MATH, MATH, rows=(3, 4)), base=0, source="base")
    assert (alignment.rows, alignment.fills) == (4, {3: row(1, 3)})


def test_gaps_between_ids_are_rows_without_a_token() -> None:
    gap = vocabulary("a", "b", z=4)
    alignment = align(models(gap, gap, rows=(5, 5)), base=0, source="union")
    assert alignment.is_identity(1)
    alignment = align(models(gap, vocabulary("a", "b", "z"), rows=(5, 3)), base=0, source="base")
    assert gathered(alignment)[1] == [0, 1, LACKS, LACKS, 2]
    assert alignment.fills == {2: row(0, 2), 3: row(0, 3)}


def test_a_model_without_rows_is_refused() -> None:
    with pytest.raises(Mismatch, match="model 1"):
        align(models(BASE, BASE, rows=(3, 0)), base=0, source="base")


# -- fills ----------------------------------------------------------------------------------------


def test_the_bases_row_fills_what_others_lack() -> None:
    alignment = align(models(BASE, vocabulary("a"), MATH), base=0, source="base")
    assert alignment.fills == {1: row(0, 1), 2: row(0, 2)}


def test_the_mean_of_those_that_have_it_fills_what_the_base_lacks() -> None:
    alignment = align(models(BASE, MATH, CODE, BASE), base=0, source="union")
    assert alignment.fills[3] == Fill("mean", ((1, 3), (2, 3)))
    assert alignment.fills[4] == row(2, 1)


def test_where_no_base_is_named_the_mean_fills_what_a_model_lacks() -> None:
    experts = models(BASE, vocabulary("b", "a"), vocabulary("b"))
    alignment = align(experts, base=0, source="base", base_fills=False)
    assert alignment.fills == {0: Fill("mean", ((0, 0), (1, 1))), 2: row(0, 2)}


def test_a_model_aside_gives_neither_tokens_nor_rows() -> None:
    merged = models(CODE, vocabulary("a", "b"), vocabulary("b", "<new>"), rows=(9, 2, 2))
    alignment = align(merged, base=1, source="union", aside=0)
    assert alignment.tokens == {"a": 0, "b": 1, "<new>": 2}
    assert gathered(alignment) == [[LACKS, 2, LACKS], [0, 1, LACKS], [LACKS, 0, 1]]
    assert alignment.fills == {0: row(1, 0), 2: row(2, 1)}
    with pytest.raises(BadRecipe, match="<fim>"):
        align(merged, base=1, source="union", aside=0, tokens={"<fim>": TokenOption()})


def test_the_recipe_names_the_source_of_a_row() -> None:
    options = {
        "<think>": TokenOption(TokenRow(2)),
        "<fim>": TokenOption(TokenRow(0, "b")),
        "a": TokenOption(TokenRow(1, 2)),
        "c": TokenOption("zero"),
    }
    alignment = align(models(BASE, MATH, CODE), base=0, source="union", tokens=options)
    # Every model has c: a source that is not forced is for those that lack the token.
    assert alignment.fills == {0: row(1, 2), 3: row(2, 3), 4: row(0, 1)}
    assert alignment.forced == frozenset()


def test_force_holds_for_models_that_have_the_token() -> None:
    options = {"b": TokenOption(TokenRow(2), force=True), "c": TokenOption("zero", force=True)}
    alignment = align(models(BASE, MATH, CODE), base=0, source="base", tokens=options)
    assert alignment.forced == {1, 2}
    assert (alignment.fills[1], alignment.fills[2]) == (row(2, 2), Fill("zero"))
    assert not alignment.is_identity(0)


def test_force_without_a_source_takes_the_row_that_others_would_get() -> None:
    options = {"b": TokenOption(force=True)}
    alignment = align(models(BASE, MATH), base=0, source="base", tokens=options)
    assert alignment.fills == {1: row(0, 1)}
    assert alignment.is_identity(0)
    assert not alignment.is_identity(1)


def test_a_new_token_can_be_made_of_another() -> None:
    options = {"<new>": TokenOption(TokenRow(1, "<think>")), "<0>": TokenOption("zero")}
    alignment = align(models(BASE, MATH), base=0, source="base", tokens=options)
    assert alignment.tokens == {**BASE.tokens, "<new>": 3, "<0>": 4}
    assert alignment.fills == {3: row(1, 3), 4: Fill("zero")}


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (TokenOption(), "no model has token '<x>'"),
        (TokenOption(force=True), "no model has token '<x>'"),
        (TokenOption(TokenRow(1)), "model 1 has no row for token '<x>', of which it is the source"),
        (TokenOption(TokenRow(0, "<think>")), "model 0 has no row for token '<think>'"),
        (TokenOption(TokenRow(1, 4)), "model 1 has no row for id 4"),
        (TokenOption(TokenRow(1, -1)), "model 1 has no row for id -1"),
    ],
)
def test_what_a_recipe_names_must_be_there(option: TokenOption, words: str) -> None:
    with pytest.raises(BadRecipe) as caught:
        align(models(BASE, MATH), base=0, source="union", tokens={"<x>": option})
    assert words in caught.value.message
    assert "'<x>'" in caught.value.message


def test_a_source_must_have_a_row_and_not_the_token_alone() -> None:
    options = {"<think>": TokenOption(TokenRow(1))}
    with pytest.raises(BadRecipe, match="no row for token"):
        align(models(BASE, MATH, rows=(3, 3)), base=0, source="base", tokens=options)


# -- ids that moved -------------------------------------------------------------------------------


def test_ids_of_the_base_that_moved_or_went_are_told() -> None:
    alignment = align(models(BASE, CODE), base=0, source=1)
    assert alignment.moved == {0: None, 1: 2, 2: 0}
    assert align(models(BASE, CODE), base=0, source="union").moved == {}


# -- for all vocabularies -------------------------------------------------------------------------

TOKENS = st.dictionaries(
    st.sampled_from("abcdefgh"), st.integers(0, 9), min_size=1, max_size=8
).filter(lambda tokens: len(set(tokens.values())) == len(tokens))


@given(st.lists(st.tuples(TOKENS, st.integers(1, 12)), min_size=1, max_size=4), st.data())
def test_every_row_is_the_tokens_own_or_filled(
    given_models: list[tuple[dict[str, int], int]], data: Any
) -> None:
    listed = [(str(i), Vocabulary(t, {}), n) for i, (t, n) in enumerate(given_models)]
    base = data.draw(st.integers(0, len(listed) - 1))
    source = data.draw(st.sampled_from(["base", "union", *range(len(listed))]))
    alignment = align(listed, base=base, source=source)
    by_id = {number: token for token, number in alignment.tokens.items()}
    assert len(by_id) == len(alignment.tokens)
    start = listed[alignment.start]
    assert alignment.tokens.items() >= start[1].tokens.items()
    assert alignment.rows >= start[2]
    for (_, own, rows), gather in zip(listed, alignment.gather, strict=True):
        taken = gather[gather != LACKS]
        assert len(np.unique(taken)) == len(taken)
        for number in range(alignment.rows):
            token = by_id.get(number)
            expected = own.tokens.get(token, rows) if token is not None else number
            if token is None and number in own.tokens.values():
                expected = rows
            assert gather[number] == (expected if expected < rows else LACKS)
    lacking = set(np.flatnonzero((np.stack(alignment.gather) == LACKS).any(axis=0)).tolist())
    assert set(alignment.fills) == lacking
    for number, fill in alignment.fills.items():
        for model, taken_row in fill.sources:
            assert alignment.gather[model][number] == taken_row
    if source == "union":
        with_rows = {t for tokens, rows in given_models for t, i in tokens.items() if i < rows}
        assert with_rows <= alignment.tokens.keys()
