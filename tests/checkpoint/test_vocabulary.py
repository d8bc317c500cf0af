"""Vocabularies: which files tell them, in which order, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from mergegit.checkpoint import json_files
from mergegit.checkpoint.vocabulary import MAX_ID, AddedToken, read_vocabulary
from mergegit.errors import BadCheckpoint
from tests.checkpoint.tokenizers import (
    Files,
    added_token,
    bpe,
    dump,
    load,
    tokenizer,
    unigram,
    word_level,
    word_piece,
)

WORDS = {"a": 0, "b": 1, "ab": 2}
START = added_token("<s>", 3, special=True)


def tokens_of(files: Files) -> dict[str, int]:
    return dict(read_vocabulary(files, "math").tokens)


# -- what is read ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "files",
    [
        bpe(["a", "b", "ab"], START, merges=["a b"]),
        word_piece(["a", "b", "ab"], START),
        word_level(["a", "b", "ab"], START),
        unigram({"a": -1.5, "b": -2, "ab": 0}, START),
        {"vocab.json": dump(WORDS), "added_tokens.json": dump({"<s>": 3})},
        {"vocab.txt": b"a\nb\nab\n<s>\n"},
    ],
    ids=["BPE", "WordPiece", "WordLevel", "Unigram", "vocab.json", "vocab.txt"],
)
def test_each_kind_of_file_gives_its_tokens_and_ids(files: Files) -> None:
    assert tokens_of(files) == {**WORDS, "<s>": 3}


def test_a_model_without_a_type_is_told_by_its_parts() -> None:
    assert tokens_of(tokenizer({"vocab": WORDS, "merges": []})) == WORDS
    assert tokens_of(tokenizer({"vocab": [["a", -1.0], ["b", -2.0]]})) == {"a": 0, "b": 1}


def test_ids_may_have_gaps() -> None:
    assert tokens_of(tokenizer({"type": "BPE", "vocab": {"a": 5, "b": 9}})) == {"a": 5, "b": 9}


def test_tokenizer_json_counts_before_older_files() -> None:
    files = {**word_level(["a"]), "vocab.json": dump({"z": 0}), "vocab.txt": b"y\n"}
    assert tokens_of(files) == {"a": 0}


def test_vocab_json_counts_before_vocab_txt() -> None:
    assert tokens_of({"vocab.json": dump({"z": 0}), "vocab.txt": b"y\n"}) == {"z": 0}


def test_a_line_of_vocab_txt_ends_at_line_feeds_alone() -> None:
    text = "a\r\n\u2028b\x0c\n\nc"
    assert tokens_of({"vocab.txt": text.encode()}) == {"a": 0, "\u2028b\x0c": 1, "": 2, "c": 3}


def test_flags_of_added_tokens_are_kept() -> None:
    files = bpe(["a"], added_token("<x>", 1, special=True, lstrip=True), added_token("a", 0))
    assert read_vocabulary(files, "math").added == {
        "<x>": AddedToken(special=True, lstrip=True),
        "a": AddedToken(),
    }


def decoder(**tokens: Any) -> dict[str, Any]:
    """An added_tokens_decoder: ids, given as _7, with tokens and flags."""
    return {key[1:]: value for key, value in tokens.items()}


def test_the_config_adds_tokens_that_tokenizer_json_lacks() -> None:
    files = bpe(["a", "b"], added_token("<x>", 2, special=True))
    files["tokenizer_config.json"] = dump(
        {
            "added_tokens_decoder": decoder(
                _2={"content": "<x>", "special": False},
                _3={"content": "<y>", "rstrip": True},
            )
        }
    )
    read = read_vocabulary(files, "math")
    assert read.tokens == {"a": 0, "b": 1, "<x>": 2, "<y>": 3}
    assert read.added == {"<x>": AddedToken(special=True), "<y>": AddedToken(rstrip=True)}


def test_added_tokens_json_counts_where_the_config_names_none() -> None:
    files = {
        "vocab.json": dump(WORDS),
        "added_tokens.json": dump({"<pad>": 3, "<x>": 4}),
        "special_tokens_map.json": dump({"pad_token": {"content": "<pad>"}}),
    }
    read = read_vocabulary(files, "math")
    assert read.tokens == {**WORDS, "<pad>": 3, "<x>": 4}
    assert read.added == {"<pad>": AddedToken(special=True), "<x>": AddedToken()}
    files["tokenizer_config.json"] = dump({"added_tokens_decoder": {"7": {"content": "<z>"}}})
    assert tokens_of(files) == {**WORDS, "<z>": 7}


def test_an_empty_added_token_is_none() -> None:
    assert tokens_of(bpe(["a"], added_token("", 1))) == {"a": 0}


# -- what is refused ------------------------------------------------------------------------------


def refused(files: Files, *words: str) -> BadCheckpoint:
    with pytest.raises(BadCheckpoint) as caught:
        read_vocabulary(files, "math")
    message = caught.value.message
    assert "math" in message
    assert "\n" not in message
    assert len(message) < 400
    for word in words:
        assert word in message
    return caught.value


@pytest.mark.parametrize("path", ["tokenizer.model", "spiece.model", "tekken.json"])
def test_a_vocabulary_in_an_opaque_file_alone_is_refused_with_a_way_out(path: str) -> None:
    error = refused({path: b"\x0a\x0e", "config.json": b"{}"}, path)
    assert "tokenizer.json" in error.hint


def test_without_files_those_that_would_do_are_named() -> None:
    refused({"config.json": b"{}"}, "tokenizer.json", "vocab.json", "vocab.txt")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "not valid JSON"),
        (b"[1]", "not a JSON object"),
        (b"\xff\xfe", "not UTF-8"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"model": ' + b"9" * 9999 + b"}", "not valid JSON"),
        (b'{"model": 1, "model": 2}', "stands twice"),
        (b"{}", "describes no model"),
        (dump({"model": []}), "describes no model"),
        (dump({"model": {"type": "Morse"}}), "unknown type 'Morse'"),
        (dump({"model": {"type": "BPE", "vocab": [["a", 1]]}}), "without a vocabulary"),
        (dump({"model": {"type": "Unigram", "vocab": {"a": 1}}}), "without a vocabulary"),
        (dump({"model": {"type": "Unigram", "vocab": [["a", 0.5], "b"]}}), "no pair"),
        (dump({"model": {"type": "Unigram", "vocab": [[["a"], 0.5]]}}), "no text"),
        (dump({"model": {"vocab": {"a": 0}}, "added_tokens": {}}), "no list"),
        (dump({"model": {"vocab": {"a": 0}}, "added_tokens": ["<s>"]}), "no object"),
        (dump({"model": {"vocab": {}}}), "empty"),
    ],
)
def test_a_malformed_tokenizer_json_is_refused(data: bytes, words: str) -> None:
    refused({"tokenizer.json": data}, words)


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (-1, "ids lie from 0"),
        (MAX_ID, "ids lie from 0"),
        (10**40, "ids lie from 0"),
        (1.0, "no id"),
        ("1", "no id"),
        (True, "no id"),
        (None, "no id"),
        (0, "'a' has already"),
    ],
)
def test_an_id_that_is_none_is_refused(number: object, words: str) -> None:
    refused({"vocab.json": dump({"a": 0, "b": number})}, "vocab.json", "'b'", words)
    entry = {**added_token("b", 1), "id": number}
    refused(bpe(["a"], entry), "tokenizer.json", "'b'", words)


def test_a_token_may_not_have_two_ids() -> None:
    refused(bpe(["a", "b"], added_token("b", 2)), "'b'", "1 already")
    refused(unigram({"a": 1}, added_token("a", 3)), "'a'")
    refused({"vocab.txt": b"a\nb\na\n"}, "'a' twice, as 0 and 2")


def test_settings_may_not_contradict_the_tokenizer() -> None:
    files = bpe(["a", "b"])
    files["tokenizer_config.json"] = dump({"added_tokens_decoder": {"1": {"content": "<x>"}}})
    assert "transformers" in refused(files, "tokenizer_config.json", "'b' has already").hint


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"added_tokens_decoder": []}, "no object"),
        ({"added_tokens_decoder": {"x": {"content": "<x>"}}}, "'x' for a token's id"),
        ({"added_tokens_decoder": {"-1": {"content": "<x>"}}}, "'-1' for a token's id"),
        ({"added_tokens_decoder": {"9" * 30: {"content": "<x>"}}}, "for a token's id"),
        ({"added_tokens_decoder": {"5": "<x>"}}, "no object for token 5"),
        ({"added_tokens_decoder": {"5": {"content": 5}}}, "no text"),
        ({"added_tokens_decoder": {"5": {"content": "<x>", "special": 1}}}, "1 for special"),
    ],
)
def test_malformed_settings_are_refused(settings: dict[str, Any], words: str) -> None:
    files = {**bpe(["a"]), "tokenizer_config.json": dump(settings)}
    refused(files, "tokenizer_config.json", words)


def test_half_a_surrogate_pair_is_refused() -> None:
    refused({"vocab.json": b'{"\\ud800": 0}'}, "surrogate")


def test_a_huge_token_is_not_shown_whole() -> None:
    refused({"vocab.json": dump({"a" * 100_000: -1})}, "ids lie from 0")


def test_a_file_is_read_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    files = word_level(["a"])
    monkeypatch.setattr(json_files, "MAX_BYTES", len(files["tokenizer.json"]) - 1)
    refused(files, "at most")


def test_a_byte_order_mark_is_no_part_of_the_file() -> None:
    files = word_level(["a"])
    files["tokenizer.json"] = b"\xef\xbb\xbf" + files["tokenizer.json"]
    assert tokens_of(files) == {"a": 0}


def test_the_files_are_not_changed() -> None:
    files = bpe(["a"], START)
    before = load(files)
    read_vocabulary(files, "math")
    assert load(files) == before
