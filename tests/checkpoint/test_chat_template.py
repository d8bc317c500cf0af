"""Chat templates: which is chosen, where it is written, and what the built-in ones write."""

from __future__ import annotations

from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mergegit.checkpoint.chat_template import TEMPLATES, chat_template, chat_template_files
from mergegit.errors import BadCheckpoint, BadRecipe
from tests.checkpoint.tokenizers import Files, dump, load

SYSTEM = {"role": "system", "content": "Be kind."}
TALK = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Bye"},
]


def write(name: str, messages: list[dict[str, str]], *, prompt: bool = True) -> str:
    """A conversation as transformers renders it."""

    def refuse(message: str) -> None:
        raise ValueError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = refuse
    return environment.from_string(TEMPLATES[name]).render(
        messages=messages, add_generation_prompt=prompt, bos_token="<s>", eos_token="</s>"
    )


# -- the built-in ones ----------------------------------------------------------------------------


def test_chatml() -> None:
    assert write("chatml", [SYSTEM, *TALK]) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_llama3() -> None:
    assert write("llama3", [SYSTEM, {"role": "user", "content": " Hi\n"}]) == (
        "<s><|start_header_id|>system<|end_header_id|>\n\nBe kind.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )


def test_mistral() -> None:
    assert write("mistral", [SYSTEM, *TALK]) == (
        "<s> [INST] Be kind.\n\nHi [/INST] Hello</s> [INST] Bye [/INST]"
    )
    with pytest.raises(ValueError, match="turns"):
        write("mistral", TALK[1:])
    with pytest.raises(ValueError, match="turns"):
        write("mistral", [*TALK, SYSTEM])


def test_alpaca() -> None:
    assert write("alpaca", [SYSTEM, *TALK]) == (
        "Be kind.\n\n### Instruction:\nHi\n\n### Response:\nHello\n\n### Instruction:\nBye\n\n"
        "### Response:\n"
    )


def test_exaone() -> None:
    assert write("exaone", TALK) == (
        "[|system|][|endofturn|]\n[|user|]Hi\n[|assistant|]Hello[|endofturn|]\n[|user|]Bye\n"
        "[|assistant|]"
    )
    assert write("exaone", [SYSTEM, TALK[0]]).startswith(
        "[|system|]Be kind.[|endofturn|]\n[|user|]"
    )


@pytest.mark.parametrize("name", TEMPLATES)
def test_without_a_prompt_the_answer_is_the_last_that_stands(name: str) -> None:
    assert (
        write(name, TALK[:2], prompt=False)
        .rstrip()
        .removesuffix("</s>")
        .removesuffix("<|im_end|>")
        .removesuffix("<|eot_id|>")
        .removesuffix("[|endofturn|]")
        .endswith("Hello")
    )


# -- which is chosen ------------------------------------------------------------------------------


def with_template(template: Any) -> Files:
    return {"tokenizer_config.json": dump({"chat_template": template})}


def chosen(template: str, *models: Files, files: Files | None = None) -> Any:
    named = [(f"model {i}", own) for i, own in enumerate(models)]
    out = chat_template_files(files or {}, template, named, of="base")
    return load(out, "tokenizer_config.json")["chat_template"] if out else None


def test_a_models_template_is_found_wherever_it_stands() -> None:
    assert chat_template(with_template("{{ a }}"), "math") == "{{ a }}"
    listed = [
        {"name": "tool_use", "template": "{{ t }}"},
        {"name": "default", "template": "{{ d }}"},
    ]
    assert chat_template(with_template(listed), "math") == "{{ d }}"
    assert chat_template(
        {**with_template("{{ a }}"), "chat_template.jinja": b"{{ b }}"}, "math"
    ) == ("{{ b }}")
    assert chat_template({}, "math") is None
    assert chat_template(with_template([["odd"], {"name": []}]), "math") is None


def test_auto_takes_what_most_models_have() -> None:
    one, two = with_template("{{ 1 }}"), with_template("{{ 2 }}")
    same = {"chat_template.jinja": b"{{ 2 }}\n"}
    assert chosen("auto", one, two, same, {}) == "{{ 2 }}"
    assert chosen("auto", two, one) == "{{ 2 }}"
    assert chosen("auto", one, two) == "{{ 1 }}"


def test_auto_changes_nothing_where_no_model_has_one() -> None:
    assert chosen("auto", {}, {"tokenizer_config.json": b"{}"}) is None


def test_a_name_or_a_template_of_ones_own() -> None:
    assert chosen("chatml") == TEMPLATES["chatml"]
    assert chosen("{{ messages }}") == "{{ messages }}"


def test_an_unknown_name_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(BadRecipe, match="vicuna") as caught:
        chosen("vicuna")
    assert all(
        name in caught.value.hint for name in ("alpaca", "chatml", "exaone", "llama3", "mistral")
    )


# -- where it is written --------------------------------------------------------------------------


def test_it_goes_into_the_settings_and_leaves_the_rest() -> None:
    files = {"tokenizer_config.json": dump({"eos_token": "</s>"}), "tokenizer.json": b"{}"}
    out = chat_template_files(files, "{{ x }}", [], of="base")
    assert out.keys() == {"tokenizer_config.json"}
    assert load(out, "tokenizer_config.json") == {"eos_token": "</s>", "chat_template": "{{ x }}"}


def test_it_goes_into_files_that_would_win_too() -> None:
    files = {
        "chat_template.jinja": b"{{ old }}",
        "chat_template.json": dump({"chat_template": "o"}),
    }
    out = chat_template_files(files, "{{ x }}", [], of="base")
    assert out["chat_template.jinja"] == b"{{ x }}"
    assert load(out, "chat_template.json") == {"chat_template": "{{ x }}"}
    further = {"additional_chat_templates/tool_use.jinja": b"{{ t }}"}
    assert "chat_template.jinja" in chat_template_files(further, "{{ x }}", [], of="base")


def test_malformed_settings_are_refused() -> None:
    with pytest.raises(BadCheckpoint, match=r"tokenizer_config\.json of base"):
        chat_template_files({"tokenizer_config.json": b"["}, "{{ x }}", [], of="base")
