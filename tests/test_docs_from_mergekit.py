"""Every command of docs/from-mergekit.md runs, and what it says is refused is refused."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
import torch
from safetensors.torch import load_file, save_file

from mergegit.cli.main import cli
from mergegit.merge.methods import METHODS
from tests.cli.conftest import CommandLine
from tests.families import generator
from tests.layered import save, weights

TEXT = (Path(__file__).parents[1] / "docs" / "from-mergekit.md").read_text()
LAYERS = 32


def blocks(kind: str) -> list[str]:
    """The fenced blocks of a kind, in their order."""
    return re.findall(rf"^```{kind}\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)


SHELL = blocks("sh")
REFUSED = blocks("yaml refused")


def make_models(root: Path) -> None:
    """The models that the page speaks of, of 32 layers, and an adapter."""
    base = {name: tensor / 2**16 for name, tensor in weights(layers=LAYERS).items()}
    save(root / "llama-8b", base, torch.bfloat16)
    for model in ("llama-8b-math", "llama-8b-code", "hub/someone/llama-8b-prose"):
        moved = {
            name: tensor + torch.randn(tensor.shape, generator=generator(model, name)) * 1e-3
            for name, tensor in base.items()
        }
        save(root / model, moved, torch.bfloat16)
    lora = root / "chat-lora"
    lora.mkdir()
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (lora / "adapter_config.json").write_text(json.dumps(settings))
    module = "base_model.model.model.layers.5.self_attn.q_proj"
    factors = {
        f"{module}.lora_A.weight": torch.ones(2, 8), f"{module}.lora_B.weight": torch.ones(8, 2),
    }  # fmt: skip
    save_file(factors, lora / "adapter_model.safetensors")


def make_programs(root: Path) -> None:
    """`mergegit`, and `hf` as far as the page uses it, with a directory for the Hub."""
    root.mkdir()
    (root / "mergegit").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m mergegit "$@"\n')
    (root / "hf").write_text(
        '#!/bin/sh\ntest "$1 $3" = "download --local-dir" && cp -r "hub/$2" "$4"\n'
    )
    for program in root.iterdir():
        program.chmod(0o755)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which all commands of the page have been run, from the first to the last."""
    root = tmp_path_factory.mktemp("from-mergekit")
    make_models(root / "work")
    make_programs(root / "bin")
    done = run(root / "work", "\n".join(SHELL), root / "bin")
    assert done.returncode == 0, done.stderr[-3000:]
    return root / "work"


def run(place: Path, script: str, programs: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=place, capture_output=True, text=True, check=False, timeout=300,
        env={**os.environ, "PYTHONPATH": os.getcwd(), "PATH": f"{programs}:{os.environ['PATH']}"},
    )  # fmt: skip


@pytest.mark.slow
def test_every_command_of_the_page_succeeds(place: Path) -> None:
    """And the models are there that it says there are."""
    mergegit = CommandLine(place)
    assert set(mergegit.ok("branch", "--json").json) == {
        "llama-8b", "llama-8b-math", "llama-8b-code", "someone/llama-8b-prose", "chat-lora",
        "math-code", "math-code-10", "math-code-again", "three", "tall", "skills", "release",
        "chat-math",
    }  # fmt: skip
    pinned = (place / "pinned.yml").read_text()
    assert "llama-8b-math@" in pinned
    assert mergegit.ok("show", "math-code", "--recipe").out == pinned
    assert (
        mergegit.ok("show", "math-code", "--recipe-given").out == (place / "recipe.yml").read_text()
    )


def manifest_of(place: Path, ref: str) -> str:
    return str(CommandLine(place).ok("show", ref, "--json").json["manifest"])


@pytest.mark.slow
def test_a_pinned_recipe_makes_the_same_model(place: Path) -> None:
    assert manifest_of(place, "math-code") == manifest_of(place, "math-code-again")
    assert manifest_of(place, "math-code") != manifest_of(place, "math-code-10")


@pytest.mark.slow
def test_what_was_checked_out_loads(place: Path) -> None:
    merged = load_file(place / "math-code" / "model.safetensors")
    assert merged.keys() == weights(layers=LAYERS).keys()
    tall = load_file(place / "tall" / "model.safetensors")
    code = load_file(place / "llama-8b-code" / "model.safetensors")
    assert json.loads((place / "tall" / "config.json").read_text())["num_hidden_layers"] == 48
    name = "model.layers.{}.mlp.up_proj.weight"
    assert torch.equal(tall[name.format(47)], code[name.format(31)])


@pytest.mark.slow
@pytest.mark.parametrize("recipe", REFUSED)
def test_what_the_page_says_is_refused_is_refused(place: Path, recipe: str) -> None:
    (place / "refused.yml").write_text(recipe)
    assert all(CommandLine(place)("merge", "-c", "refused.yml").failed())


def test_the_page_has_something_to_run() -> None:
    assert len(SHELL) >= 8
    assert len(REFUSED) >= 6


def test_every_command_and_option_that_it_names_exists() -> None:
    context = click.Context(cli)
    code = "\n".join([*SHELL, *re.findall(r"`([^`\n]+)`", TEXT)])
    named = re.findall(r"mergegit ([a-z-]+)([^|;\n]*)", code)
    assert len(named) > 20
    for command_name, rest in named:
        command = cli.get_command(context, command_name)
        assert command is not None, command_name
        known = {option for parameter in command.params for option in parameter.opts}
        assert set(re.findall(r"(?<!\S)--?[a-z][a-z-]*", rest)) <= known, (command_name, rest)


def test_every_method_that_it_names_exists() -> None:
    listed = re.search(r"by the same names: ([^.]*)\.", TEXT)
    assert listed is not None
    assert set(re.findall(r"\w+", listed[1])) <= METHODS.keys()
