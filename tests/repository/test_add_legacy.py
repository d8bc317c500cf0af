"""`add` of PyTorch files: they are kept as safetensors, and count as any other checkpoint."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mergegit import Repository
from mergegit.errors import BadCheckpoint
from mergegit.objects import BLOCK_ELEMENTS
from tests.families import base_tensors, expert_tensors, generator, save_checkpoint
from tests.trees import tree_of

FIRST = "pytorch_model-00001-of-00002.bin"
SECOND = "pytorch_model-00002-of-00002.bin"
INDEX = "pytorch_model.bin.index.json"


def save_legacy(
    path: Path, tensors: dict[str, torch.Tensor], dtype: torch.dtype = torch.bfloat16
) -> Path:
    """The checkpoint that ``save_checkpoint`` writes in two shards, in PyTorch files."""
    save_checkpoint(path, tensors, dtype)
    weight_map = {}
    for file in sorted(path.glob("*.safetensors")):
        name = f"pytorch_{file.stem}.bin"
        shard = load_file(file)
        torch.save(shard, path / name)
        weight_map.update(dict.fromkeys(shard, name))
        file.unlink()
    (path / "model.safetensors.index.json").unlink()
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


@pytest.fixture
def legacy(tmp_path: Path) -> Path:
    return save_legacy(tmp_path / "legacy", base_tensors())


def test_it_comes_back_as_the_safetensors_of_the_same_weights(
    repository: Repository, legacy: Path, tmp_path: Path
) -> None:
    report = repository.add(legacy)
    repository.checkout("legacy", tmp_path / "out")
    modern = save_checkpoint(tmp_path / "modern" / "legacy", base_tensors())
    out, expected = tree_of(tmp_path / "out"), tree_of(modern)
    index = "model.safetensors.index.json"
    assert json.loads(out[index])["weight_map"] == json.loads(expected[index])["weight_map"]
    assert json.loads(out[index])["metadata"] == json.loads(expected[index])["metadata"]
    assert {**out, index: b""} == {**expected, index: b""}
    lengths = 2 * 8  # of the headers, which belong to no tensor
    assert report.total_bytes + lengths == sum(map(len, filter(None, out.values())))
    assert "read from PyTorch files; it comes back as safetensors" in report.notes


def test_again_it_changes_nothing(repository: Repository, legacy: Path, tmp_path: Path) -> None:
    first = repository.add(legacy)
    before = repository.status()
    again = repository.add(legacy)
    assert (again.is_new, again.commit, again.new_blocks) == (False, first.commit, 0)
    repository.checkout("legacy", tmp_path / "out")
    assert not repository.add(tmp_path / "out", name="legacy").is_new
    assert repository.status() == before


def test_weights_that_are_there_as_safetensors_are_not_stored_again(
    repository: Repository, legacy: Path, tmp_path: Path
) -> None:
    repository.add(save_checkpoint(tmp_path / "modern", base_tensors()))
    report = repository.add(legacy, no_base=True)
    manifests = repository.manifest("modern"), repository.manifest("legacy")
    assert manifests[0].tensors == manifests[1].tensors
    assert report.new_bytes < 5_000  # the index and the card


def test_an_expert_finds_its_base_and_is_stored_as_a_delta(
    repository: Repository, legacy: Path, tmp_path: Path
) -> None:
    repository.add(save_checkpoint(tmp_path / "base", base_tensors()))
    expert = save_legacy(tmp_path / "expert", expert_tensors(base_tensors(), "math"))
    report = repository.add(expert)
    assert report.base_ref == "base"
    tensor = repository.tensor(repository.manifest("expert").tensors["model.embed_tokens.weight"])
    form = repository.store.forms([tensor.block(0)])[tensor.block(0)][0]
    assert len(form.places) > 1
    plan = repository.plan(repository.recipe(["expert"]))
    assert plan.plan.raw_bytes == sum(t.numel() * 2 for t in base_tensors().values())


def test_a_tied_head_does_not_keep_an_expert_from_its_base(
    repository: Repository, tmp_path: Path
) -> None:
    embedding = torch.randn(20, 4, generator=generator("embedding"))
    (tmp_path / "base").mkdir()
    (tmp_path / "expert").mkdir()
    save_file({"model.embed_tokens.weight": embedding}, tmp_path / "base" / "model.safetensors")
    moved = embedding + 0.01
    tensors = {"model.embed_tokens.weight": moved, "lm_head.weight": moved}
    torch.save(tensors, tmp_path / "expert" / "pytorch_model.bin")
    repository.add(tmp_path / "base")
    report = repository.add(tmp_path / "expert")
    assert report.base_ref == "base"
    assert set(repository.manifest("expert").tensors) == {"model.embed_tokens.weight"}


@pytest.mark.parametrize("threads", [1, 4])
def test_tensors_of_many_blocks_that_lie_otherwise_in_memory(threads: int, tmp_path: Path) -> None:
    tensors = {
        "columns": torch.randn(900, 1500, generator=generator("columns")).t(),
        "long": torch.arange(BLOCK_ELEMENTS + 3).expand(2, BLOCK_ELEMENTS + 3),
        "plain": torch.randn(2 * BLOCK_ELEMENTS + 1, generator=generator("plain")),
    }
    (tmp_path / "model").mkdir()
    torch.save(tensors, tmp_path / "model" / "pytorch_model.bin")
    with Repository.init(tmp_path / "repository", threads=threads) as repository:
        repository.add(tmp_path / "model")
        read = repository.load("model")
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())


def test_what_is_refused_leaves_no_branch(repository: Repository, legacy: Path) -> None:
    (legacy / SECOND).write_bytes((legacy / SECOND).read_bytes()[:-100])
    with pytest.raises(BadCheckpoint, match=f"{SECOND} is truncated"):
        repository.add(legacy)
    assert repository.branches() == {}


def test_a_shard_that_changes_while_it_is_added_is_named(
    repository: Repository, legacy: Path
) -> None:
    def touch(_what: str, _done: int, _total: int) -> None:
        os.utime(legacy / SECOND)

    with pytest.raises(BadCheckpoint, match=f"{SECOND} changed while it was read"):
        repository.add(legacy, progress=touch)
    assert repository.branches() == {}


def swapped(path: Path) -> None:
    shutil.copy(path / FIRST, path / "pytorch_model.bin")


def unindexed(path: Path) -> None:
    (path / INDEX).unlink()


@pytest.mark.parametrize(("change", "shards"), [(swapped, 1), (unindexed, 2)])
def test_which_files_are_the_model(
    change: Callable[[Path], None], shards: int, repository: Repository, legacy: Path
) -> None:
    change(legacy)
    repository.add(legacy)
    assert len(repository.manifest("legacy").shards) == shards
