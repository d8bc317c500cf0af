"""Repositories that are made once and copied for each test."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mergegit import Repository
from mergegit.storage.reader import PackReader
from tests.adapters import Tensors, model_tensors, save_adapter, tuned_tensors
from tests.families import EXPERTS, Family, save_checkpoint
from tests.repository.lineages import ReadPlaces, make_lineages

AUTHOR = "Ada <ada@example.org>"


@pytest.fixture(scope="session")
def tiny_template(tmp_path_factory: pytest.TempPathFactory, tiny_family: Family) -> Path:
    path = tmp_path_factory.mktemp("template") / "repository"
    with Repository.init(path, author=AUTHOR) as repository:
        for checkpoint in (tiny_family.base, *tiny_family.experts):
            repository.add(checkpoint)
    return path


@pytest.fixture(scope="session")
def merged_template(
    tmp_path_factory: pytest.TempPathFactory, tiny_template: Path, tiny_family: Family
) -> Path:
    path = tmp_path_factory.mktemp("template") / "repository"
    shutil.copytree(tiny_template, path)
    with Repository.open(path, author=AUTHOR) as repository:
        repository.add(tiny_family.experts[2], name=EXPERTS[0])
        recipe = repository.recipe(EXPERTS[:2])
        repository.merge(repository.plan(recipe), branch="merged")
    return path


@pytest.fixture
def tiny(tiny_template: Path, tmp_path: Path) -> Iterator[Repository]:
    """A repository with the tiny family in it: branches base, math, code and prose."""
    shutil.copytree(tiny_template, tmp_path / "tiny")
    with Repository.open(tmp_path / "tiny", author=AUTHOR) as repository:
        yield repository


@pytest.fixture
def merged(merged_template: Path, tmp_path: Path) -> Iterator[Repository]:
    """The tiny family; math has two versions, and the branch merged joins it with code."""
    shutil.copytree(merged_template, tmp_path / "tiny-merged")
    with Repository.open(tmp_path / "tiny-merged", author=AUTHOR) as repository:
        yield repository


@pytest.fixture(scope="session")
def base() -> Tensors:
    """What the base of the adapters holds."""
    return model_tensors()


@pytest.fixture(scope="session")
def adapters(tmp_path_factory: pytest.TempPathFactory, base: Tensors) -> Path:
    """Directories: ``base``, its fine-tune ``math``, and adapters of the base of every kind."""
    root = tmp_path_factory.mktemp("adapters")
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    save_checkpoint(root / "base", base)
    save_checkpoint(root / "math", tuned_tensors("math"))
    save_adapter(root / "chat", base, saved=["model.norm.weight"], seed="chat")
    save_adapter(root / "half", base, dtype=torch.bfloat16, rank=8, seed="half")
    save_adapter(root / "dora", base, dora=True, seed="dora")
    save_adapter(root / "stable", base, rslora=True, alpha=4, seed="stable")
    save_adapter(root / "tokens", base, modules=["q_proj", "embed_tokens"], seed="tokens")
    save_adapter(
        root / "whole", base, modules=["q_proj"], saved=[embedding, head],
        saved_dtype=torch.float32, dtype=torch.bfloat16, seed="whole",
    )  # fmt: skip
    return root


ADAPTERS = ("chat", "half", "dora", "stable", "tokens", "whole")


@pytest.fixture(scope="session")
def lora_template(tmp_path_factory: pytest.TempPathFactory, adapters: Path) -> Path:
    path = tmp_path_factory.mktemp("template") / "lora"
    with Repository.init(path, author=AUTHOR) as repository:
        for name in ("base", "math", *ADAPTERS):
            repository.add(adapters / name)
    return path


@pytest.fixture
def lora(lora_template: Path, tmp_path: Path) -> Iterator[Repository]:
    """A repository with base, math, and an adapter of the base of every kind."""
    shutil.copytree(lora_template, tmp_path / "lora")
    with Repository.open(tmp_path / "lora", author=AUTHOR, threads=2) as repository:
        yield repository


@pytest.fixture(scope="session")
def lineages_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_lineages(
        tmp_path_factory.mktemp("lineages") / "repository", tmp_path_factory.mktemp("checkpoints")
    )


@pytest.fixture
def lineages(lineages_path: Path) -> Iterator[Repository]:
    """The family of ``tests.repository.lineages``, to look at and not to change."""
    with Repository.open(lineages_path) as repository:
        yield repository


@pytest.fixture
def read_places(monkeypatch: pytest.MonkeyPatch) -> ReadPlaces:
    """Everything that is read from packs in this test."""
    places = ReadPlaces()
    monkeypatch.setattr(PackReader, "read", places.record(PackReader.read))
    return places
