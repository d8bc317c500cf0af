"""Packs of which little is needed any more: what is needed is copied, and the pack is dropped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from mergegit.errors import Damaged
from mergegit.storage.catalog import place_of
from mergegit.storage.pack import Header, scan
from mergegit.storage.store import Store
from mergegit.storage.transaction import Transaction

_WORTH: Final = 4
"""A pack is rewritten when at least one in so many of its bytes is no longer needed."""


def is_worth_rewriting(dead: int, length: int) -> bool:
    """Whether to rewrite a pack of ``length`` bytes of which ``dead`` are not needed."""
    return dead * _WORTH >= length


def records_of(store: Store, number: int) -> list[tuple[Header, int]]:
    """The records of a pack that the catalog knows, with the offsets of their payloads.

    Raises ``Damaged``.
    """
    file = store.catalog.pack(number)
    assert file is not None
    path = store.location.packs / f"{file.name}.pack"
    try:
        return list(scan(path))
    except FileNotFoundError as error:
        raise Damaged(
            f"pack {file.name} is missing from {store.location.packs}",
            hint="run `mergegit fsck` to see which commits are affected",
        ) from error


def copy_records(
    store: Store,
    transaction: Transaction,
    number: int,
    records: list[tuple[Header, int]],
    is_needed: Callable[[Header, int], bool],
) -> Iterator[int]:
    """Copy the needed ones of a pack's records into new packs; yields the length of each.

    Payloads are checked on the way. Raises ``Damaged``.
    """
    for header, offset in records:
        if is_needed(header, offset):
            payload = store.reader.read_stored(place_of(header, number, offset))
            transaction.copy_record(header, payload)
            yield header.length
