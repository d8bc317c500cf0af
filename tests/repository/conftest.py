"""Repositories that are made once and copied for each test."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from mergegit import Repository
from tests.families import EXPERTS, Family

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
