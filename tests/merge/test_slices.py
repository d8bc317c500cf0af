from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from mergegit.errors import BadRecipe, Mismatch
from mergegit.merge.layers import Stack
from mergegit.merge.match import Model
from mergegit.merge.recipe import Range, Recipe, Slice, Source, make_recipe
from mergegit.merge.slices import main_stack, slice_models
from mergegit.objects import ID_BYTES, Tensor, TensorId, block_count
from tests.merge.tensors import commit_id

Shape = tuple[int, ...]


def model(ref: str, names: Mapping[str, Shape] | Sequence[str]) -> Model:
    """A model whose tensors' ids are its ref and their names."""
    shapes = names if isinstance(names, Mapping) else dict.fromkeys(names, (4, 3))
    tensors = {}
    for name, shape in shapes.items():
        blocks = block_count(Tensor("BF16", shape, b"").elements)
        tensors[name] = Tensor("BF16", shape, bytes(ID_BYTES) * blocks)
    return Model(ref, tensors, {name: TensorId(f"{ref} {name}".encode()) for name in tensors})


def llama(ref: str, layers: int = 4, prefix: str = "model.layers.") -> Model:
    parts = ("attn.weight", "mlp.weight")
    inner = [f"{prefix}{layer}.{part}" for layer in range(layers) for part in parts]
    return model(ref, ["model.embed_tokens.weight", *inner, "model.norm.weight", "lm_head.weight"])


def recipe(
    *slices: tuple[Range, Mapping[int, Range]], experts: int = 2, method: str = "task_arithmetic",
    **rest: Any,
) -> Recipe:  # fmt: skip
    """Slices as the base's layers and those of each expert that takes part."""
    return make_recipe(
        method_name=method,
        base=("base", commit_id(0)),
        experts=[(f"expert{place}", commit_id(place + 1)) for place in range(experts)],
        parameters={},
        expert_parameters=[{} for _ in range(experts)],
        slices=[
            Slice(tuple(Source(k, layers, {}) for k, layers in sources.items()), base, {})
            for base, sources in slices
        ],
        **rest,
    )


def taken(view: Model) -> dict[str, str]:
    """What a view calls each tensor of a model, and what the model calls it."""
    out = {}
    for name, tensor_id in view.ids.items():
        ref, _, own = tensor_id.decode().partition(" ")
        assert ref == view.ref
        assert own == view.own_name(name)
        out[name] = own
    assert out.keys() == view.tensors.keys()
    return out


def layers_taken(view: Model, layers: int, prefix: str = "model.layers.") -> list[int | None]:
    """The model's own layer in each of the merged model's."""
    names = taken(view)
    found: list[int | None] = []
    for layer in range(layers):
        own = {names.get(f"{prefix}{layer}.{part}") for part in ("attn.weight", "mlp.weight")}
        numbers = {name.split(".")[2] if name else None for name in own}
        (number,) = numbers
        found.append(int(number) if number else None)
    return found


def test_layers_are_numbered_as_they_are_stacked() -> None:
    asked = recipe(((0, 3), {0: (0, 3)}), ((1, 4), {1: (1, 4)}), ((3, 4), {0: (3, 4)}))
    sliced = slice_models(asked, llama("base"), [llama("expert0"), llama("expert1")])
    assert sliced.stack == Stack("model.layers.", 7)
    assert layers_taken(sliced.base, 7) == [0, 1, 2, 1, 2, 3, 3]
    assert layers_taken(sliced.experts[0], 7) == [0, 1, 2, None, None, None, 3]
    assert layers_taken(sliced.experts[1], 7) == [None, None, None, 1, 2, 3, None]


def test_layers_of_one_slice_may_have_other_numbers_in_every_model() -> None:
    asked = recipe(((1, 3), {0: (0, 2), 1: (2, 4)}))
    sliced = slice_models(asked, llama("base"), [llama("expert0"), llama("expert1")])
    assert layers_taken(sliced.base, 2) == [1, 2]
    assert layers_taken(sliced.experts[0], 2) == [0, 1]
    assert layers_taken(sliced.experts[1], 2) == [2, 3]


def test_embeddings_are_of_the_first_slices_models_and_heads_of_the_lasts() -> None:
    asked = recipe(((0, 1), {0: (0, 1)}), ((0, 1), {1: (0, 1)}))
    sliced = slice_models(asked, llama("base"), [llama("expert0"), llama("expert1")])
    outside = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    assert outside <= taken(sliced.base).keys()
    assert outside & taken(sliced.experts[0]).keys() == {"model.embed_tokens.weight"}
    assert outside & taken(sliced.experts[1]).keys() == {"model.norm.weight", "lm_head.weight"}


def test_a_model_that_stands_twice_in_a_slice_has_two_views() -> None:
    asked = recipe(((0, 2), {0: (0, 2), 1: (2, 4)}))
    expert = llama("expert")
    sliced = slice_models(asked, llama("base"), [expert, expert])
    assert [layers_taken(view, 2) for view in sliced.experts] == [[0, 1], [2, 3]]


def test_models_may_be_of_different_depths() -> None:
    asked = recipe(((0, 2), {0: (0, 2)}), ((0, 3), {1: (5, 8)}))
    sliced = slice_models(asked, llama("base", 3), [llama("expert0", 2), llama("expert1", 8)])
    assert layers_taken(sliced.experts[1], 5) == [None, None, 5, 6, 7]


@pytest.mark.parametrize(
    ("slices", "message"),
    [
        (((0, 4), {0: (1, 5)}), r"layers \[1, 5\] of expert0, which has 4"),
        (((1, 5), {0: (0, 4)}), r"layers \[1, 5\] of base, which has 4"),
        (((0, 1), {0: (9, 10)}), r"layers \[9, 10\] of expert0, which has 4"),
    ],
)
def test_layers_that_a_model_lacks_are_refused(
    slices: tuple[Range, Mapping[int, Range]], message: str
) -> None:
    with pytest.raises(BadRecipe, match=message) as error:
        slice_models(recipe(slices, experts=1), llama("base"), [llama("expert0")])
    assert "[0, 4]" in error.value.hint


def test_a_model_without_layers_can_not_be_sliced() -> None:
    with pytest.raises(BadRecipe, match="no layers are to be found in the tensor names of expert0"):
        slice_models(
            recipe(((0, 1), {0: (0, 1)}), experts=1), llama("base"), [model("expert0", ["weight"])]
        )


def test_layers_of_other_names_are_refused() -> None:
    with pytest.raises(BadRecipe, match=r"of expert0 are called h\.N and those of the base model"):
        slice_models(
            recipe(((0, 1), {0: (0, 1)}), experts=1), llama("base"), [llama("expert0", 4, "h.")]
        )


def test_an_encoder_and_a_decoder_are_not_told_apart_and_refused() -> None:
    names = [f"{side}.block.{n}.{part}.w" for side in ("encoder", "decoder") for n in range(2)
             for part in "ab"]  # fmt: skip
    with pytest.raises(BadRecipe, match=r"two stacks of layers, encoder\.block\.N and decoder\."):
        main_stack(model("t5", names))


def test_of_several_stacks_the_one_of_most_weights_is_sliced() -> None:
    vision = {f"visual.blocks.{n}.{part}.w": (4, 4) for n in range(9) for part in "abc"}
    language = {f"model.layers.{n}.{part}.w": (40, 40) for n in range(2) for part in "ab"}
    assert main_stack(model("vl", {**vision, **language})) == Stack("model.layers.", 2)


def narrow(ref: str, layers: int = 4) -> Model:
    """A model whose second layer is narrower than that of others."""
    whole = llama(ref, layers)
    shapes = {name: tensor.shape for name, tensor in whole.tensors.items()}
    return model(ref, {**shapes, "model.layers.1.mlp.weight": (2, 3)})


def test_what_is_copied_has_the_shapes_of_the_model_whose_config_is_taken() -> None:
    asked = recipe(((0, 1), {0: (0, 1)}), ((1, 3), {1: (1, 3)}), method="passthrough", files_from=0)
    models = [llama("expert0"), narrow("expert1")]
    with pytest.raises(Mismatch, match=r"1\.mlp\.weight is \[2, 3\] in expert1 but \[4, 3\] in e"):
        slice_models(asked, llama("base"), models)
    fits = recipe(((0, 1), {0: (0, 1)}), ((2, 4), {1: (2, 4)}), method="passthrough", files_from=0)
    slice_models(fits, llama("base"), models)


def test_layers_beyond_those_of_the_config_are_compared_with_its_last() -> None:
    asked = recipe(((0, 1), {0: (0, 1)}), ((0, 1), {1: (1, 2)}), method="passthrough", files_from=0)
    with pytest.raises(Mismatch, match=r"layers\.1\.mlp\.weight is \[2, 3\] in expert1"):
        slice_models(asked, llama("base"), [llama("expert0", 1), narrow("expert1")])


def test_what_is_merged_is_matched_with_its_base_and_not_with_a_config() -> None:
    asked = recipe(((1, 2), {0: (1, 2)}), ((1, 2), {1: (1, 2)}), files_from=0)
    slice_models(asked, narrow("base"), [narrow("expert0"), narrow("expert1")])
    slice_models(asked, narrow("base"), [llama("expert0"), narrow("expert1")])
