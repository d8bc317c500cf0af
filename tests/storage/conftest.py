"""Fixtures of the storage tests: an empty repository's location, and its open store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from mergegit.storage.location import Location, create
from mergegit.storage.store import Store


@pytest.fixture
def location(tmp_path: Path) -> Location:
    return create(tmp_path / "repository")[0]


@pytest.fixture
def store(location: Location) -> Iterator[Store]:
    with closing(Store(location)) as store:
        yield store
