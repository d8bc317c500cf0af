"""Chat templates: how a conversation is written for a model, in Jinja.

The built-in ones are written after the formats as their makers describe them; the names are those
of mergekit's recipes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

from mergegit.checkpoint.json_files import Files, read_object, read_text, write_object
from mergegit.checkpoint.vocabulary import TOKENIZER_CONFIG
from mergegit.errors import BadRecipe

JINJA_FILE: Final = "chat_template.jinja"
PROCESSOR_FILE: Final = "chat_template.json"
FURTHER: Final = "additional_chat_templates/"
"""A directory of templates for special uses; where it is there, the default is a file, too."""
AUTO: Final = "auto"

_ALPACA: Final = """\
{%- for message in messages -%}
    {{- '\\n\\n' if not loop.first -}}
    {%- if message.role == 'user' -%}
        {{- '### Instruction:\\n' -}}
    {%- elif message.role == 'assistant' -%}
        {{- '### Response:\\n' -}}
    {%- elif message.role == 'user_context' -%}
        {{- '### Input:\\n' -}}
    {%- endif -%}
    {{- message.content | trim -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '\\n\\n### Response:\\n' -}}
{%- endif -%}
"""

_CHATML: Final = """\
{%- for message in messages -%}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""

_LLAMA3: Final = """\
{{- bos_token -}}
{%- for message in messages -%}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' -}}
    {{- message.content | trim + '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
{%- endif -%}
"""

_MISTRAL: Final = """\
{{- bos_token -}}
{%- set state = namespace(system='', turns=0) -%}
{%- for message in messages -%}
    {%- if loop.first and message.role == 'system' -%}
        {%- set state.system = message.content + '\\n\\n' -%}
    {%- elif message.role != ('user', 'assistant')[state.turns % 2] -%}
        {{- raise_exception('user and assistant must take turns') -}}
    {%- elif message.role == 'user' -%}
        {{- ' [INST] ' + state.system + message.content + ' [/INST]' -}}
        {%- set state.system = '' -%}
        {%- set state.turns = state.turns + 1 -%}
    {%- else -%}
        {{- ' ' + message.content + eos_token -}}
        {%- set state.turns = state.turns + 1 -%}
    {%- endif -%}
{%- endfor -%}
"""

_EXAONE: Final = """\
{%- if messages and messages[0].role != 'system' -%}
    {{- '[|system|][|endofturn|]\\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {{- '[|' + message.role + '|]' + message.content -}}
    {{- '\\n' if message.role == 'user' else '[|endofturn|]\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '[|assistant|]' -}}
{%- endif -%}
"""

TEMPLATES: Final[Mapping[str, str]] = {
    "alpaca": _ALPACA,
    "chatml": _CHATML,
    "exaone": _EXAONE,
    "llama3": _LLAMA3,
    "mistral": _MISTRAL,
}
"""The built-in templates by name."""


def chat_template_files(
    files: Files, template: str, models: Sequence[tuple[str, Files]], *, of: str
) -> dict[str, bytes]:
    """Those of a tokenizer's files that change where it gets a chat template, by path.

    ``template`` is ``auto``, for the one that most of ``models`` have (the first of them where
    several are as frequent; none where no model has one), the name of a built-in one, or a template
    itself, which is told by a brace in it. ``files`` are those of the tokenizer of ``of``. It
    goes into tokenizer_config.json, and into other files that have one already and would win.

    Raises ``BadRecipe`` for an unknown name, ``BadCheckpoint`` for malformed files.
    """
    text = _chosen(template, models)
    if text is None:
        return {}
    config = read_object(files, TOKENIZER_CONFIG, of) if TOKENIZER_CONFIG in files else {}
    config["chat_template"] = text
    changed = {TOKENIZER_CONFIG: write_object(config)}
    if JINJA_FILE in files or any(path.startswith(FURTHER) for path in files):
        changed[JINJA_FILE] = text.encode()
    if PROCESSOR_FILE in files:
        processor = read_object(files, PROCESSOR_FILE, of)
        changed[PROCESSOR_FILE] = write_object({**processor, "chat_template": text})
    return changed


def chat_template(files: Files, of: str) -> str | None:
    """The template by which a model's conversations are written by default, if it has one."""
    if JINJA_FILE in files:
        return read_text(files, JINJA_FILE, of)
    config = read_object(files, TOKENIZER_CONFIG, of) if TOKENIZER_CONFIG in files else {}
    return _default(config.get("chat_template"))


def check_template(template: str) -> None:
    """Raises ``BadRecipe`` where a recipe's chat template is neither a name nor a template."""
    if template != AUTO and template not in TEMPLATES and "{" not in template:
        raise BadRecipe(
            f"there is no chat template {template!r}",
            hint=f"name one of {', '.join(TEMPLATES)}, say {AUTO}, or give a template in Jinja",
        )


def _chosen(template: str, models: Sequence[tuple[str, Files]]) -> str | None:
    check_template(template)
    if template == AUTO:
        found = [text for name, files in models if (text := chat_template(files, name))]
        # Files end with a line feed where settings don't.
        counted = Counter(text.strip() for text in found)
        return counted.most_common(1)[0][0] if counted else None
    return TEMPLATES.get(template, template)


def _default(value: Any) -> str | None:
    """Of several templates by name, as a map or as a list of pairs, the one for most uses."""
    if isinstance(value, list):
        named = [entry for entry in value if isinstance(entry, dict)]
        value = next((e.get("template") for e in named if e.get("name") == "default"), None)
    if isinstance(value, dict):
        value = value.get("default")
    return value if isinstance(value, str) else None
