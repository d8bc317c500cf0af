"""Adapters: which tensors of a base they change and how, and what doesn't fit."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mergegit.checkpoint.adapter import (
    MAX_NAME_LENGTH,
    MAX_NAME_PARTS,
    Adapter,
    LowRank,
    is_adapter,
    read_adapter,
)
from mergegit.checkpoint.adapter_settings import MAX_TESTS
from mergegit.errors import BadCheckpoint
from tests.checkpoint.adapters import (
    BASE,
    GPT2,
    K_PROJ,
    Q_PROJ,
    UP_PROJ,
    Shapes,
    config,
    embedding_pair,
    magnitude,
    pair,
)

PREFIX = "base_model.model."


def read(shapes: Shapes, base: Shapes | None = None, **values: object) -> Adapter:
    return read_adapter(config(**values), shapes, BASE if base is None else base)


def refusal(shapes: Shapes, base: Shapes | None = None, **values: object) -> BadCheckpoint:
    with pytest.raises(BadCheckpoint) as caught:
        read_adapter(config(**values), shapes, BASE if base is None else base, of="adapter math")
    assert caught.value.message.startswith(("adapter math ", "adapter_config.json of adapter math"))
    assert caught.value.hint
    assert "\n" not in caught.value.message + caught.value.hint
    return caught.value


# -- what an adapter is ---------------------------------------------------------------------------


def test_an_adapter_has_a_config_and_weights_at_the_top() -> None:
    both = ["README.md", "adapter_config.json", "adapter_model.safetensors"]
    assert is_adapter(both)
    assert not is_adapter(both[:2])
    assert not is_adapter([*both[:2], "adapter_model.bin"])
    assert not is_adapter(["x/adapter_config.json", "x/adapter_model.safetensors"])
    assert not is_adapter(["config.json", "model.safetensors"])


def test_factors_change_the_weight_of_their_module() -> None:
    adapter = read(pair(K_PROJ, 4, 8))
    target = f"{K_PROJ}.weight"
    a, b = (f"{PREFIX}{K_PROJ}.lora_{side}.weight" for side in "AB")
    assert adapter.low_rank == {target: LowRank(target, a, b, 2, 2.0, transposed=False)}
    assert (adapter.saved, adapter.base_name) == ({}, "some/base")


def test_rank_and_scale_are_those_of_the_module() -> None:
    shapes = pair(K_PROJ, 4, 8, rank=3) | pair(UP_PROJ, 12, 8)
    adapter = read(shapes, rank_pattern={"k_proj": 3}, alpha_pattern={"up_proj": 10})
    found = {name: (how.rank, how.scale) for name, how in adapter.low_rank.items()}
    assert found == {f"{K_PROJ}.weight": (3, 4 / 3), f"{UP_PROJ}.weight": (2, 5.0)}


def test_patterns_are_tried_on_the_names_that_the_adapter_has() -> None:
    base = {f"language_model.{name}": shape for name, shape in BASE.items()}
    adapter = read(pair(K_PROJ, 4, 8, rank=3), base, rank_pattern={f"^{K_PROJ}": 3})
    assert adapter.low_rank.keys() == {f"language_model.{K_PROJ}.weight"}


@pytest.mark.parametrize("middle", [".default.weight", ".weight"])
def test_the_name_default_of_an_adapter_may_stand_in_its_tensors(middle: str) -> None:
    shapes = {
        f"{PREFIX}{K_PROJ}.lora_A{middle}": (2, 8),
        f"{PREFIX}{K_PROJ}.lora_B{middle}": (4, 2),
    }
    assert read(shapes).low_rank.keys() == {f"{K_PROJ}.weight"}


def test_names_without_the_usual_prefix_are_understood() -> None:
    shapes = {name.removeprefix(PREFIX): shape for name, shape in pair(K_PROJ, 4, 8).items()}
    assert read(shapes).low_rank.keys() == {f"{K_PROJ}.weight"}


def test_an_embedding_is_changed_by_the_transpose() -> None:
    adapter = read(embedding_pair("model.embed_tokens", 50, 8))
    how = adapter.low_rank["model.embed_tokens.weight"]
    assert how.transposed
    assert (how.a, how.b) == tuple(embedding_pair("model.embed_tokens", 50, 8))


def test_a_square_embedding_is_changed_by_the_transpose_too() -> None:
    base = {"model.embed_tokens.weight": (8, 8)}
    adapter = read(embedding_pair("model.embed_tokens", 8, 8), base)
    assert adapter.low_rank["model.embed_tokens.weight"].transposed


@pytest.mark.parametrize("ending", ["", ".weight", ".default", ".default.weight"])
def test_dora_has_a_magnitude_for_every_output(ending: str) -> None:
    vector = f"{PREFIX}{K_PROJ}.lora_magnitude_vector{ending}"
    adapter = read(pair(K_PROJ, 4, 8) | {vector: (4,)}, use_dora=True)
    assert adapter.low_rank[f"{K_PROJ}.weight"].magnitude == vector


def test_the_magnitudes_of_an_embedding_are_as_many_as_it_is_wide() -> None:
    shapes = embedding_pair("model.embed_tokens", 50, 8) | magnitude("model.embed_tokens", 8)
    assert read(shapes, use_dora=True).low_rank["model.embed_tokens.weight"].magnitude


# -- tensors that are saved whole -----------------------------------------------------------------


@pytest.mark.parametrize("middle", [".", ".modules_to_save.", ".modules_to_save.default."])
def test_saved_modules_take_the_place_of_the_bases(middle: str) -> None:
    name = f"{PREFIX}lm_head{middle}weight"
    adapter = read(pair(K_PROJ, 4, 8) | {name: (50, 8)}, modules_to_save=["lm_head"])
    assert adapter.saved == {"lm_head.weight": name}


def test_a_saved_module_may_have_modules_inside() -> None:
    names = {
        f"{PREFIX}model.layers.0.mlp.modules_to_save.up_proj.weight": (12, 8),
        f"{PREFIX}model.layers.1.mlp.up_proj.weight": (12, 8),
    }
    adapter = read(names, modules_to_save=["mlp"])
    assert set(adapter.saved) == {f"model.layers.{n}.mlp.up_proj.weight" for n in (0, 1)}


def test_biases_are_saved_whole() -> None:
    inside = f"{PREFIX}{Q_PROJ}.base_layer.bias"
    beside = f"{PREFIX}model.layers.1.self_attn.q_proj.bias"
    adapter = read(pair(Q_PROJ, 8, 8) | {inside: (8,), beside: (8,)}, bias="all")
    assert adapter.saved == {
        f"{Q_PROJ}.bias": inside,
        "model.layers.1.self_attn.q_proj.bias": beside,
    }


def test_a_changed_embedding_may_come_with_a_copy_of_the_bases() -> None:
    copy = f"{PREFIX}model.embed_tokens.base_layer.weight"
    adapter = read(embedding_pair("model.embed_tokens", 50, 8) | {copy: (50, 8)})
    assert set(adapter.low_rank) == set(adapter.saved) == {"model.embed_tokens.weight"}
    assert adapter.saved["model.embed_tokens.weight"] == copy


@pytest.mark.parametrize("listed", ["norm", "model.norm", "embed_tokens", "layers.0.mlp", "mlp"])
def test_what_the_config_says_was_saved_must_be_there(listed: str) -> None:
    error = refusal(pair(K_PROJ, 4, 8), modules_to_save=["lm_head", listed, "score"])
    assert "modules_to_save" in error.message
    every = {f"{PREFIX}{name}": shape for name, shape in BASE.items()}
    read(every, modules_to_save=["lm_head", listed, "score"])


# -- names ----------------------------------------------------------------------------------------


def test_the_base_may_lack_a_prefix() -> None:
    adapter = read(pair("transformer.h.0.mlp.c_fc", 32, 8), GPT2, fan_in_fan_out=True)
    assert adapter.low_rank.keys() == {"h.0.mlp.c_fc.weight"}


def test_the_base_may_have_one_more_prefix() -> None:
    base = {f"model.language_model.{name}": shape for name, shape in BASE.items()}
    base["model.vision_tower.proj.weight"] = (4, 8)
    shapes = pair(K_PROJ, 4, 8) | {f"{PREFIX}model.norm.weight": (8,)}
    adapter = read(shapes, base)
    assert adapter.low_rank.keys() == {f"model.language_model.{K_PROJ}.weight"}
    assert adapter.saved.keys() == {"model.language_model.model.norm.weight"}


def test_an_exact_name_stands_before_a_longer_one() -> None:
    base = BASE | {f"draft.{name}": shape for name, shape in BASE.items()}
    assert read(pair(K_PROJ, 4, 8), base).low_rank.keys() == {f"{K_PROJ}.weight"}


def test_a_name_that_may_be_two_tensors_is_refused() -> None:
    base = {f"{side}.{name}": shape for side in ("text", "vision") for name, shape in BASE.items()}
    message = refusal(pair(K_PROJ, 4, 8), base).message
    assert f"text.{K_PROJ}.weight" in message
    assert f"vision.{K_PROJ}.weight" in message


def test_part_of_a_name_is_no_prefix() -> None:
    base = {"my_k_proj.weight": (4, 8), "x.other_k_proj.weight": (4, 8), "weight": (4, 8)}
    assert "no place" in refusal(pair("k_proj", 4, 8), base).message


@pytest.mark.parametrize(
    "twice",
    [
        {f"{PREFIX}{K_PROJ}.lora_A.default.weight": (2, 8)},
        {f"{K_PROJ}.lora_A.weight": (2, 8)},
        pair("language.model.layers.0.self_attn.k_proj", 4, 8),
        {f"{PREFIX}lm_head.weight": (50, 8), f"{PREFIX}lm_head.base_layer.weight": (50, 8)},
        {f"{PREFIX}lm_head.weight": (50, 8), f"{PREFIX}x.lm_head.weight": (50, 8)},
    ],
)
def test_two_tensors_for_one_purpose_are_refused(twice: Shapes) -> None:
    assert "has both" in refusal(pair(K_PROJ, 4, 8) | twice).message


@pytest.mark.parametrize(
    "stray",
    [
        "model.layers.7.self_attn.q_proj.lora_A.weight",
        "model.layers.0.self_attn.q_proj.lora_A.other.weight",
        "model.layers.0.self_attn.q_proj.lora_B.bias",
        "model.embed_tokens.token_adapter.trainable_tokens_delta",
        "model.layers.0.self_attn.q_proj.lora_velora_embed",
        "score.weight",
        "x",
    ],
)
def test_tensors_for_which_the_base_has_no_place_are_named(stray: str) -> None:
    shapes = pair(K_PROJ, 4, 8) | {PREFIX + stray: (2, 8)}
    if stray.endswith("lora_A.weight"):
        shapes[PREFIX + stray.replace("_A", "_B")] = (8, 2)
    message = refusal(shapes).message
    assert PREFIX + stray in message
    assert " more" not in message


def test_strays_are_counted() -> None:
    shapes = {f"{PREFIX}a.weight": (1,), f"{PREFIX}b.weight": (1,), f"{PREFIX}c.weight": (1,)}
    assert f"{PREFIX}a.weight and 2 more" in refusal(shapes).message


def test_an_adapter_of_nothing_is_refused() -> None:
    assert "no tensors" in refusal({}).message


@pytest.mark.parametrize("name", ["a" * (MAX_NAME_LENGTH + 1), "a." * MAX_NAME_PARTS + "b"])
def test_overlong_names_are_refused(name: str) -> None:
    assert "overlong" in refusal({name: (1,)}).message


# -- a head that shares the embedding's weights ----------------------------------------------------

TIED = {name: shape for name, shape in BASE.items() if name != "lm_head.weight"}


def test_a_head_tied_to_a_saved_embedding_needs_no_place() -> None:
    shapes = pair(K_PROJ, 4, 8) | {
        f"{PREFIX}model.embed_tokens.weight": (50, 8),
        f"{PREFIX}lm_head.weight": (50, 8),
    }
    adapter = read(shapes, TIED, modules_to_save=["embed_tokens"], ensure_weight_tying=True)
    assert adapter.saved.keys() == {"model.embed_tokens.weight"}


def test_a_head_tied_to_a_changed_embedding_needs_no_place() -> None:
    # What PEFT trains is a head with the embedding's change; its merge_and_unload adds that change
    # to the weights that both share twice.
    shapes = embedding_pair("model.embed_tokens", 50, 8) | pair("lm_head", 50, 8)
    shapes[f"{PREFIX}lm_head.base_layer.weight"] = (50, 8)
    adapter = read(shapes, TIED, ensure_weight_tying=True)
    assert adapter.low_rank.keys() == {"model.embed_tokens.weight"}
    assert adapter.saved == {}


def test_a_head_that_was_trained_apart_is_refused() -> None:
    shapes = {
        f"{PREFIX}{name}": (50, 8) for name in ("model.embed_tokens.weight", "lm_head.weight")
    }
    assert f"{PREFIX}lm_head.weight" in refusal(shapes, TIED).message
    alone = pair("lm_head", 50, 8)
    assert (
        f"{PREFIX}lm_head.lora_A.weight" in refusal(alone, TIED, ensure_weight_tying=True).message
    )


# -- shapes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", ["lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B"])
def test_half_a_pair_is_refused(missing: str) -> None:
    shapes = pair(K_PROJ, 4, 8) | embedding_pair("model.embed_tokens", 50, 8)
    shapes = {name: shape for name, shape in shapes.items() if f".{missing}" not in name}
    assert f"no {missing}" in refusal(shapes).message


def test_a_magnitude_alone_is_refused() -> None:
    assert "no lora_A" in refusal(magnitude(K_PROJ, 4), use_dora=True).message


def test_factors_of_two_kinds_are_refused() -> None:
    shapes = pair(K_PROJ, 4, 8) | embedding_pair(K_PROJ, 4, 8)
    assert "two kinds" in refusal(shapes).message


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((2, 8), (4, 3)),
        ((3, 8), (4, 3)),
        ((8,), (4, 2)),
        ((2, 8), (4,)),
        ((2, 0), (4, 2)),
        ((), ()),
    ],
)
def test_factors_that_do_not_fit_one_another_or_the_config_are_refused(
    a: tuple[int, ...], b: tuple[int, ...]
) -> None:
    names = pair(K_PROJ, 4, 8)
    error = refusal(dict(zip(names, (a, b), strict=True)))
    assert K_PROJ in error.message


def test_convolutions_are_refused() -> None:
    names = pair(K_PROJ, 4, 8)
    shapes = dict(zip(names, [(2, 8, 3, 3), (4, 2, 1, 1)], strict=True))
    assert "convolution" in refusal(shapes).message


@pytest.mark.parametrize(("outputs", "inputs"), [(4, 9), (5, 8), (8, 4)])
def test_an_adapter_of_another_base_is_refused(outputs: int, inputs: int) -> None:
    error = refusal(pair(K_PROJ, outputs, inputs))
    assert f"{K_PROJ}.weight" in error.message
    assert "base" in error.hint


def test_an_embedding_of_another_length_is_refused() -> None:
    assert "[50, 8]" in refusal(embedding_pair("model.embed_tokens", 51, 8)).message
    shapes = {f"{PREFIX}model.embed_tokens.weight": (51, 8)}
    assert "merge_and_unload" in refusal(shapes).hint


@pytest.mark.parametrize("shape", [(5,), (8,), (4, 1), ()])
def test_magnitudes_that_do_not_fit_are_refused(shape: tuple[int, ...]) -> None:
    vector = dict.fromkeys(magnitude(K_PROJ, 4), shape)
    assert "magnitude" in refusal(pair(K_PROJ, 4, 8) | vector, use_dora=True).message


def test_magnitudes_and_the_config_must_agree() -> None:
    shapes = pair(K_PROJ, 4, 8) | magnitude(K_PROJ, 4)
    assert "use_dora" in refusal(shapes).message
    assert "use_dora" in refusal(pair(K_PROJ, 4, 8), use_dora=True).message


# -- weights that are stored with inputs first ----------------------------------------------------


def layouts(shapes: Shapes, base: Shapes, **values: object) -> dict[str, bool]:
    return {name: how.transposed for name, how in read(shapes, base, **values).low_rank.items()}


@pytest.mark.parametrize("said", [True, False])
def test_conv1d_weights_are_known_by_their_biases_whatever_the_config_says(said: bool) -> None:
    shapes = pair("h.0.attn.c_attn", 24, 8) | pair("h.0.mlp.c_proj", 8, 32)
    found = layouts(shapes, GPT2, fan_in_fan_out=said)
    assert found == {"h.0.attn.c_attn.weight": True, "h.0.mlp.c_proj.weight": True}


@pytest.mark.parametrize("said", [True, False])
def test_a_square_weight_goes_the_way_of_its_namesakes(said: bool) -> None:
    found = layouts(pair("h.0.attn.c_proj", 8, 8), GPT2, fan_in_fan_out=said)
    assert found == {"h.0.attn.c_proj.weight": True}
    linear = {"proj.weight": (8, 8), "mlp.proj.weight": (12, 8), "mlp.proj.bias": (12,)}
    assert layouts(pair("proj", 8, 8), linear, fan_in_fan_out=said) == {"proj.weight": False}


@pytest.mark.parametrize("said", [True, False])
def test_a_square_weight_without_namesakes_goes_by_the_config(said: bool) -> None:
    found = layouts(pair(Q_PROJ, 8, 8), BASE, fan_in_fan_out=said)
    assert found == {f"{Q_PROJ}.weight": said}


def test_namesakes_that_disagree_say_nothing() -> None:
    base = GPT2 | {"x.c_proj.weight": (12, 8), "x.c_proj.bias": (12,)}
    for said in (True, False):
        found = layouts(pair("h.0.attn.c_proj", 8, 8), base, fan_in_fan_out=said)
        assert found == {"h.0.attn.c_proj.weight": said}


def test_a_linear_layer_beside_conv1d_ones_is_not_turned() -> None:
    shapes = pair("h.0.mlp.c_fc", 32, 8) | pair("lm_head", 50, 8)
    base = GPT2 | {"lm_head.weight": (50, 8)}
    for said in (True, False):
        found = layouts(shapes, base, fan_in_fan_out=said)
        assert found == {"h.0.mlp.c_fc.weight": True, "lm_head.weight": False}


def test_a_shape_that_fits_turned_alone_needs_a_reason() -> None:
    shapes = pair(K_PROJ, 8, 4)
    assert layouts(shapes, BASE, fan_in_fan_out=True) == {f"{K_PROJ}.weight": True}
    assert "[4, 8]" in refusal(shapes).message


# -- hostile input --------------------------------------------------------------------------------


def test_the_effort_for_patterns_is_bounded() -> None:
    modules = MAX_TESTS // 1000
    base = {f"m{n}.weight": (4, 8) for n in range(modules)}
    shapes = {name: shape for n in range(modules) for name, shape in pair(f"m{n}", 4, 8).items()}
    patterns = {f"layers.{n}": 2 for n in range(1001)}
    assert "patterns" in refusal(shapes, base, rank_pattern=patterns).message


@settings(deadline=None, max_examples=150)
@given(
    st.dictionaries(
        st.one_of(
            st.text(max_size=30),
            st.from_regex(
                r"(base_model\.model\.)?(model\.|lm_head|x)?(embed_tokens|layers\.0\.self_attn\.k_proj)?"
                r"\.?(lora_(embedding_)?[AB]|lora_magnitude_vector|base_layer|modules_to_save)?"
                r"(\.default)?(\.weight|\.bias)?",
                fullmatch=True,
            ),
        ),
        st.lists(st.sampled_from([0, 1, 2, 4, 8, 50]), max_size=4).map(tuple),
        max_size=6,
    ),
    st.dictionaries(
        st.sampled_from(
            ["r", "lora_alpha", "use_dora", "fan_in_fan_out", "modules_to_save", "rank_pattern"]
        ),
        st.recursive(
            st.none() | st.booleans() | st.integers(-9, 9) | st.floats() | st.text(max_size=5),
            lambda inner: (
                st.lists(inner, max_size=2)
                | st.dictionaries(st.text(max_size=5), inner, max_size=2)
            ),
            max_leaves=4,
        ),
    ),
)
def test_whatever_comes_is_read_or_refused(shapes: Shapes, values: dict[str, object]) -> None:
    text = json.dumps({"peft_type": "LORA"} | values).encode()
    try:
        adapter = read_adapter(text, shapes, BASE)
    except BadCheckpoint:
        return
    assert adapter.low_rank.keys() | adapter.saved.keys() <= BASE.keys()
    used = {*adapter.saved.values()}
    used |= {name for how in adapter.low_rank.values() for name in (how.a, how.b)}
    used |= {how.magnitude for how in adapter.low_rank.values() if how.magnitude}
    assert used == shapes.keys()


def test_errors_name_the_adapter() -> None:
    with pytest.raises(BadCheckpoint, match=re.escape("adapter /models/math has no tensors")):
        read_adapter(config(), {}, BASE, of="adapter /models/math")
