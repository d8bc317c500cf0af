"""Small things to store, and shorthands for storing them."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from mergegit.encoding import hash_block
from mergegit.objects import BlockId, Commit, CommitId, ManifestId
from mergegit.storage.pack import Header, Kind, PackWriter, checksum
from mergegit.storage.refs import RefUpdate, Space
from mergegit.storage.store import Store
from mergegit.storage.transaction import Transaction

Record = tuple[Header, bytes]

needs_open_files = pytest.mark.skipif(
    not Path("/proc/self/fd").is_dir(), reason="the system does not list open files"
)


def some_bytes(seed: int, length: int = 1024) -> bytes:
    """Bytes that do not compress."""
    return random.Random(seed).randbytes(length)


def an_id(number: int) -> bytes:
    return number.to_bytes(32, "big")


def record(
    number: int, payload: bytes = b"payload", kind: Kind = Kind.OBJECT, **fields: object
) -> Record:
    """A record of a pack whose key is made from a number."""
    header = Header(kind, an_id(number), len(payload), len(payload), checksum=checksum(payload))
    return replace(header, **fields), payload  # type: ignore[arg-type]


def write_pack(directory: Path, *records: Record) -> tuple[Path, list[int]]:
    """Write a pack under its name; returns its path and the offsets of the payloads."""
    writer = PackWriter(directory / "unfinished")
    offsets = [writer.append(header, payload) for header, payload in records]
    name = writer.finish()
    return writer.path.rename(directory / f"{name}.pack"), offsets


def flip(path: Path, offset: int) -> None:
    """Turn over all bits of one byte of a file, read-only or not; twice is as before."""
    mode = path.stat().st_mode
    path.chmod(0o644)
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0xFF]))
    path.chmod(mode)


def put(
    store: Store,
    transaction: Transaction,
    data: bytes,
    dtype: str = "BF16",
    base: bytes | None = None,
) -> BlockId:
    """Write a block, against the bytes of a base block where there are some; returns its id."""
    base_id = hash_block(base) if base is not None else None
    block = hash_block(data)
    transaction.write_block(store.prepare_block(block, dtype, data, base_id, base))
    return block


def publish_blocks(store: Store, *blocks: bytes) -> list[BlockId]:
    """Store blocks in a transaction of their own."""
    with store.transaction() as transaction:
        ids = [put(store, transaction, data) for data in blocks]
        transaction.publish()
    return ids


def commit(message: str = "a commit", **fields: object) -> Commit:
    return Commit(ManifestId(bytes(32)), (), "Ada", 1, message, **fields)  # type: ignore[arg-type]


def move(
    name: str,
    old: bytes | None,
    new: bytes | None,
    *,
    space: Space = "heads",
    author: str = "Ada <ada@example.org>",
    time: int = 1_700_000_000,
    reason: str = "test",
) -> RefUpdate:
    """An update of a ref."""
    return RefUpdate(
        space,
        name,
        None if old is None else CommitId(old),
        None if new is None else CommitId(new),
        author,
        time,
        reason,
    )
