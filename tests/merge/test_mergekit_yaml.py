from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from mergegit.dtypes import TORCH_NAMES
from mergegit.errors import BadRecipe
from mergegit.merge.mergekit_yaml import (
    Document,
    SliceSpec,
    SourceSpec,
    TokenizerSpec,
    TokenSpec,
    read_documents,
    write_documents,
)
from mergegit.merge.settings import Setting
from tests.merge.test_settings import settings_


def read(text: str) -> Document:
    (document,) = read_documents(text)
    return document


def refusal(text: str) -> BadRecipe:
    with pytest.raises(BadRecipe) as error:
        read_documents(text)
    return error.value


def value(scalar: float | bool | str) -> Setting:
    return Setting.constant(scalar)


def setting(written: object) -> Setting:
    return Setting.parse(written, "it")


MODELS = "merge_method: linear\nmodels:\n  - model: cooking\n  - model: gardening\n"
SLICE = "merge_method: slerp\nslices:\n  - sources:\n      - model: cooking\n"


# What recipes look like


def test_whole_models_with_weights() -> None:
    assert read(
        """
        merge_method: linear
        models:
          - model: kitchen/cooking-3b
            parameters:
              weight: 1
          - model: garden/planting-3b@v2
            parameters: {weight: 0.25}
        parameters:
          normalize: false
        dtype: bfloat16
        """
    ) == Document(
        merge_method="linear",
        models=(
            SourceSpec("kitchen/cooking-3b", parameters={"weight": value(1)}),
            SourceSpec("garden/planting-3b@v2", parameters={"weight": value(0.25)}),
        ),
        parameters={"normalize": value(False)},
        dtype="BF16",
    )


def test_slices_with_filtered_gradients() -> None:
    document = read(
        """
        slices:
          - sources:
            - model: cooking
              layer_range: [0, 12]
            - model: gardening
              layer_range: [4, 16]
        merge_method: slerp
        base_model: cooking
        parameters:
          t:
            - filter: self_attn
              value: [0, 0.4, 1]
            - filter: mlp
              value: [1, 0.6, 0]
            - value: 0.5  # for all others
        out_dtype: float16
        """
    )
    assert document.models == ()
    assert document.base_model == "cooking"
    assert document.out_dtype == "F16"
    assert document.slices == (
        SliceSpec((SourceSpec("cooking", (0, 12)), SourceSpec("gardening", (4, 16)))),
    )
    t = document.parameters["t"]
    assert t.at("layers.0.self_attn.q_proj.weight", 0.5) == 0.4
    assert t.at("layers.0.mlp.up_proj.weight", 1.0) == 0.0
    assert t.at("embed_tokens.weight", 0.9) == 0.5


def test_gradients_of_weight_and_density_by_model() -> None:
    document = read(
        """
        models:
          - model: cooking
            parameters: {density: [1, 0.5, 0.1], weight: 1.0}
          - model: gardening
            parameters:
              density: 0.3
              weight:
                - {filter: mlp, value: [0, 0.5]}
                - value: 0
        merge_method: ties
        base_model: words
        parameters: {normalize: true, int8_mask: yes}
        """
    )
    first, second = document.models
    assert first.parameters["density"].at("any", 0.75) == pytest.approx(0.3)
    assert second.parameters["weight"].at("mlp.up_proj", 0.5) == 0.25
    assert second.parameters["weight"].at("norm", 0.5) == 0.0
    assert document.parameters == {"normalize": value(True), "int8_mask": value(True)}


def test_stacked_slices() -> None:
    document = read(
        """
        merge_method: passthrough
        slices:
          - sources:
              - {model: cooking, layer_range: [0, 8]}
          - sources:
              - model: gardening
                layer_range: [4, 12]
                parameters:
                  scale:
                    - {filter: down_proj, value: 0}
                    - {filter: o_proj, value: 0}
                    - value: 1
            parameters: {scale: 2}
        """
    )
    first, second = document.slices
    assert first == SliceSpec((SourceSpec("cooking", (0, 8)),))
    assert second.sources[0].layer_range == (4, 12)
    assert second.sources[0].parameters["scale"].at("mlp.down_proj.weight", 0) == 0
    assert second.parameters == {"scale": value(2)}


def test_parameters_of_all_models() -> None:
    document = read(MODELS + "base_model: words\nparameters: {weight: 0.4, lambda: 1e-1}\n")
    assert document.parameters == {"weight": value(0.4), "lambda": value(0.1)}
    assert [model.parameters for model in document.models] == [{}, {}]


def test_several_recipes_use_each_others_names() -> None:
    first, second, last = read_documents(
        f"name: both\n{MODELS}"
        "---\nname: third\nmerge_method: slerp\nbase_model: both\nmodels: [{model: chess}]\n"
        "---\nmerge_method: linear\nmodels: [{model: third}, {model: both}]\n"
    )
    assert (first.name, second.name, last.name) == ("both", "third", None)
    assert second.base_model == "both"
    assert [model.model for model in last.models] == ["third", "both"]


def test_the_last_recipe_may_have_a_name_too() -> None:
    documents = read_documents(f"---\nname: a\n{MODELS}---\nname: b\n{MODELS}---\n")
    assert [document.name for document in documents] == ["a", "b"]


def test_mergegits_own_keys() -> None:
    plain = read(MODELS)
    assert (plain.seed, plain.ignore_extra, plain.allow_nonfinite) == (None, False, False)
    given_ = read(MODELS + "seed: -7\nignore_extra: true\nallow_nonfinite: true\n")
    assert (given_.seed, given_.ignore_extra, given_.allow_nonfinite) == (-7, True, True)
    assert (plain.reference, read(MODELS + "reference: a@1").reference) == (None, "a@1")
    assert read(MODELS + "seed: 0\nignore_extra: false\n").seed == 0


def test_a_chat_template_is_kept_as_it_is() -> None:
    template = "{% for m in messages %}\n  {{ m.content }}\n{% endfor %}\n"
    text = "".join(f"  {line}\n" for line in template.splitlines())
    assert read(f"{MODELS}chat_template: |\n{text}").chat_template == template
    assert read(f"{MODELS}chat_template: chatml\n").chat_template == "chatml"


def test_keys_without_a_value_are_not_given() -> None:
    optional = (
        "name", "base_model", "slices", "modules", "parameters", "dtype", "out_dtype", "tokenizer",
        "chat_template", "seed", "ignore_extra", "allow_nonfinite", "reference",
    )  # fmt: skip
    nothing = "".join(f"{key}:\n" for key in optional)
    assert read(f"{MODELS}{nothing}tokenizer_source: ~\n") == read(MODELS)


def test_anchors_share_what_recipes_repeat() -> None:
    document = read(
        """
        merge_method: ties
        models:
          - model: cooking
            parameters: &usual {weight: 1, density: 0.5}
          - model: gardening
            parameters: {<<: *usual, weight: 2}
        """
    )
    assert document.models[1].parameters == {"weight": value(2), "density": value(0.5)}


# Modules


def test_one_module_is_read_as_its_models() -> None:
    document = read(
        "merge_method: linear\nmodules: {language: {models: [{model: cooking}, {model: chess}]}}"
    )
    assert document == read("merge_method: linear\nmodels: [{model: cooking}, {model: chess}]")


def test_one_module_is_read_as_its_slices() -> None:
    slices = "slices: [{sources: [{model: cooking, layer_range: [0, 2]}]}]"
    assert read(f"merge_method: linear\nmodules: {{language: {{{slices}}}}}") == read(
        f"merge_method: linear\n{slices}"
    )


def test_a_modules_parameters_stand_before_the_recipes() -> None:
    document = read(
        """
        merge_method: linear
        modules:
          language:
            models: [{model: cooking}]
            parameters:
              weight: [{filter: mlp, value: 1}]
        parameters: {weight: 2, normalize: true}
        """
    )
    assert document.parameters == {
        "weight": setting([{"filter": "mlp", "value": 1}, {"value": 2}]),
        "normalize": value(True),
    }


def test_several_modules_are_refused_by_name() -> None:
    error = refusal(
        "merge_method: linear\n"
        "modules:\n  text: {models: [{model: a}]}\n  vision: {models: [{model: b}]}\n"
    )
    assert error.message == "line 2: modules must be one module, not 2: text, vision"


# Models


@pytest.mark.parametrize(
    ("written", "model"),
    [
        ("cooking", "cooking"),
        ("./checkpoints/cooking 3b", "./checkpoints/cooking 3b"),
        ("kitchen/cooking@v1.2", "kitchen/cooking@v1.2"),
        ("words+adapters/chess", "words+adapters/chess"),
        ("words@main+adapters/chess@v2", "words@main+adapters/chess@v2"),
        ("main~2", "main~2"),
        ("'7'", "7"),
        ("{model: cooking}", "cooking"),
        ("{model: cooking@v1, lora: chess@v2}", "cooking@v1+chess@v2"),
        ("{model: {path: cooking}}", "cooking"),
        ("{model: {path: cooking, revision: v1}, lora: null}", "cooking@v1"),
        (
            "{model: {path: a/b, revision: v1}, lora: {path: c/d, revision: v2}}",
            "a/b@v1+c/d@v2",
        ),
        ("{model: {path: words}, lora: {path: chess, revision: ~}}", "words+chess"),
    ],
)
def test_a_model_is_one_text(written: str, model: str) -> None:
    document = read(
        f"merge_method: linear\nbase_model: {written}\nmodels: [{{model: {written}}}]\n"
        f"tokenizer_source: {written}\n"
    )
    assert document.base_model == model
    assert document.models == (SourceSpec(model),)
    assert document.tokenizer == TokenizerSpec(model)


@pytest.mark.parametrize(
    ("written", "what"),
    [
        ("7", "base_model is 7, not text"),
        ("no", "base_model is no, not text"),
        ("[a]", "base_model is a list, not text"),
        ("''", "base_model is empty"),
        ("' a'", "base_model is ' a', which has line breaks or spaces around it"),
        ('"a\\nb"', "base_model is 'a\\nb', which has line breaks"),
        ("a+", "base_model is 'a+', which lacks something before or after + or @"),
        ("a@+b", "base_model is 'a@+b', which lacks"),
        ("'@v1'", "base_model is '@v1', which lacks"),
        ("{lora: a}", "base_model has no model"),
        ("{path: a, revision: b}", "base_model has an unknown key 'path'"),
        ("{model: a, override_architecture: B}", "base_model has an unknown key 'override_arch"),
        ("{model: {revision: b}}", "base_model.model has no path"),
        ("{model: {path: a, revison: b}}", "base_model.model has an unknown key 'revison'"),
        ("{model: {path: a@b}}", "base_model.model.path is 'a@b', where @"),
        ("{model: a+b}", "base_model.model is 'a+b', where +"),
        ("{model: a, lora: {path: a, revision: b+c}}", "base_model.lora.revision is 'b+c', where"),
    ],
)
def test_what_is_no_model_is_refused(written: str, what: str) -> None:
    assert refusal(f"{MODELS}base_model: {written}\n").message.startswith(f"line 5: {what}")


# Slices


@pytest.mark.parametrize(
    ("layers", "what"),
    [
        ("[0, 0]", "is [0, 0], which holds no layer"),
        ("[8, 4]", "is [8, 4], which holds no layer"),
        ("[4]", "has 1 items"),
        ("[0, 4, 8]", "has 3 items"),
        ("[]", "is an empty list"),
        ("4", "is 4, not a list"),
        ("[-1, 4]", "[0] is -1"),
        ("[0, 4.0]", "[1] is 4.0, not a whole number"),
        ("[false, 4]", "[0] is false, not a whole number"),
        ("['0', 4]", "[0] is '0', not a whole number"),
        ("[0, 010]", "[1] is '010', not a whole number"),
    ],
)
def test_a_layer_range_is_two_whole_numbers_that_rise(layers: str, what: str) -> None:
    message = refusal(f"{SLICE}        layer_range: {layers}\n").message
    assert message.removeprefix("line 5: slices[0].sources[0].layer_range").strip().startswith(what)


@pytest.mark.parametrize(
    ("second", "what"),
    [
        ("layer_range: [2, 5]", "has 3 layers in its layer_range, the first source of its slice 4"),
        ("parameters: {}", "has no layer_range, unlike others of its slice"),
    ],
)
def test_all_sources_of_a_slice_have_as_many_layers(second: str, what: str) -> None:
    text = f"{SLICE}        layer_range: [0, 4]\n      - model: chess\n        {second}\n"
    assert refusal(text).message == f"line 6: slices[0].sources[1] {what}"


def test_a_slice_may_take_whole_models() -> None:
    assert read(SLICE).slices == (SliceSpec((SourceSpec("cooking"),)),)


def test_a_slice_may_repeat_the_recipes_base_but_have_none_of_its_own() -> None:
    text = f"base_model: words\n{SLICE}    base_model: "
    assert read(f"{text}words\n").slices == read(SLICE).slices
    assert refusal(f"{text}chess\n").message == (
        "line 6: slices[0].base_model is 'chess', but words for the recipe"
    )
    assert "but nothing for the recipe" in refusal(f"{SLICE}    base_model: chess\n").message


# Tokenizers


def test_tokens_take_their_embeddings_from_where_they_are_told() -> None:
    assert read(
        MODELS
        + """
tokenizer:
  source: union
  pad_to_multiple_of: 64
  tokens:
    <|im_start|>:
      source: gardening
      force: true
    <|unused|>: {source: {kind: zero}}
    "yes": {source: {kind: model_token, model: cooking, token: "no"}}
    42: {source: {kind: model_token, model: {model: {path: words}}, token_id: 0}, force: false}
    " ": {source: {model: {path: cooking}, lora: chess}}
"""
    ).tokenizer == TokenizerSpec(
        "union",
        {
            "<|im_start|>": TokenSpec("model", model="gardening", force=True),
            "<|unused|>": TokenSpec("zero"),
            "yes": TokenSpec("token", model="cooking", token="no"),
            "42": TokenSpec("token", model="words", token_id=0),
            " ": TokenSpec("model", model="cooking+chess"),
        },
        64,
    )


@pytest.mark.parametrize("source", ["union", "base", "kitchen/cooking@v1"])
def test_a_tokenizers_source_has_a_short_form(source: str) -> None:
    short = read(f"{MODELS}tokenizer_source: {source}\n")
    assert short.tokenizer == TokenizerSpec(source)
    assert read(f"{MODELS}tokenizer: {{source: {source}, tokens: ~}}\n") == short


def test_a_tokenizer_is_the_union_unless_told_otherwise() -> None:
    assert read(f"{MODELS}tokenizer: {{}}\n").tokenizer == TokenizerSpec("union")


@pytest.mark.parametrize(
    ("tokenizer", "what"),
    [
        ("pad_to_multiple_of: 0", "tokenizer.pad_to_multiple_of is 0"),
        ("pad_to_multiple_of: true", "tokenizer.pad_to_multiple_of is true, not a whole"),
        ("pad_to_multiple: 8", "tokenizer has an unknown key 'pad_to_multiple'"),
        ("tokens: [a]", "tokenizer.tokens is a list, not a mapping"),
        ("tokens: {a: b}", "tokenizer.tokens.a is 'b', not a mapping"),
        ("tokens: {a: }", "tokenizer.tokens.a is empty, not a mapping"),
        ('tokens: {"a\\n": {}}', r"tokenizer.tokens.'a\n' has no source"),
        ("tokens: {a: {source: b, forse: true}}", "tokenizer.tokens.a has an unknown key 'forse'"),
        ("tokens: {a: {source: b, force: 1}}", "tokenizer.tokens.a.force is 1, neither true"),
        ("tokens: {a: {source: {kind: zeros}}}", "tokenizer.tokens.a.source.kind is 'zeros'"),
        ("tokens: {a: {source: {kind: [zero]}}}", "tokenizer.tokens.a.source.kind is a list"),
        (
            "tokens: {a: {source: {kind: zero, model: b}}}",
            "tokenizer.tokens.a.source has an unknown key 'model'",
        ),
        (
            "tokens: {a: {source: {kind: model_token, model: b}}}",
            "tokenizer.tokens.a.source needs a token or a token_id",
        ),
        (
            "tokens: {a: {source: {kind: model_token, model: b, token: c, token_id: 1}}}",
            "tokenizer.tokens.a.source needs a token or a token_id",
        ),
        (
            "tokens: {a: {source: {kind: model_token, token: c}}}",
            "tokenizer.tokens.a.source has no model",
        ),
        (
            "tokens: {a: {source: {kind: model_token, model: b, token_id: -1}}}",
            "tokenizer.tokens.a.source.token_id is -1",
        ),
    ],
)
def test_what_is_no_tokenizer_is_refused(tokenizer: str, what: str) -> None:
    message = refusal(f"{MODELS}tokenizer:\n  {tokenizer}\n").message
    assert message.startswith(f"line 6: {what}")


def test_a_tokenizer_and_its_short_form_exclude_each_other() -> None:
    message = refusal(f"{MODELS}tokenizer: {{source: base}}\ntokenizer_source: base\n").message
    assert message == "line 1: the recipe has both tokenizer and tokenizer_source"


# Dtypes


@pytest.mark.parametrize("key", ["dtype", "out_dtype"])
def test_dtypes_have_our_names(key: str) -> None:
    for text, name in [("bfloat16", "BF16"), ("torch.float32", "F32"), ("fp16", "F16")]:
        assert getattr(read(f"{MODELS}{key}: {text}\n"), key) == name
    error = refusal(f"{MODELS}{key}: int64\n")
    assert error.message == f"line 5: {key} is 'int64', no dtype to merge to"
    assert "bfloat16" in error.hint


# What is refused


@pytest.mark.parametrize(
    ("text", "message", "nearest"),
    [
        (MODELS + "merge_metod: ties\n", "line 5: the recipe has an unknown key 'merge_metod'",
         "merge_method"),
        (MODELS + "Parameters: {}\n", "line 5: the recipe has an unknown key 'Parameters'",
         "parameters"),
        (MODELS + "    wieght: 1\n", "line 5: models[1] has an unknown key 'wieght'", "parameters"),
        (MODELS + "    paramters: {}\n", "line 5: models[1] has an unknown key 'paramters'",
         "parameters"),
        (MODELS + "    layer_range: [0, 1]\n", "line 5: models[1] has an unknown key 'layer_range'",
         "slices"),
        (MODELS + "    lora: chess\n", "line 5: models[1] has an unknown key 'lora'",
         "base+adapter"),
        (MODELS + "random_seed: 3\n", "line 5: the recipe has an unknown key 'random_seed'",
         "seed"),
        (SLICE + "        layer_rnge: [0, 1]\n",
         "line 5: slices[0].sources[0] has an unknown key 'layer_rnge'", "layer_range"),
        (SLICE + "    source: []\n", "line 5: slices[0] has an unknown key 'source'", "sources"),
        (SLICE + "    residual_weight: 1\n",
         "line 5: slices[0] has an unknown key 'residual_weight'", "no effect"),
        ("merge_method: x\nmodules:\n  a:\n    modls: []\n",
         "line 4: modules.a has an unknown key 'modls'", "models"),
        (MODELS + "parameters:\n  t:\n    - {fliter: a, value: 1}\n",
         "line 6: parameters.t[0] has an unknown key 'fliter'", "filter"),
        (MODELS + '"a\\nb": 1\n', "line 5: the recipe has an unknown key 'a\\nb'", "models"),
        (MODELS + "1: 1\n", "line 5: the recipe has an unknown key '1'", "models"),
    ],
)  # fmt: skip
def test_an_unknown_key_is_named_with_its_place_and_the_nearest(
    text: str, message: str, nearest: str
) -> None:
    error = refusal(text)
    assert error.message == message
    assert nearest in error.hint


def test_an_unknown_key_of_a_merged_mapping_is_found_where_it_was_written() -> None:
    text = (
        "merge_method: linear\n"
        "models:\n"
        "  - &it\n"
        "    model: a\n"
        "    parameters: {}\n"
        "  - {<<: *it, wight: 1}\n"
    )
    assert refusal(text).message == "line 6: models[1] has an unknown key 'wight'"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the recipe is empty"),
        ("# nothing\n---\n", "the recipe is empty"),
        ("linear", "line 1: the recipe is 'linear', not a mapping"),
        ("~", "line 1: the recipe is empty, not a mapping"),
        ("- merge_method: linear\n", "line 1: the recipe is a list, not a mapping"),
        ("models: [{model: a}]", "line 1: the recipe has no merge_method"),
        ("merge_method: 3\nmodels: [{model: a}]", "line 1: merge_method is 3, not text"),
        ("merge_method: linear", "line 1: the recipe names no models to merge"),
        (MODELS + "slices: []", "line 1: the recipe has both models and slices"),
        (MODELS + "modules: {}", "line 1: the recipe has both models and modules"),
        ("merge_method: x\nmodules: {}", "line 2: modules must be one module, not 0: none"),
        ("merge_method: x\nmodules: {a: {}}", "line 2: modules.a needs models or slices, and"),
        ("merge_method: x\nmodules: {a: {models: [{model: b}], slices: []}}",
         "line 2: modules.a needs models or slices, and not both"),
        ("merge_method: x\nmodels: []", "line 2: models is an empty list"),
        ("merge_method: x\nmodels: a", "line 2: models is 'a', not a list"),
        ("merge_method: x\nmodels:\n- a", "line 3: models[0] is 'a', not a mapping"),
        ("merge_method: x\nmodels:\n- parameters: {}", "line 3: models[0] has no model"),
        ("merge_method: x\nslices: {sources: a}", "line 2: slices is a mapping, not a list"),
        ("merge_method: x\nslices: [{}]", "line 2: slices[0] has no sources"),
        (MODELS + "parameters: [1]", "line 5: parameters is a list, not a mapping"),
        (MODELS + "parameters:\n  t: []", "line 6: parameters.t is an empty list"),
        (MODELS + "parameters:\n  t:", "line 6: parameters.t has no value"),
        (MODELS + "parameters:\n  t: .nan", "line 6: parameters.t is nan, not a finite number"),
        (MODELS + "seed: 1.5", "line 5: seed is 1.5, not a whole number"),
        (MODELS + "seed: true", "line 5: seed is true, not a whole number"),
        (MODELS + "seed: " + "9" * 5000, "line 5: seed is 99"),
        (MODELS + "ignore_extra: 1", "line 5: ignore_extra is 1, neither true nor false"),
        (MODELS + "allow_nonfinite: 'true'", "line 5: allow_nonfinite is 'true', neither"),
        (MODELS + "chat_template: [a]", "line 5: chat_template is a list, not text"),
        (MODELS + "dtype: 16", "line 5: dtype is 16, not text"),
        (MODELS + "name: 2", "line 5: name is 2, not text"),
        (MODELS + "name: " + "x" * 100 + "\ndtype: [", "the recipe is not YAML"),
        (f"{MODELS}---\n{MODELS}", "line 1: the recipe has no name"),
        (f"name: a\n{MODELS}---\nname: a\n{MODELS}",
         "line 7: the recipe is called 'a' like the one on line 1"),
    ],
)  # fmt: skip
def test_what_is_no_recipe_is_refused_with_its_line(text: str, message: str) -> None:
    error = refusal(text)
    assert error.message.startswith(message)
    assert error.message.isprintable()
    assert len(error.message) < 300


# Writing

names = st.text("abcXYZ/-_.~^019 ", min_size=1, max_size=8).filter(lambda s: s == s.strip())
models = st.one_of(
    names,
    st.sampled_from(["no", "1e-5", "010", "2024-01-01", "null", "<<", "= ", "é", "a: b", "#x"]).map(
        str.strip
    ),
    st.tuples(names, names).map("@".join),
    st.tuples(names, names).map("+".join),
)
texts = st.text(min_size=1, max_size=30) | st.text("ab \n\t", min_size=1, max_size=200)
parameters = st.dictionaries(texts, settings_, max_size=2)
tokens = st.one_of(
    st.builds(TokenSpec, st.just("model"), model=models, force=st.booleans()),
    st.builds(TokenSpec, st.just("zero"), force=st.booleans()),
    st.builds(TokenSpec, st.just("token"), model=models, token=texts, force=st.booleans()),
    st.builds(TokenSpec, st.just("token"), model=models, token_id=st.integers(0)),
)
tokenizers = st.builds(
    TokenizerSpec,
    st.sampled_from(["union", "base"]) | models,
    st.dictionaries(texts, tokens, max_size=2),
    st.none() | st.integers(1),
)


@st.composite
def slices(draw: st.DrawFn) -> SliceSpec:
    length = draw(st.none() | st.integers(1, 40))
    starts = st.integers(0, 40)
    sources = st.builds(
        SourceSpec,
        models,
        st.none() if length is None else starts.map(lambda start: (start, start + length)),
        parameters,
    )
    return SliceSpec(tuple(draw(st.lists(sources, min_size=1, max_size=3))), draw(parameters))


@st.composite
def documents(draw: st.DrawFn) -> Document:
    whole = st.lists(st.builds(SourceSpec, models, parameters=parameters), min_size=1, max_size=3)
    by_models = draw(st.booleans())
    return Document(
        merge_method=draw(names),
        name=draw(st.none() | names),
        base_model=draw(st.none() | models),
        models=tuple(draw(whole)) if by_models else (),
        slices=() if by_models else tuple(draw(st.lists(slices(), min_size=1, max_size=3))),
        parameters=draw(parameters),
        dtype=draw(st.none() | st.sampled_from(list(TORCH_NAMES))),
        out_dtype=draw(st.none() | st.sampled_from(list(TORCH_NAMES))),
        tokenizer=draw(st.none() | tokenizers),
        chat_template=draw(st.none() | texts),
        seed=draw(st.none() | st.integers()),
        ignore_extra=draw(st.booleans()),
        allow_nonfinite=draw(st.booleans()),
        reference=draw(st.none() | models),
    )


@given(documents())
def test_what_is_written_reads_back(document: Document) -> None:
    back = read(write_documents([document]))
    assert back == document
    assert [list(model.parameters) for model in back.models] == [
        list(model.parameters) for model in document.models
    ]


@given(settings_)
def test_a_setting_keeps_its_types_through_yaml(one: Setting) -> None:
    document = Document("m", models=(SourceSpec("a"),), parameters={"t": one})
    back = read(write_documents([document])).parameters["t"]
    assert [type(scalar) for scalar in back.values] == [type(scalar) for scalar in one.values]


def test_several_recipes_read_back() -> None:
    text = f"name: a\n{MODELS}---\nname: b\n{SLICE}---\n{MODELS}"
    assert read_documents(write_documents(read_documents(text))) == read_documents(text)


def test_what_is_written_is_pleasant_to_read() -> None:
    document = Document(
        merge_method="ties",
        name="evening",
        base_model="words",
        slices=(
            SliceSpec(
                (
                    SourceSpec("cooking@v1", (0, 12), {"weight": value(1)}),
                    SourceSpec("chess", (0, 12), {"weight": setting([0, 0.5, 1])}),
                ),
                {"density": setting([{"filter": "mlp", "value": 0.25}, {"value": 1}])},
            ),
        ),
        parameters={"normalize": value(True), "epsilon": value(1e-5)},
        dtype="F32",
        out_dtype="BF16",
        tokenizer=TokenizerSpec("union", {"<s>": TokenSpec("zero", force=True)}),
        chat_template="{{ one }}\n{{ two }}\n",
        seed=0,
        ignore_extra=True,
    )
    last = Document("linear", models=(SourceSpec("no"),), tokenizer=TokenizerSpec("base"))
    assert write_documents([document, last]) == (
        """\
name: evening
merge_method: ties
base_model: words
slices:
  - sources:
      - model: cooking@v1
        layer_range: [0, 12]
        parameters:
          weight: 1
      - model: chess
        layer_range: [0, 12]
        parameters:
          weight: [0, 0.5, 1]
    parameters:
      density:
        - filter: mlp
          value: 0.25
        - value: 1
parameters:
  normalize: true
  epsilon: 1.0e-05
tokenizer:
  source: union
  tokens:
    <s>:
      source:
        kind: zero
      force: true
chat_template: |
  {{ one }}
  {{ two }}
dtype: float32
out_dtype: bfloat16
seed: 0
ignore_extra: true
---
merge_method: linear
models:
  - model: 'no'
tokenizer_source: base
"""
    )


# Whatever is given

KEYS = ("merge_method", "name", "base_model", "models", "model", "slices", "sources", "modules",
        "parameters", "layer_range", "tokenizer", "tokenizer_source", "source", "tokens", "kind",
        "token", "token_id", "force", "pad_to_multiple_of", "dtype", "seed", "filter", "value",
        "path", "revision", "lora", "chat_template", "ignore_extra")  # fmt: skip
leaves = (
    st.none() | st.booleans() | st.integers(-2, 9) | st.floats() | st.text(max_size=6)
    | st.sampled_from(["linear", "a", "zero", "model_token", "union", "bfloat16"])
)  # fmt: skip
trees: st.SearchStrategy[Any] = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4)
        | st.dictionaries(st.text(max_size=4), inner, max_size=2)
    ),
    max_leaves=20,
)
recipes = st.fixed_dictionaries(
    {"merge_method": st.just("linear")},
    optional={
        "models": st.lists(st.fixed_dictionaries({"model": trees}, optional={"parameters": trees})),
        "slices": st.lists(st.fixed_dictionaries({"sources": st.lists(trees)})),
        **dict.fromkeys(("modules", "parameters", "tokenizer", "base_model", "seed"), trees),
    },
)


def check_outcome(text: str) -> None:
    """``text`` is refused in good form, or is a recipe that can be written and read again."""
    try:
        found = read_documents(text)
    except BadRecipe as error:
        lines = (error.message, error.hint)
    else:
        assert read_documents(write_documents(found)) == found
        return
    assert all(line and line.isprintable() for line in lines)


@given(trees | recipes, st.booleans())
def test_any_tree_makes_recipes_or_a_bad_recipe(tree: object, flow: bool) -> None:
    check_outcome(yaml.safe_dump(tree, default_flow_style=flow))


@given(st.text() | st.lists(st.sampled_from([*KEYS, ": ", "\n", "\n  ", "- ", "[", "]", "{", "}",
       ", ", "&a ", "*a", "<<", "---\n", "0", "'", '"', "!", "|", "# "])).map("".join))  # fmt: skip
def test_any_text_makes_recipes_or_a_bad_recipe(text: str) -> None:
    check_outcome(text)


@given(st.binary(max_size=60))
def test_any_bytes_make_recipes_or_a_bad_recipe(data: bytes) -> None:
    check_outcome(data.decode(errors="surrogateescape"))


def test_a_recipe_that_would_grow_is_refused_at_once() -> None:
    lines = ["a0: &a0 [1, 1]", *(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 30))]
    assert "more than" in refusal("\n".join(lines)).message
