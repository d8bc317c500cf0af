"""How a merged model's tensors are laid out."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mergegit import Repository
from mergegit.merge.mergekit_yaml import read_documents
from tests.families import generator

WIDTHS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I32": 4}


def save(path: Path, seed: int) -> Path:
    """A model of two layers, with a number among its halves."""
    tensors: dict[str, torch.Tensor] = {
        f"model.layers.{layer}.{name}.weight": torch.randn(
            shape, generator=generator(seed, layer, name)
        ).half()
        for layer in range(2)
        for name, shape in (("proj", (3, 3)), ("norm", (3,)))
    }
    tensors["model.embed_tokens.weight"] = torch.ones(5, 3).half()
    tensors["model.norm.steps"] = torch.tensor([7], dtype=torch.int32)
    path.mkdir()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.fixture
def pair(repository: Repository, tmp_path: Path) -> Repository:
    repository.add(save(tmp_path / "base", 0))
    repository.add(save(tmp_path / "math", 1), base="base")
    return repository


def entries(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header: dict[str, Any] = json.loads(data[8 : 8 + length])
    return {name: entry for name, entry in header.items() if name != "__metadata__"}


def assert_aligned(path: Path) -> None:
    for name, entry in entries(path).items():
        assert entry["data_offsets"][0] % WIDTHS[entry["dtype"]] == 0, name


def test_tensors_stay_aligned_where_their_elements_grow(pair: Repository, tmp_path: Path) -> None:
    report = pair.merge(pair.plan(pair.recipe(["math"], dtype="F64")))
    pair.checkout(report.branch, tmp_path / "out")
    assert_aligned(tmp_path / "out" / "model.safetensors")
    written, kept = load_file(tmp_path / "out" / "model.safetensors"), pair.load(report.branch)
    assert all(torch.equal(written[name], kept[name]) for name in kept)


def test_tensors_of_new_shards_are_aligned(pair: Repository, tmp_path: Path) -> None:
    source = {"sources": [{"model": "math", "layer_range": [0, 1]}]}
    (document,) = read_documents(
        json.dumps({"merge_method": "passthrough", "slices": [source] * 3})
    )
    report = pair.merge(pair.plan(pair.recipe_of(document)))
    pair.checkout(report.branch, tmp_path / "out")
    path = tmp_path / "out" / "model.safetensors"
    assert_aligned(path)
    assert sum(name.endswith("proj.weight") for name in entries(path)) == 3


def test_a_file_may_be_changed_more_than_once(pair: Repository, tmp_path: Path) -> None:
    """Slices change the config, and so does a dtype."""
    path = save(tmp_path / "told", 2)
    (path / "config.json").write_text('{"num_hidden_layers": 2, "torch_dtype": "float16"}')
    pair.add(path, base="base")
    source = {"sources": [{"model": "told", "layer_range": [0, 1]}]}
    asked = {"merge_method": "passthrough", "slices": [source] * 3, "dtype": "float32"}
    (document,) = read_documents(json.dumps(asked))
    report = pair.merge(pair.plan(pair.recipe_of(document)))
    pair.checkout(report.branch, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == {"num_hidden_layers": 3, "torch_dtype": "float32"}
