"""config.json of a merged model."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mergegit.repository.companions import config_with_dtype, config_with_layers

STACK = (0, 1, 1, 2)


def stacked(config: dict[str, Any]) -> Any:
    return json.loads(config_with_layers(json.dumps(config).encode(), STACK))


@pytest.mark.parametrize(
    ("config", "keys"),
    [
        ({"dtype": "bfloat16"}, {"dtype"}),
        ({"torch_dtype": "bfloat16"}, {"torch_dtype"}),
        ({"torch_dtype": "bfloat16", "dtype": "bfloat16"}, {"dtype", "torch_dtype"}),
        ({}, {"torch_dtype"}),
    ],
)
def test_every_key_that_states_the_dtype_states_the_new_one(
    config: dict[str, Any], keys: set[str]
) -> None:
    told = json.loads(config_with_dtype(json.dumps(config).encode(), "F16"))
    assert told == dict.fromkeys(keys, "float16")


def test_a_list_with_an_entry_for_each_layer_follows_the_layers() -> None:
    told = stacked({"num_hidden_layers": 3, "layer_types": ["a", "b", "c"]})
    assert told == {"num_hidden_layers": 4, "layer_types": ["a", "b", "b", "c"]}


def test_a_number_that_others_have_a_list_for_is_left_alone() -> None:
    assert stacked({"num_layers": 3, "intermediate_size": 64})["intermediate_size"] == 64


def test_a_list_of_layers_numbers_them_anew() -> None:
    told = stacked({"num_hidden_layers": 3, "mlp_only_layers": [1], "moe_layers": [0, 2]})
    assert told == {"num_hidden_layers": 4, "mlp_only_layers": [1, 2], "moe_layers": [0, 3]}


def test_the_layers_of_a_language_model_beside_others_are_counted_in_its_part() -> None:
    config = {"text_config": {"num_hidden_layers": 3}, "vision_config": {"num_hidden_layers": 9}}
    told = stacked(config)
    assert told["text_config"]["num_hidden_layers"] == len(STACK)
    assert told["vision_config"] == config["vision_config"]


def test_a_pattern_of_attention_says_what_its_layers_say() -> None:
    told = stacked(
        {
            "num_layers": 3,
            "attention_types": [[["global"], 1], [["local"], 2]],
            "attention_layers": ["global", "local", "local"],
        }
    )
    assert told["attention_layers"] == ["global", "local", "local", "local"]
    assert told["attention_types"] == [[told["attention_layers"], 1]]
