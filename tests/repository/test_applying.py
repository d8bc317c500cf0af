"""Adapters checked out as models: their base's files with the adapter merged in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mergegit import Repository
from mergegit.errors import Mismatch
from tests.adapters import PREFIX, WEIGHTS, Tensors, save_adapter
from tests.families import save_checkpoint
from tests.repository.conftest import ADAPTERS
from tests.trees import tree_of


def merge(repository: Repository, adapter: str) -> None:
    repository.merge(repository.plan(repository.recipe([adapter]), anew=True), branch="out")


def read_directory(path: Path) -> Tensors:
    return {k: v for file in sorted(path.glob("*.safetensors")) for k, v in load_file(file).items()}


@pytest.mark.parametrize("name", ADAPTERS)
def test_checking_out_merged_is_the_merge(lora: Repository, tmp_path: Path, name: str) -> None:
    report = lora.checkout(name, tmp_path / "out", merged=True)
    assert report.commit == lora.resolve(name)
    merge(lora, name)
    got, wanted = read_directory(tmp_path / "out"), lora.load("out")
    assert got.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert got[key].dtype == tensor.dtype
        assert torch.equal(got[key], tensor), key


def test_the_files_are_the_bases_without_its_card(
    lora: Repository, adapters: Path, tmp_path: Path
) -> None:
    report = lora.checkout("chat", tmp_path / "out", merged=True)
    assert report.notes == ()
    files, wanted = tree_of(tmp_path / "out"), tree_of(adapters / "base")
    assert files.keys() == wanted.keys() - {"README.md"}
    assert report.files == len([f for f in (tmp_path / "out").rglob("*") if f.is_file()])
    for path, contents in files.items():
        assert (contents == wanted[path]) == (not path.endswith(".safetensors"))


def test_a_merged_checkout_takes_another_form(lora: Repository, tmp_path: Path) -> None:
    lora.checkout("chat", tmp_path / "plain", merged=True)
    lora.checkout("chat", tmp_path / "half", merged=True, dtype="float16", shard_size="500KB")
    plain, half = (read_directory(tmp_path / name) for name in ("plain", "half"))
    assert len(list((tmp_path / "half").glob("*.safetensors"))) > 2
    for name, tensor in plain.items():
        assert torch.equal(half[name], tensor.half())
    config = json.loads((tmp_path / "half" / "config.json").read_text())
    assert config["torch_dtype"] == "float16"
    index = json.loads((tmp_path / "half" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == plain.keys()


def test_second_weights_and_another_tokenizer_are_left_out_with_a_word(
    repository: Repository, base: Tensors, tmp_path: Path
) -> None:
    path = save_checkpoint(tmp_path / "base", base, shards=1)
    save_file({"x": torch.zeros(3)}, path / "consolidated.safetensors")
    (path / "model.onnx").write_bytes(b"weights")
    repository.add(path)
    chat = save_adapter(tmp_path / "chat", base)
    (chat / "tokenizer.json").write_text("{}")
    repository.add(chat)
    report = repository.checkout("chat", tmp_path / "out", merged=True)
    assert set(report.notes) == {
        "the tokenizer is the base's: the adapter has another, which is not taken over",
        "left out: consolidated.safetensors",
        "left out: model.onnx",
    }
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert names == {"model.safetensors", "config.json", "tokenizer.json", "original"}


def test_what_is_no_adapter_cant_be_checked_out_merged(lora: Repository, tmp_path: Path) -> None:
    for ref in ("base", "math"):
        with pytest.raises(Mismatch, match=f"{ref} is no adapter") as caught:
            lora.checkout(ref, tmp_path / "out", merged=True)
        assert "--merged" in caught.value.hint
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("threads", [1, 5])
def test_threads_change_nothing_in_a_merged_checkout(
    lora_template: Path, tmp_path: Path, threads: int
) -> None:
    for count in (threads, 2):
        with Repository.open(lora_template, threads=count) as repository:
            repository.checkout("dora", tmp_path / str(count), merged=True)
    assert tree_of(tmp_path / str(threads)) == tree_of(tmp_path / "2")


def test_integers_stay_the_bases(repository: Repository, base: Tensors, tmp_path: Path) -> None:
    ids = "model.position.ids"
    tensors = {**base, ids: torch.arange(7)}
    path = tmp_path / "base"
    path.mkdir()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    repository.add(path)
    chat = save_adapter(tmp_path / "chat", base)
    own = load_file(chat / WEIGHTS)
    save_file({**own, PREFIX + ids: torch.arange(7) + 1}, chat / WEIGHTS)
    repository.add(chat)
    repository.checkout("chat", tmp_path / "out", merged=True)
    merge(repository, "chat")
    assert torch.equal(read_directory(tmp_path / "out")[ids], torch.arange(7))
    assert torch.equal(repository.load("out")[ids], torch.arange(7))
