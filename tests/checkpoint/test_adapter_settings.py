"""The config of an adapter: ranks and scales by module, and what is refused."""

from __future__ import annotations

import json
import math
import sys

import pytest

from mergegit.checkpoint.adapter_settings import (
    MAX_CONFIG_BYTES,
    MAX_PATTERN_LENGTH,
    MAX_PATTERNS,
    Settings,
    read_settings,
)
from mergegit.errors import BadCheckpoint
from tests.checkpoint.adapters import config

Q0, Q1, Q11 = (f"model.layers.{n}.self_attn.q_proj" for n in (0, 1, 11))
HUGE = "9" * (sys.get_int_max_str_digits() + 1)


def settings(**values: object) -> Settings:
    return read_settings(config(**values), "the adapter")


def refusal(text: bytes) -> BadCheckpoint:
    """The error, whose two lines can be printed."""
    with pytest.raises(BadCheckpoint) as caught:
        read_settings(text, "adapter math")
    for line in (caught.value.message, caught.value.hint):
        assert line.encode().isascii()
        assert "\n" not in line
        assert 0 < len(line) < 400
    assert "adapter math" in caught.value.message
    return caught.value


def test_the_scale_is_alpha_over_the_rank() -> None:
    found = settings(r=8, lora_alpha=20)
    assert (found.rank_of(Q0), found.scale_of(Q0)) == (8, 2.5)


def test_a_stabilized_rank_divides_by_its_root() -> None:
    found = settings(r=16, lora_alpha=20, use_rslora=True)
    assert found.scale_of(Q0) == 5.0


def test_defaults_are_those_of_peft() -> None:
    found = read_settings(b'{"peft_type": "LORA"}', "the adapter")
    assert (found.rank, found.alpha, found.base_name) == (8, 8.0, None)
    flags = (found.rank_stabilized, found.has_magnitudes, found.inputs_first, found.ties_head)
    assert not any(flags)
    assert found.saved_modules == ()


def test_null_stands_for_the_default() -> None:
    keys = ("r", "lora_alpha", "rank_pattern", "alpha_pattern", "modules_to_save", "use_dora")
    found = settings(**dict.fromkeys(keys), layer_replication=None, base_model_name_or_path=None)
    assert found == read_settings(b'{"peft_type": "LORA"}', "the adapter")


@pytest.mark.parametrize(
    ("pattern", "matched"),
    [
        ("q_proj", {Q0, Q1, Q11}),
        ("proj", set()),
        ("layers.1", set()),
        ("layers.1.self_attn.q_proj", {Q1}),
        ("1.self_attn.q_proj", {Q1}),
        (Q11, {Q11}),
        (f"^{Q1}", {Q1}),
        ("^layers.1.self_attn.q_proj", set()),
        (r"layers\.\d+\.self_attn\.(q|k)_proj", {Q0, Q1, Q11}),
        (r"model\.layers\.[0-9]\..*", {Q0, Q1}),
        ("q_proj|k_proj", {Q0, Q1, Q11}),
        (r"(model\.)?layers\.1\.self_attn\.q_proj", {Q1}),
    ],
)
def test_patterns_match_the_whole_name_or_its_last_parts(pattern: str, matched: set[str]) -> None:
    found = settings(r=4, rank_pattern={pattern: 6}, lora_alpha=12, alpha_pattern={pattern: 3})
    for module in (Q0, Q1, Q11):
        rank, alpha = (6, 3) if module in matched else (4, 12)
        assert (found.rank_of(module), found.scale_of(module)) == (rank, alpha / rank)


def test_the_first_pattern_that_matches_counts() -> None:
    found = settings(rank_pattern={"layers.1.self_attn.q_proj": 5, "q_proj": 7, Q0: 9})
    assert [found.rank_of(module) for module in (Q0, Q1)] == [7, 5]


def test_ranks_and_alphas_have_patterns_of_their_own() -> None:
    found = settings(r=4, lora_alpha=8, rank_pattern={"q_proj": 16}, use_rslora=True)
    assert found.scale_of(Q0) == 2.0
    assert found.scale_of("lm_head") == 4.0


def test_a_pattern_may_look_like_a_set_of_sets(recwarn: pytest.WarningsRecorder) -> None:
    found = settings(rank_pattern={"[[q]_proj": 3})
    assert found.rank_of(Q0) == 3
    assert not recwarn.list


@pytest.mark.parametrize("peft_type", ["LOHA", "ADALORA", "PROMPT_TUNING", None, 3, "\ud800"])
def test_only_lora_is_read(peft_type: object) -> None:
    assert "LORA" in refusal(config(peft_type=peft_type)).message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("layer_replication", [[0, 4], [2, 5]]),
        ("trainable_token_indices", [1, 2]),
        ("target_parameters", ["experts.gate_up_proj"]),
        ("lora_bias", True),
        ("use_qalora", True),
        ("use_bdlora", {"nblocks": 2}),
        ("kasa_config", {"beta": 1}),
        ("monteclora_config", {"num_samples": 8}),
        ("alora_invocation_tokens", [1]),
        ("arrow_config", {"top_k": 3}),
    ],
)
def test_what_would_change_the_meaning_is_refused_by_name(key: str, value: object) -> None:
    assert f"sets {key}" in refusal(config(**{key: value})).message
    settings(**{key: type(value)()})


@pytest.mark.parametrize("start", ["pissa", "pissa_niter_16", "OLoRA", "corda", "loftq", "lora_ga"])
def test_adapters_of_a_changed_base_are_refused(start: str) -> None:
    error = refusal(config(init_lora_weights=start))
    assert start in error.message
    assert "path_initial_model_for_weight_conversion" in error.hint


@pytest.mark.parametrize("start", [True, False, "gaussian", "eva", "orthogonal", "mica"])
def test_other_ways_to_begin_are_fine(start: object) -> None:
    assert settings(init_lora_weights=start).rank == 2


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("r", 0),
        ("r", -4),
        ("r", 2.0),
        ("r", True),
        ("r", "8"),
        ("r", 1 << 40),
        ("lora_alpha", "16"),
        ("lora_alpha", True),
        ("lora_alpha", [1]),
        ("lora_alpha", 1e31),
        ("lora_alpha", -(10**400)),
        ("lora_alpha", math.nan),
        ("lora_alpha", math.inf),
        ("use_rslora", 1),
        ("use_dora", "yes"),
        ("fan_in_fan_out", []),
        ("ensure_weight_tying", 0),
        ("modules_to_save", "lm_head"),
        ("modules_to_save", [1]),
        ("modules_to_save", {}),
        ("rank_pattern", ["q_proj"]),
        ("rank_pattern", {"q_proj": 0}),
        ("rank_pattern", {"q_proj": 2.5}),
        ("alpha_pattern", {"q_proj": math.nan}),
        ("alpha_pattern", {"q_proj": None}),
        ("alpha_pattern", 3),
        ("base_model_name_or_path", 3),
        ("base_model_name_or_path", "\ud800"),
    ],
)
def test_values_of_the_wrong_kind_are_refused_by_name(key: str, value: object) -> None:
    assert f"gives {key}" in refusal(config(**{key: value})).message


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"LORA",
        b"[]",
        b'"LORA"',
        b"null",
        b'{"peft_type": "LORA",}',
        b'{"peft_type": "LORA", "r": 8, "r": 4}',
        b"\xff\xfe\x00",
        b'{"a": ' * 100_000,
        b"[" * 1_000_000,
        f'{{"peft_type": "LORA", "r": {HUGE}}}'.encode(),
    ],
    ids=[
        "empty",
        "word",
        "list",
        "text",
        "null",
        "comma",
        "twice",
        "bytes",
        "deep",
        "open",
        "long",
    ],
)
def test_what_is_no_config_is_refused(text: bytes) -> None:
    refusal(text)


def test_an_overlong_config_is_not_parsed() -> None:
    assert "16,777,216" in refusal(config() + b" " * MAX_CONFIG_BYTES).message


@pytest.mark.parametrize(
    "pattern",
    ["(", "q_proj)", "*", "[", "(?P<x", "a{3,1}", "(?<=a+)b", "x(?i)y", "\\", "\ud800("],
)
def test_a_pattern_that_is_none_is_refused(pattern: str) -> None:
    assert "pattern" in refusal(config(rank_pattern={pattern: 2})).message


@pytest.mark.parametrize(
    "pattern",
    [
        "(a+)+",
        "(a|a)*b",
        "(a*){9}",
        ".*.*.*.*.*x",
        "a?a?a?a?a?aaaaa",
        "(a|a)(a|a)(a|a)(a|a)(a|a)b",
        "a{1,9}a{1,9}a{1,9}a{1,9}a{1,9}",
        "q" * (MAX_PATTERN_LENGTH + 1),
        "(" * 200 + ")" * 200,
    ],
)
def test_a_pattern_that_could_take_for_ever_is_refused(pattern: str) -> None:
    assert "for ever" in refusal(config(alpha_pattern={pattern: 2})).message


def test_brackets_and_escapes_are_no_repeats() -> None:
    pattern = r"[*+?{]\*\+\?\(\{[]+]q_proj"
    assert settings(rank_pattern={pattern: 3}).rank_of("+*+?({]q_proj") == 3


def test_patterns_are_bounded_in_number() -> None:
    many = {f"layers.{n}": 2 for n in range(MAX_PATTERNS + 1)}
    assert "rank_pattern" in refusal(config(rank_pattern=many)).message


def test_unknown_settings_are_no_obstacle() -> None:
    text = json.loads(config())
    text |= {"target_modules": "all-linear", "peft_version": "99", "lora_dropout": 0.1, "new": {}}
    assert read_settings(json.dumps(text).encode(), "the adapter").rank == 2
