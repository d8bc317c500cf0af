"""`mergegit add`, `plan`, `merge` and `checkout` of a LoRA adapter."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.adapters import WEIGHTS, Tensors, adapted, save_adapter
from tests.cli.conftest import CommandLine
from tests.families import Family
from tests.trees import tree_of


@pytest.fixture(scope="session")
def tiny_base(tiny_family: Family) -> Tensors:
    return load_file(tiny_family.base / "model.safetensors")


@pytest.fixture
def chat(tiny_base: Tensors, tmp_path: Path) -> Path:
    """An adapter that calls its base org/base."""
    return save_adapter(tmp_path / "chat", tiny_base, modules=["up_proj"], rank=2)


def test_it_is_added_on_the_base_that_it_names(mergegit: CommandLine, chat: Path) -> None:
    result = mergegit("add", chat)
    assert result.code == 0
    assert result.err == "note: its config names org/base as its base\n"
    first, numbers = result.lines
    assert re.fullmatch(r"added chat as an adapter on base base: [0-9a-f]{10}", first)
    assert numbers.startswith("  2 tensors, ")
    again = mergegit.ok("add", chat, "--base", "base")
    assert re.fullmatch(
        r"chat holds this checkpoint already, at [0-9a-f]{10}; nothing to do\n", again.out
    )


def test_json(mergegit: CommandLine, chat: Path, commit_of: Callable[[str], str]) -> None:
    report = mergegit.ok("add", chat, "--base", "base", "--json").json
    assert (report["is_new"], report["is_adapter"]) == (True, True)
    assert (report["base"], report["base_ref"]) == (commit_of("base"), "base")
    assert report["commit"] == commit_of("chat")
    assert mergegit.ok("add", chat, "--json").json["is_new"] is False


def test_without_its_base(mergegit: CommandLine, tiny_base: Tensors, tmp_path: Path) -> None:
    path = save_adapter(tmp_path / "lost", tiny_base, modules=["up_proj"], base_name="org/lost")
    message, hint = mergegit("add", path).failed()
    assert message == (
        "lost is an adapter, and its config names org/lost, which is not in the repository"
    )
    assert hint == "say which commit it was trained on with --base REF"
    message, _ = mergegit("add", path, "--no-base").failed()
    assert message == "lost is an adapter, which is nothing without its base"
    message, _ = mergegit("add", path, "--base", "nowhere").failed()
    assert "nowhere" in message


def test_on_another_base(mergegit: CommandLine, tmp_path: Path) -> None:
    stranger = {"model.layers.0.mlp.up_proj.weight": torch.zeros(12, 9)}
    path = save_adapter(tmp_path / "odd", stranger, modules=["up_proj"])
    message, hint = mergegit("add", path, "--base", "base").failed()
    assert message.startswith("odd changes tensor model.layers.0.mlp.up_proj.weight by a matrix")
    assert hint == "name the base that the adapter was trained on"


def test_it_is_planned_merged_and_checked_out(
    mergegit: CommandLine, chat: Path, tiny_base: Tensors, tmp_path: Path
) -> None:
    mergegit.ok("add", chat, "--base", "base")
    size = sum(tensor.nbytes for tensor in load_file(chat / WEIGHTS).values())
    plan = mergegit.ok("plan", "chat", "--json").json
    assert (plan["raw_bytes"], plan["planned_bytes"], plan["predicted_error"]) == (size, size, 0)
    merge = mergegit.ok("merge", "math", "chat", "-b", "both", "--json").json
    assert merge["read_bytes"] == merge["planned_bytes"]
    mergegit.ok("merge", "chat", "-b", "only")
    mergegit.ok("checkout", "chat", tmp_path / "as-added")
    assert tree_of(tmp_path / "as-added") == tree_of(chat)
    result = mergegit.ok("checkout", "chat", tmp_path / "model", "--merged")
    assert result.out.startswith(f"chat written to {tmp_path}/model: 4 files, ")
    mergegit.ok("checkout", "only", tmp_path / "merged")
    made = load_file(tmp_path / "model" / "model.safetensors")
    wanted = adapted(chat, tiny_base)
    for name, tensor in load_file(tmp_path / "merged" / "model.safetensors").items():
        assert torch.equal(made[name], tensor)
        torch.testing.assert_close(tensor.double(), wanted[name], rtol=2**-8, atol=1e-6)


def test_a_model_is_not_checked_out_merged(mergegit: CommandLine) -> None:
    message, hint = mergegit("checkout", "math", "out", "--merged").failed()
    assert message == "math is no adapter, so that there is nothing to merge into a base"
    assert hint == "check it out without --merged"
    assert not (mergegit.directory / "out").exists()


def test_a_merged_checkout_in_another_dtype(
    mergegit: CommandLine, chat: Path, tmp_path: Path
) -> None:
    mergegit.ok("add", chat, "--base", "base")
    report = mergegit.ok(
        "checkout", "chat", "half", "--merged", "--dtype", "float16", "--json"
    ).json
    assert report["notes"] == []
    tensors = load_file(mergegit.directory / "half" / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float16}


def test_the_adapters_own_tokenizer_is_mentioned(
    mergegit: CommandLine, chat: Path, tmp_path: Path
) -> None:
    shutil.copytree(chat, tmp_path / "own")
    (tmp_path / "own" / "chat_template.jinja").write_text("{{ messages }}")
    mergegit.ok("add", tmp_path / "own", "--base", "base")
    result = mergegit("checkout", "own", "out", "--merged")
    assert result.code == 0
    assert result.err == (
        "note: the tokenizer is the base's: the adapter has another, which is not taken over\n"
    )
