"""Fixtures that all tests share: small families of real checkpoints, and a repository."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from mergegit import Repository
from tests.families import Family, make_family, make_tiny_family

# Kernels are compiled when they are first called, and machines are busy: time proves nothing here.
settings.register_profile("mergegit", deadline=None)
settings.load_profile("mergegit")


@pytest.fixture(scope="session")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    """A base and three bf16 experts, sharded, with every kind of file beside the weights."""
    return make_family(tmp_path_factory.mktemp("family"))


@pytest.fixture(scope="session")
def tiny_family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    """A base and three experts of a few hundred weights each."""
    return make_tiny_family(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[Repository]:
    """An empty repository."""
    with Repository.init(tmp_path / "repository", author="Ada <ada@example.org>") as repository:
        yield repository


@pytest.fixture
def loaded(repository: Repository, family: Family) -> Repository:
    """A repository with the family in it: branches base, math, code and prose."""
    repository.add(family.base)
    for expert in family.experts:
        repository.add(expert)
    return repository
