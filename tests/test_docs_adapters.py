"""Every command of docs/adapters.md runs, and its numbers are those of the program."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mergegit import Repository
from mergegit.checkpoint.adapter_settings import _REFUSED
from mergegit.merge.extract_lora import EXACT_SIDE
from tests.adapters import Tensors, model_tensors, save_adapter, tuned_tensors
from tests.cli.conftest import CommandLine
from tests.families import save_checkpoint

TEXT = (Path(__file__).parents[1] / "docs" / "adapters.md").read_text()
SHELL = re.findall(r"^```sh\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)
_HERE = re.compile(r"^cat > (\S+) <<'EOF'\n(.*?)^EOF\n", flags=re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which all commands of the page have been run, from the first to the last."""
    root = tmp_path_factory.mktemp("adapters-page")
    base, math = model_tensors(), tuned_tensors("math")
    save_checkpoint(root / "llama-8b", base)
    save_checkpoint(root / "llama-8b-math", math)
    save_adapter(root / "chat-lora", base, saved=["model.norm.weight"], seed="chat")
    save_adapter(root / "math-chat-lora", math, seed="upon")
    mergegit = CommandLine(root)
    mergegit.ok("init")
    for block in SHELL:
        for name, contents in _HERE.findall(block):
            (root / name).write_text(contents)
        for line in _HERE.sub("", block).splitlines():
            program, *arguments = shlex.split(line)
            assert program == "mergegit"
            result = mergegit(*arguments)
            assert result.code == 0, (line, result.err)
    return root


def test_the_page_has_something_to_run() -> None:
    commands = [line for block in SHELL for line in block.splitlines()]
    assert sum(line.startswith("mergegit ") for line in commands) >= 12


def test_the_commands_make_what_the_page_says(place: Path) -> None:
    assert set(CommandLine(place).ok("branch", "--json").json) == {
        "llama-8b", "llama-8b-math", "chat-lora", "math-chat-lora", "math-lora", "math-chat",
        "math-chat-ties", "on-the-first-base",
    }  # fmt: skip
    for name in ("math-lora", "math-chat-lora-16", "chat-lora-again"):
        assert (place / name / "adapter_model.safetensors").is_file()


def directory(path: Path) -> Tensors:
    return {k: v for file in path.glob("*.safetensors") for k, v in load_file(file).items()}


def test_a_merged_checkout_is_what_merge_makes(place: Path) -> None:
    with Repository.open(place) as repository:
        repository.merge(repository.plan(repository.recipe(["chat-lora"])), branch="alone")
        wanted = repository.load("alone")
    for name, tensor in directory(place / "llama-8b-chat").items():
        assert torch.equal(tensor, wanted[name])
    for name, tensor in directory(place / "llama-8b-chat-half").items():
        assert torch.equal(tensor, wanted[name].half())


def test_of_a_merge_of_adapters_nothing_is_lost_at_the_sum_of_their_ranks(place: Path) -> None:
    base = model_tensors()
    save_adapter(place / "one", base, rank=2, seed="one")
    save_adapter(place / "two", base, rank=3, seed="two")
    with Repository.open(place) as repository:
        for name in ("one", "two"):
            repository.add(place / name, base="llama-8b")
        recipe = repository.recipe(["one", "two"], dtype="F32")
        repository.merge(repository.plan(recipe), branch="both")
        report = repository.extract_lora("both", place / "both-lora", rank=5)
        assert report.error < 1e-5
        assert repository.extract_lora("both", place / "less", rank=4).error > 0.05


def low_rank_parameters(rank: int) -> int:
    """Of an adapter of all linear layers of a Llama 3 of 8 billion."""
    hidden, inner, narrow, layers = 4096, 14336, 1024, 32
    sides = [hidden + hidden] * 2 + [hidden + narrow] * 2 + [hidden + inner] * 3
    return layers * rank * sum(sides)


@pytest.mark.parametrize("rank", [16, 64])
def test_the_sizes_of_the_table_are_right(rank: int) -> None:
    (stated,) = re.findall(rf"adapter of rank {rank} \| (\d+) MB", TEXT)
    assert round(2 * low_rank_parameters(rank) / 1e6) == pytest.approx(int(stated), abs=1)


def test_what_it_names_as_refused_is_refused() -> None:
    part = TEXT.partition("## What is refused")[2]
    for setting in ("layer_replication", "trainable_token_indices", "target_parameters"):
        assert f"`{setting}`" in part
        assert setting in _REFUSED
    assert f"no more than {EXACT_SIDE} rows or columns" in TEXT
