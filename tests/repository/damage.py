"""Ways to damage a repository, and to look at what is in its packs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mergegit import Repository
from mergegit.encoding import decode
from mergegit.storage.pack import Header, Kind, scan
from mergegit.storage.reader import decompress


@dataclass(frozen=True, slots=True)
class Record:
    """A record of a pack: where its payload lies, and what it is called in these tests."""

    pack: Path
    header: Header
    offset: int
    word: str


def records(repository: Repository) -> Iterator[Record]:
    """Every record of every pack: commits, manifests, tensors, plans, statistics, raw blocks, and
    the layers of deltas."""
    for pack in sorted(repository.store.location.packs.glob("*.pack")):
        for header, offset in scan(pack):
            yield Record(pack, header, offset, _word(pack, header, offset))


def records_of(repository: Repository, word: str) -> list[Record]:
    return [record for record in records(repository) if record.word == word]


def _word(pack: Path, header: Header, offset: int) -> str:
    if header.kind is Kind.STATISTICS:
        return "statistics"
    if header.kind is Kind.SEGMENT:
        return "raw" if header.layers == 1 else f"layer {header.layer}"
    data = pack.read_bytes()[offset : offset + header.length]
    if header.compression:
        data = decompress(data, header.size, pack.stem)
    return type(decode(data)).__name__.lower()


def flip(path: Path, offset: int) -> None:
    """Change one bit of a file that is read-only."""
    mode = path.stat().st_mode
    os.chmod(path, 0o644)
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))
    os.chmod(path, mode)
