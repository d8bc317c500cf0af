"""Where tensors lie by their names, and which are asked for."""

from __future__ import annotations

import pytest

from mergegit.repository.spots import Spot, UnknownTensor, is_asked_for, require_some, spots

LLAMA = [
    "model.embed_tokens.weight",
    *(f"model.layers.{n}.{part}" for n in range(3) for part in ("mlp.up.weight", "norm.bias")),
    "lm_head.weight",
]


def test_tensors_of_layers_are_of_a_kind() -> None:
    found = spots(LLAMA)
    spot = found["model.layers.2.mlp.up.weight"]
    assert spot == Spot("model.layers.*.mlp.up.weight", 2, "model.layers.")
    assert spot.short_kind == "mlp.up"
    assert found["model.layers.1.norm.bias"].short_kind == "norm.bias"


def test_what_is_outside_of_the_layers_is_its_own_kind() -> None:
    spot = spots(LLAMA)["lm_head.weight"]
    assert spot == Spot("lm_head.weight")
    assert spot.short_kind == "lm_head"


def test_experts_of_a_mixture_are_of_one_kind() -> None:
    names = [f"layers.{n}.moe.{e}.w1.weight" for n in range(2) for e in range(4)]
    assert {spot.kind for spot in spots(names).values()} == {"layers.*.moe.*.w1.weight"}
    assert {spot.layer for spot in spots(names).values()} == {0, 1}


def test_stacks_are_told_apart() -> None:
    names = [f"{s}.block.{n}.{p}.w" for s in ("encoder", "decoder") for n in (0, 1) for p in "ab"]
    found = spots(names)
    assert found["encoder.block.1.a.w"].stack == "encoder.block."
    assert found["decoder.block.1.a.w"].stack == "decoder.block."


@pytest.mark.parametrize(
    ("pattern", "asked"),
    [("mlp", True), ("layers.1.", True), ("*.mlp.*", True), ("mlp.*", False),
     ("model.layers.?.mlp.up", True), ("attn", False)],
)  # fmt: skip
def test_a_pattern_is_a_part_of_a_name_or_like_all_of_it(pattern: str, asked: bool) -> None:
    assert is_asked_for("model.layers.1.mlp.up", [pattern]) is asked


def test_one_of_several_patterns_is_enough_and_none_asks_for_all() -> None:
    assert is_asked_for("mlp", ["attn", "mlp"])
    assert is_asked_for("mlp", [])


def test_a_pattern_that_nothing_is_like_is_refused() -> None:
    require_some(["mlp"], ["a.mlp"], "tensor")
    with pytest.raises(UnknownTensor, match="no tensor is called like 'attn'"):
        require_some(["mlp", "attn"], ["a.mlp"], "tensor")
