"""The trash: where packs stay until their grace period is over."""

from __future__ import annotations

import pytest

from mergegit.storage.location import Location
from mergegit.storage.trash import Trash
from tests.storage.samples import record, write_pack

NOW = 1_700_000_000.0


@pytest.fixture
def trash(location: Location) -> Trash:
    return Trash(location)


def new_pack(location: Location, number: int) -> str:
    return write_pack(location.packs, record(number))[0].stem


def test_there_is_none_at_first(trash: Trash) -> None:
    assert trash.names() == trash.older_than(0, NOW) == []


def test_a_pack_goes_there_and_comes_back(trash: Trash, location: Location) -> None:
    name = new_pack(location, 1)
    data = (location.packs / f"{name}.pack").read_bytes()
    trash.put([name], NOW)
    assert trash.names() == [name]
    assert list(location.packs.iterdir()) == []
    trash.put_back([name])
    assert trash.names() == []
    assert (location.packs / f"{name}.pack").read_bytes() == data


def test_a_pack_is_as_old_as_its_time_there(trash: Trash, location: Location) -> None:
    first, second = new_pack(location, 1), new_pack(location, 2)
    trash.put([first], NOW)
    trash.put([second], NOW + 50)
    assert trash.older_than(100, NOW + 99) == []
    assert trash.older_than(100, NOW + 100) == [first]
    assert trash.older_than(100, NOW + 150) == sorted([first, second])


def test_without_grace_all_are_old_enough_whatever_the_clock_says(
    trash: Trash, location: Location
) -> None:
    name = new_pack(location, 1)
    trash.put([name], NOW + 1000)
    assert trash.older_than(0, NOW) == [name]


def test_what_came_again_is_there_once_and_new(trash: Trash, location: Location) -> None:
    name = new_pack(location, 1)
    trash.put([name], NOW)
    new_pack(location, 1)
    trash.put([name], NOW + 100)
    assert trash.names() == [name]
    assert trash.older_than(50, NOW + 100) == []


def test_what_is_removed_is_gone(trash: Trash, location: Location) -> None:
    name = new_pack(location, 1)
    trash.put([name], NOW)
    trash.remove([name])
    trash.remove([name])
    assert list(location.trash.iterdir()) == []
