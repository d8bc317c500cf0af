"""The merged model's tokenizer and config: what is taken over, what is added, what is corrected."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from mergegit.checkpoint.alignment import Alignment, TokenOption, align
from mergegit.checkpoint.tokenizer_files import (
    config_with_vocabulary,
    generation_config_with_vocabulary,
    is_tokenizer_file,
    output_files,
)
from mergegit.checkpoint.vocabulary import read_vocabulary
from mergegit.errors import BadCheckpoint, Mismatch
from tests.checkpoint.tokenizers import (
    Files,
    added_token,
    bpe,
    dump,
    load,
    unigram,
    vocabulary,
    word_level,
    word_piece,
)

NAMES = ("base", "math", "code")


def aligned(files: Sequence[Files], source: Any = "union", **options: Any) -> Alignment:
    models = []
    for name, own in zip(NAMES, files, strict=False):
        read = read_vocabulary(own, name)
        models.append((name, read, max(read.tokens.values()) + 1))
    return align(models, base=0, source=source, **options)


def merged(*files: Files, **options: Any) -> Files:
    """The files of the output; they tell the vocabulary that the alignment promised."""
    alignment = aligned(files, **options)
    out = output_files(alignment, files)
    assert read_vocabulary(out, "output").tokens == alignment.tokens
    return out


BASE = bpe(["a", "b", "ab"], added_token("<s>", 3, special=True), merges=["a b"])
MATH = bpe(
    ["a", "b", "ab"],
    added_token("<s>", 3, special=True),
    added_token("<think>", 4, lstrip=True),
    merges=["a b"],
)
LONG = bpe(
    ["a", "b", "ab", "aba", "abab"],
    added_token("<pad>", 5, special=True),
    merges=["a b", "ab a", "ab ab", "aba b"],
)

# -- which files ----------------------------------------------------------------------------------


def test_files_of_a_tokenizer_are_told_from_others() -> None:
    of_tokenizer = [
        "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
        "vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "chat_template.jinja",
        "additional_chat_templates/tool_use.jinja", "tokenization_qwen.py",
    ]  # fmt: skip
    others = ["config.json", "generation_config.json", "README.md", "onnx/tokenizer.json",
              "preprocessor_config.json", "modeling_qwen.py"]  # fmt: skip
    assert all(is_tokenizer_file(path) for path in of_tokenizer)
    assert not any(is_tokenizer_file(path) for path in others)


@pytest.mark.parametrize(("source", "index"), [("base", 0), (1, 1), (0, 0)])
def test_a_models_tokenizer_is_taken_over_byte_for_byte(source: Any, index: int) -> None:
    files: list[Files] = [
        {**BASE, "chat_template.jinja": b"{{ 1 }}", "config.json": b"{}"},
        {**MATH, "tokenizer.model": b"\x00", "README.md": b"#"},
    ]
    out = output_files(aligned(files, source), files)
    assert out == {path: data for path, data in files[index].items() if is_tokenizer_file(path)}


def test_a_union_without_anything_new_is_the_bases_byte_for_byte() -> None:
    files: list[Files] = [MATH, BASE]
    assert output_files(aligned(files), files) == MATH


# -- tokens that were added -----------------------------------------------------------------------


def test_an_added_token_keeps_its_flags() -> None:
    out = merged(BASE, MATH)
    assert load(out)["added_tokens"] == [
        added_token("<s>", 3, special=True), added_token("<think>", 4, lstrip=True)
    ]  # fmt: skip
    assert load(out)["model"] == load(BASE)["model"]


def test_what_else_stands_in_tokenizer_json_stays() -> None:
    base = {"tokenizer.json": dump({**load(BASE), "normalizer": {"type": "NFC"}, "future": [1]})}
    document = load(merged(base, MATH))
    assert (document["normalizer"], document["future"]) == ({"type": "NFC"}, [1])


def test_the_settings_name_added_tokens_where_they_named_them_before() -> None:
    settings = {"added_tokens_decoder": {"3": {"content": "<s>", "special": True}}, "x": 1}
    base = {**BASE, "tokenizer_config.json": dump(settings), "added_tokens.json": dump({"<s>": 3})}
    out = merged(base, MATH)
    config = load(out, "tokenizer_config.json")
    assert config["x"] == 1
    assert config["added_tokens_decoder"]["4"] == {
        "content": "<think>", "special": False, "lstrip": True, "rstrip": False,
        "normalized": False, "single_word": False,
    }  # fmt: skip
    assert load(out, "added_tokens.json") == {"<s>": 3, "<think>": 4}


def test_settings_that_name_no_added_tokens_are_left_alone() -> None:
    base = {**BASE, "tokenizer_config.json": b'{"eos_token":"<s>"}'}
    out = merged(base, MATH)
    assert out.keys() == {"tokenizer.json", "tokenizer_config.json"}
    assert out["tokenizer_config.json"] == base["tokenizer_config.json"]


def test_older_vocabularies_stay_beside_added_tokens() -> None:
    base = {**BASE, "vocab.json": dump({"a": 0}), "merges.txt": b"a b\n"}
    out = merged(base, MATH)
    assert (out["vocab.json"], out["merges.txt"]) == (base["vocab.json"], base["merges.txt"])


def test_a_base_without_tokenizer_json_gets_added_tokens_json() -> None:
    base = {"vocab.json": dump({"a": 0, "b": 1, "ab": 2, "<s>": 3}), "merges.txt": b"a b\n"}
    out = merged(base, MATH)
    assert load(out, "added_tokens.json") == {"<think>": 4}
    assert out["vocab.json"] == base["vocab.json"]


def test_tokens_that_only_the_settings_add_are_added_to_tokenizer_json() -> None:
    settings = {"added_tokens_decoder": {"4": {"content": "<pad>", "special": True}}}
    base = {**BASE, "tokenizer_config.json": dump(settings)}
    out = merged(base, MATH)
    listed = [(entry["content"], entry["id"]) for entry in load(out)["added_tokens"]]
    assert listed == [("<s>", 3), ("<pad>", 4), ("<think>", 5)]


def test_tokens_that_the_recipe_alone_names_are_added() -> None:
    tokens = {"<new>": TokenOption("zero")}
    out = merged(BASE, MATH, source="base", tokens=tokens)
    assert load(out)["added_tokens"][-1] == added_token("<new>", 4)


# -- tokens of vocabularies proper ----------------------------------------------------------------


def test_tokens_of_bpe_come_with_the_merges_that_make_them() -> None:
    model = load(merged(BASE, LONG))["model"]
    assert model["merges"] == ["a b", "ab a", "ab ab", "aba b"]
    # Where ids would shift else, added tokens stand in the vocabulary proper, too.
    assert model["vocab"] == {"a": 0, "b": 1, "ab": 2, "<s>": 3, "aba": 4, "abab": 5, "<pad>": 6}
    assert list(model["vocab"].values()) == sorted(model["vocab"].values())


def test_merges_that_make_nothing_new_stay_out() -> None:
    other = bpe(["a", "b", "c", "ab", "bc", "abc"], merges=["b c", "a b", "a bc"])
    model = load(merged(bpe(["a", "b", "c", "ab", "abc"], merges=["a b", "ab c"]), other))["model"]
    assert model["merges"] == ["a b", "ab c", "b c"]


def test_merges_are_written_as_they_were() -> None:
    as_pairs = bpe(["a", "b", "ab"], merges=[["a", "b"]])
    assert load(merged(as_pairs, LONG))["model"]["merges"][:2] == [["a", "b"], ["ab", "a"]]
    as_text = bpe(["a", "b", "ab"], merges=["a b"])
    spaced = bpe(["a", " ", "a "], merges=[["a", " "]])
    assert load(merged(as_text, spaced))["model"]["merges"] == [["a", "b"], ["a", " "]]


@pytest.mark.parametrize("kind", [word_level, word_piece])
def test_tokens_of_words_come_into_the_vocabulary(kind: Any) -> None:
    model = load(merged(kind(["a", "b"], added_token("<s>", 2)), kind(["b", "c"])))["model"]
    assert model["vocab"] == {"a": 0, "b": 1, "<s>": 2, "c": 3}


def test_tokens_of_unigram_come_with_their_scores() -> None:
    base = unigram({"a": -1.0, "b": -4.5}, added_token("<s>", 2))
    model = load(merged(base, unigram({"b": -3.0, "c": -2.5})))["model"]
    # The added token must take its place, and is not to be chosen there.
    assert model["vocab"] == [["a", -1.0], ["b", -4.5], ["<s>", -4.5], ["c", -2.5]]


def test_a_gap_in_a_unigram_is_refused() -> None:
    base = unigram({"a": -1.0}, added_token("<s>", 3))
    files = [base, unigram({"c": -2.5})]
    with pytest.raises(BadCheckpoint, match="no token with the id 1"):
        output_files(aligned(files), files)


def test_older_vocabularies_go_where_they_would_be_out_of_step() -> None:
    base = {
        **BASE,
        "vocab.json": dump({"a": 0}),
        "merges.txt": b"a b\n",
        "tokenizer.model": b"\x00",
    }
    assert merged(base, LONG).keys() == {"tokenizer.json"}


def test_added_tokens_whose_ids_would_shift_are_held_in_the_vocabulary() -> None:
    base = bpe(["a", "b"], added_token("<s>", 5))
    model = load(merged(base, bpe(["a"], added_token("<x>", 1))))["model"]
    assert model["vocab"] == {"a": 0, "b": 1, "<s>": 5, "<x>": 6}


def test_vocabularies_of_two_kinds_have_no_union() -> None:
    files = [BASE, word_level(["a", "c"])]
    with pytest.raises(Mismatch, match="base is a BPE and that of math a WordLevel"):
        output_files(aligned(files), files)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ([{"vocab.json": dump({"a": 0})}, LONG], "base has no tokenizer.json"),
        ([BASE, {"vocab.json": dump({"c": 0})}], "math has no tokenizer.json"),
        ([BASE, bpe(["a", "aa"], merges=["a a a"])], "no pair: 'a a a'"),
        ([BASE, bpe(["a", "aa"], merges=[7])], "no pair: 7"),
    ],
)
def test_what_can_not_be_added_is_refused(files: list[Files], words: str) -> None:
    with pytest.raises(BadCheckpoint) as caught:
        output_files(aligned(files), files)
    assert words in caught.value.message


# -- configs --------------------------------------------------------------------------------------


def config_alignment(source: Any = "union", rows: int = 4) -> Alignment:
    base = vocabulary("<pad>", "a", "<s>", "</s>")
    math = vocabulary("</s>", "<s>", "a", "<x>", "<y>")
    return align([("base", base, rows), ("math", math, 5)], base=0, source=source)


def test_a_config_states_the_rows() -> None:
    out = config_with_vocabulary(dump({"vocab_size": 4, "hidden_size": 8}), config_alignment())
    assert json.loads(out) == {"vocab_size": 6, "hidden_size": 8}


def test_a_config_states_the_rows_wherever_it_stated_them() -> None:
    config = {
        "vocab_size": 4,
        "text_config": {"vocab_size": 4},
        "vision_config": {"vocab_size": 4},
    }
    out = json.loads(config_with_vocabulary(dump(config), config_alignment()))
    assert [out["vocab_size"], out["text_config"], out["vision_config"]] == [
        6, {"vocab_size": 6}, {"vocab_size": 4}
    ]  # fmt: skip
    out = json.loads(config_with_vocabulary(dump({"text_config": {}}), config_alignment()))
    assert out == {"text_config": {"vocab_size": 6}}


def test_a_config_that_says_so_already_comes_back_byte_for_byte() -> None:
    config = b'{"vocab_size":6,  "eos_token_id": 3}'
    assert config_with_vocabulary(config, config_alignment(rows=6)) is config
    assert config_with_vocabulary(b"{ }", config_alignment("base")) == b"{ }"
    assert generation_config_with_vocabulary(b'{"eos_token_id": 3}', config_alignment()) == (
        b'{"eos_token_id": 3}'
    )


def test_ids_follow_their_tokens() -> None:
    config = {
        "vocab_size": 4, "bos_token_id": 2, "eos_token_id": [3, 2], "unk_token_id": None,
        "text_config": {"eos_token_id": 3}, "num_hidden_layers": 3, "image_token_index": 1,
        "sep_token_id": -1,
    }  # fmt: skip
    out = json.loads(config_with_vocabulary(dump(config), config_alignment(1)))
    assert out == {
        "vocab_size": 5, "bos_token_id": 1, "eos_token_id": [0, 1], "unk_token_id": None,
        "text_config": {"eos_token_id": 0}, "num_hidden_layers": 3, "image_token_index": 2,
        "sep_token_id": -1,
    }  # fmt: skip


def test_an_id_whose_token_is_gone_comes_from_the_other_config_or_is_none() -> None:
    config = dump({"pad_token_id": 0, "eos_token_id": [0, 3], "suppress_tokens": []})
    out = generation_config_with_vocabulary(config, config_alignment(1))
    assert json.loads(out) == {"pad_token_id": None, "eos_token_id": [0], "suppress_tokens": []}
    start = dump({"pad_token_id": 4})
    out = generation_config_with_vocabulary(config, config_alignment(1), start_config=start)
    assert json.loads(out)["pad_token_id"] == 4


def test_a_malformed_config_is_refused() -> None:
    with pytest.raises(BadCheckpoint, match=r"config\.json of base"):
        config_with_vocabulary(b"[]", config_alignment())
