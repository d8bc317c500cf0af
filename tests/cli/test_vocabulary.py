"""`--tokenizer-source` and `--chat-template` of `plan` and `merge`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from mergegit import Repository
from tests.cli.conftest import AUTHOR, CommandLine
from tests.vocabularies import ROWS, make_chat_family


@pytest.fixture(scope="module")
def chat_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with base, math, chat and code."""
    root = tmp_path_factory.mktemp("chat")
    models = make_chat_family(root / "models")
    with Repository.init(root / "place", author=AUTHOR) as repository:
        for name, path in models.items():
            repository.add(path, base=None if name == "base" else "base")
    return root / "place"


@pytest.fixture
def chat(chat_models: Path, tmp_path: Path) -> CommandLine:
    shutil.copytree(chat_models, tmp_path / "chat")
    return CommandLine(tmp_path / "chat")


def test_plan_says_what_aligning_read_and_reads_it_once(chat: CommandLine) -> None:
    union = ("chat", "code", "--tokenizer-source", "union", "--budget", "10%")
    first = chat.ok("plan", *union)
    (line,) = [line for line in first.lines if "vocabularies" in line]
    assert line.startswith("  aligned the vocabularies first, once: read 4.")
    assert "which no budget counts" in line
    again = chat.ok("plan", *union)
    assert again.lines == [line for line in first.lines if "vocabularies" not in line]


def test_plan_counts_what_aligning_read_by_itself(chat: CommandLine) -> None:
    options = ("chat", "code", "--tokenizer-source", "union", "--json")
    first, again = (chat.ok("plan", *options).json for _ in range(2))
    assert first.pop("aligned_bytes") > 4 * ROWS * 384 * 2
    assert again.pop("aligned_bytes") == 0
    assert first == again


def test_merge_takes_a_vocabulary_and_a_chat_template(chat: CommandLine, tmp_path: Path) -> None:
    options = ("--tokenizer-source", "code", "--chat-template", "chatml", "-b", "merged")
    merged = chat.ok("merge", "chat", "code", *options, "--json").json
    assert merged["recipe"]["vocabulary"] == {"source": 1}
    chat.ok("checkout", "merged", tmp_path / "out")
    settings = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert "<|im_start|>" in settings["chat_template"]
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == ROWS + 2


def test_the_recipe_that_is_shown_names_both(chat: CommandLine, tmp_path: Path) -> None:
    options = ("--tokenizer-source", "chat", "--chat-template", "chatml")
    chat.ok("merge", "chat", "code", *options, "-b", "one")
    shown = chat.ok("show", "one", "--recipe").out
    (source,) = [line for line in shown.splitlines() if line.startswith("tokenizer_source: ")]
    assert source.startswith("tokenizer_source: chat@")
    assert "chat_template: chatml" in shown
    (tmp_path / "again.yml").write_text(shown)
    chat.ok("merge", "-c", tmp_path / "again.yml", "-b", "two")
    one, two = (chat.ok("show", ref, "--json").json["manifest"] for ref in ("one", "two"))
    contents = [chat.ok("show", manifest, "--json").json["tensors"] for manifest in (one, two)]
    assert contents[0] == contents[1]


def test_a_recipe_file_says_it_all(chat: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "recipe.yml").write_text(
        "merge_method: linear\n"
        "models: [{model: chat, parameters: {weight: 1}}]\n"
        "tokenizer_source: union\n"
    )
    for option in ("--tokenizer-source", "--chat-template"):
        for command in ("plan", "merge"):
            result = chat(command, "-c", tmp_path / "recipe.yml", option, "base")
            assert result.code == 2
            assert option in result.err
    assert chat.ok("plan", "-c", tmp_path / "recipe.yml").lines


def test_a_saved_plan_is_carried_out_after_a_collection(chat: CommandLine) -> None:
    made = chat.ok("plan", "chat", "code", "--tokenizer-source", "union", "--json").json
    chat.ok("gc", "--expire", "0", "--grace", "0")
    merged = chat.ok("merge", "--plan", made["plan"], "-b", "merged", "--json").json
    assert merged["plan"] == made["plan"]
    assert merged["aligned_bytes"] > 0
    chat.ok("fsck")


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        (("chat",), "tensor lm_head.weight is [1500, 384] in base but [1502, 384] in chat",
         "--tokenizer-source union"),
        (("chat", "--tokenizer-source", "code"),
         "tokens are to come from code, which is none of the models that are merged", "chat"),
        (("chat", "--chat-template", "chatlm"), "there is no chat template 'chatlm'", "chatml"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_a_line(
    chat: CommandLine, options: tuple[str, ...], message: str, hint: str
) -> None:
    for command in ("plan", "merge"):
        said, advice = chat(command, *options).failed()
        assert said == message
        assert hint in advice


def test_the_recipe_of_the_documentation_is_one(chat: CommandLine, tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "vocabularies.md").read_text()
    recipe = text.partition("```yaml\n")[2].partition("```")[0]
    named = {"llama-chat": "chat", "llama-code": "code", "llama": "base"}
    for old, new in named.items():
        recipe = recipe.replace(old, new)
    recipe = recipe.replace("<|im_start|>", "<|user|>").replace("<think>", "<|bot|>")
    (tmp_path / "recipe.yml").write_text(recipe)
    planned = chat.ok("plan", "-c", tmp_path / "recipe.yml", "--json").json
    assert planned["recipe"]["vocabulary"]["source"] == "union"
    assert len(planned["recipe"]["vocabulary"]["tokens"]) == 3
