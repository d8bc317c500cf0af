from __future__ import annotations

import pytest

from mergegit.merge.layers import Place, Stack, is_input, places, stacks

LLAMA = [
    "model.embed_tokens.weight",
    *[f"model.layers.{layer}.{part}.weight" for layer in range(12) for part in ("mlp", "norm")],
    "model.norm.weight",
    "lm_head.weight",
]


def test_the_layers_of_a_model_are_the_first_number_in_its_names() -> None:
    assert stacks(LLAMA) == (Stack("model.layers.", 12),)


@pytest.mark.parametrize(
    ("name", "prefix"),
    [
        ("h.{}.attn.weight", "h."),
        ("{}.attn.weight", ""),
        ("gpt_neox.layers.{}.attention.query_key_value.bias", "gpt_neox.layers."),
        ("bert.encoder.layer.{}.output.LayerNorm.bias", "bert.encoder.layer."),
    ],
)
def test_a_stack_may_be_called_anything(name: str, prefix: str) -> None:
    names = [name.format(layer) + end for layer in range(3) for end in ("", ".x")]
    assert stacks(names) == (Stack(prefix, 3),)


def test_numbers_within_a_layer_are_no_layers() -> None:
    names = [
        f"model.layers.{layer}.mlp.experts.{expert}.w{part}.weight"
        for layer in range(2)
        for expert in range(8)
        for part in (1, 2)
    ]
    assert stacks(names) == (Stack("model.layers.", 2),)


def test_the_stack_of_most_tensors_is_first() -> None:
    vision = [f"visual.blocks.{layer}.{part}.weight" for layer in range(2) for part in "ab"]
    assert stacks([*vision, *LLAMA]) == (Stack("model.layers.", 12), Stack("visual.blocks.", 2))
    level = [f"{stack}.{layer}.{part}.w" for stack in "ba" for layer in range(2) for part in "xy"]
    assert [stack.prefix for stack in stacks(level)] == ["a.", "b."]


@pytest.mark.parametrize(
    "names",
    [
        ["weight", "bias"],
        ["classifier.0.weight", "classifier.1.weight"],
        ["layers.1.a.w", "layers.1.b.w", "layers.2.a.w", "layers.2.b.w"],
        ["layers.0.a.w", "layers.0.b.w", "layers.2.a.w", "layers.2.b.w"],
        ["layers.00.a.w", "layers.00.b.w", "layers.01.a.w", "layers.01.b.w"],
        ["layers.².a.w", "layers.².b.w", "layers.\u0660.a.w", "layers.\u0660.b.w"],
        ["layers." + "9" * 5000 + ".a.w", "layers." + "9" * 5000 + ".b.w"],
        ["layers.0", "layers.1", "x0.a.w", "x1.a.w"],
    ],
)
def test_what_does_not_count_from_zero_without_a_gap_is_no_stack(names: list[str]) -> None:
    assert stacks(names) == ()


def test_a_layer_is_known_by_its_number() -> None:
    stack = Stack("model.layers.", 12)
    assert [stack.layer_of(f"model.layers.{n}.mlp.3.weight") for n in (0, 1, 10, 11)] == [
        0, 1, 10, 11,
    ]  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        "model.norm.weight",
        "model.layers.12.mlp.weight",
        "model.layers.01.mlp.weight",
        "model.layers.².mlp.weight",
        "model.layers.x.mlp.weight",
        "model.layers.3",
        "other.model.layers.3.mlp.weight",
    ],
)
def test_what_has_no_number_of_the_stack_is_in_none_of_its_layers(name: str) -> None:
    assert Stack("model.layers.", 12).layer_of(name) is None


def test_only_the_layers_own_number_is_renamed() -> None:
    stack = Stack("model.layers.", 12)
    assert stack.renamed("model.layers.3.mlp.3.w", 11) == "model.layers.11.mlp.3.w"
    assert Stack("", 12).renamed("10.mlp.w", 0) == "0.mlp.w"


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "transformer.wte.weight",
        "wpe.weight",
        "tok_embeddings.weight",
        "bert.embeddings.LayerNorm.weight",
        "transformer.word_embeddings_layernorm.bias",
        "shared.weight",
    ],
)
def test_embeddings_come_before_the_layers(name: str) -> None:
    assert is_input(name)


@pytest.mark.parametrize(
    "name", ["model.norm.weight", "lm_head.weight", "embed_out.weight", "score.weight", "ln_f.bias"]
)
def test_final_norms_and_heads_come_after_them(name: str) -> None:
    assert not is_input(name)


def test_positions_go_from_the_first_layer_to_the_last() -> None:
    where = places(LLAMA)
    for layer in range(12):
        share = layer / 11
        assert where[f"model.layers.{layer}.mlp.weight"] == Place(0, share, share, True)


def test_what_is_outside_the_layers_is_at_the_start_of_gradients() -> None:
    where = places(LLAMA)
    assert where["model.embed_tokens.weight"] == Place(0, 0.0, 0.0, False)
    assert where["model.norm.weight"] == Place(0, 0.0, 1.0, False)
    assert where["lm_head.weight"] == Place(0, 0.0, 1.0, False)


def test_a_single_layer_is_the_last() -> None:
    where = places(["layers.0.a.w", "layers.0.b.w"])
    assert where["layers.0.a.w"].position == 1.0


def test_every_stack_has_positions_of_its_own() -> None:
    names = [f"{s}.{layer}.{part}.w" for s, n in (("enc", 3), ("dec", 5)) for layer in range(n)
             for part in "ab"]  # fmt: skip
    where = places(names)
    assert [where[f"enc.{layer}.a.w"].position for layer in range(3)] == [0, 0.5, 1]
    assert [where[f"dec.{layer}.a.w"].position for layer in range(5)] == [0, 0.25, 0.5, 0.75, 1]


def test_without_layers_all_is_at_the_start() -> None:
    assert places(["weight", "bias"])["weight"] == Place(0, 0.0, 1.0, False)


def test_positions_begin_anew_in_every_slice_and_depths_do_not() -> None:
    where = places(LLAMA, (3, 1, 8), Stack("model.layers.", 12))
    found = [where[f"model.layers.{layer}.mlp.weight"] for layer in range(12)]
    assert [place.slice for place in found] == [0] * 3 + [1] + [2] * 8
    assert [place.position for place in found[:4]] == [0, 0.5, 1, 1]
    assert [place.position for place in found[4:]] == [n / 7 for n in range(8)]
    assert [place.depth for place in found] == [n / 11 for n in range(12)]


def test_what_comes_before_the_layers_is_of_the_first_slice_and_the_rest_of_the_last() -> None:
    where = places(LLAMA, (3, 1, 8), Stack("model.layers.", 12))
    assert where["model.embed_tokens.weight"] == Place(0, 0.0, 0.0, False)
    assert where["model.norm.weight"] == Place(2, 0.0, 1.0, False)
    assert where["lm_head.weight"] == Place(2, 0.0, 1.0, False)
