"""What a disk holds after a power cut.

Between a call that changes a file and the next successful sync of that file, the change may reach
the disk or not, sector by sector; between a call that changes a directory and the next sync of that
directory, the same holds for names. A ``Disk`` follows the calls of a process, as the log of the
layer below it has them, and writes down what could be left.

A rename is atomic and durable when the directory of its new name is synced. Nothing else orders
changes: that is less than any file system promises.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.faults.shim import CREATED, DURABLE, EMPTIED, Call, Operation

SECTOR: Final = 512


@dataclass(slots=True, eq=False)
class _Directory:
    """A directory: its names at the start, and as the running process sees them."""

    start: dict[str, _Entry] = field(default_factory=dict)
    names: dict[str, _Entry] = field(default_factory=dict)


@dataclass(slots=True)
class _Write:
    """Data at an offset, or, where it is None, a new length. ``is_durable`` when it is synced."""

    offset: int
    data: bytes | None
    is_durable: bool = False


@dataclass(slots=True, eq=False)
class _File:
    """A file: what is on the disk for sure, and what was done since."""

    synced: bytes = b""
    pending: list[_Write] = field(default_factory=list)

    def sync(self) -> None:
        self.synced = self.content(_all)
        self.pending = []

    def content(self, keep: Keep) -> bytes:
        """The synced bytes with those of the later changes that are kept, sector by sector."""
        data = bytearray(self.synced)
        for change in self.pending:
            if change.data is None:
                if keep():
                    _resize(data, change.offset)
                continue
            for at, part in _sectors(change.offset, change.data):
                if change.is_durable or keep():
                    _resize(data, max(len(data), at + len(part)))
                    data[at : at + len(part)] = part
        return bytes(data)


_Entry = _Directory | _File
Keep = Callable[[], bool]
"""Whether one change that was not synced is on the disk."""


@dataclass(slots=True)
class _Naming:
    """A change of a directory: a name comes, goes, or, with both, moves."""

    entry: _Entry
    gone: tuple[_Directory, str] | None
    come: tuple[_Directory, str] | None
    is_durable: bool = False

    @property
    def directory(self) -> _Directory:
        """Whose sync makes it durable."""
        place = self.come or self.gone
        assert place is not None
        return place[0]


@dataclass(frozen=True, slots=True)
class Cut:
    """Which changes that were not synced are on the disk: of names, and of files."""

    word: str
    names: Keep
    sectors: Keep


def _all() -> bool:
    return True


def _none() -> bool:
    return False


EVERYTHING: Final = Cut("everything", _all, _all)
"""No cut at all: a process that was killed leaves that."""
LOST: Final = Cut("lost", _none, _none)
HOLLOW: Final = Cut("hollow", _all, _none)
"""Names without what was in the files."""
NAMELESS: Final = Cut("nameless", _none, _all)


def torn(seed: int) -> Cut:
    """Some changes and not others, by chance; how many, by chance, too."""
    draw = random.Random(seed)
    names, sectors = draw.choice((0.1, 0.5, 0.9)), draw.choice((0.1, 0.5, 0.9))
    return Cut(f"torn {seed}", lambda: draw.random() < names, lambda: draw.random() < sectors)


class Disk:
    """A directory that calls change, from how it stands when this is made."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._numbers: dict[int, _File] = {}
        self._namings: list[_Naming] = []
        self._top = self._scan(root)

    def _scan(self, path: Path) -> _Directory:
        directory = _Directory()
        for entry in os.scandir(path):
            if entry.is_dir():
                directory.start[entry.name] = self._scan(Path(entry.path))
            else:
                file = _File(Path(entry.path).read_bytes())
                directory.start[entry.name] = self._numbers[entry.inode()] = file
        directory.names = dict(directory.start)
        return directory

    # -- following ---------------------------------------------------------------------------------

    def follow(self, calls: Iterable[Call]) -> None:
        """Calls that a process made, in order; those that failed changed nothing."""
        for call in calls:
            if not call.error:
                self._follow(call)

    def _follow(self, call: Call) -> None:
        match call.operation:
            case Operation.OPEN:
                self._opened(call)
            case Operation.WRITE:
                durable = bool(call.flags & DURABLE)
                self._numbers[call.inode].pending.append(_Write(call.offset, call.data, durable))
            case Operation.TRUNCATE:
                self._numbers[call.inode].pending.append(_Write(call.offset, None))
            case Operation.SYNC:
                self._synced(call)
            case Operation.MKDIR:
                self._name(_Directory(), None, self._place(call.path))
            case Operation.UNLINK | Operation.RMDIR:
                place = self._place(call.path)
                self._name(place[0].names[place[1]], place, None)
            case Operation.RENAME:
                old = self._place(call.path)
                self._name(old[0].names[old[1]], old, self._place(call.other))
            case Operation.CHANGE | Operation.LOCK:
                pass
            case _:
                raise NotImplementedError(call.operation.name)

    def _opened(self, call: Call) -> None:
        if call.flags & CREATED:
            file = self._numbers[call.inode] = _File()
            self._name(file, None, self._place(call.path))
        elif call.flags & EMPTIED:
            self._numbers[call.inode].pending.append(_Write(0, None))

    def _synced(self, call: Call) -> None:
        entry = self._entry(call.path)
        if isinstance(entry, _Directory):
            for naming in self._namings:
                naming.is_durable |= naming.directory is entry
        else:
            self._numbers[call.inode].sync()

    def _name(
        self,
        entry: _Entry,
        gone: tuple[_Directory, str] | None,
        come: tuple[_Directory, str] | None,
    ) -> None:
        if gone is not None:
            del gone[0].names[gone[1]]
        if come is not None:
            come[0].names[come[1]] = entry
        self._namings.append(_Naming(entry, gone, come))

    def _place(self, path: str) -> tuple[_Directory, str]:
        parent = self._entry(os.path.dirname(path))
        assert isinstance(parent, _Directory), path
        return parent, os.path.basename(path)

    def _entry(self, path: str) -> _Entry | None:
        entry: _Entry | None = self._top
        for name in Path(os.path.normpath(path)).relative_to(self._root).parts:
            entry = entry.names.get(name) if isinstance(entry, _Directory) else None
        return entry

    # -- what is left ------------------------------------------------------------------------------

    def write(self, target: Path, cut: Cut) -> None:
        """Write into a new directory what is on the disk after a cut."""
        _write(self._top, self._names_after(cut), target, cut)

    def _names_after(self, cut: Cut) -> dict[_Directory, dict[str, _Entry]]:
        left: dict[_Directory, dict[str, _Entry]] = {}
        where: dict[_Entry, tuple[_Directory, str]] = {}
        for directory in self._directories():
            left[directory] = dict(directory.start)
            where.update((entry, (directory, name)) for name, entry in directory.start.items())
        for naming in self._namings:
            if not (naming.is_durable or cut.names()):
                continue
            at = where.pop(naming.entry, None)
            if at is not None and left[at[0]].get(at[1]) is naming.entry:
                del left[at[0]][at[1]]
            if naming.come is not None:
                directory, name = where[naming.entry] = naming.come
                left[directory][name] = naming.entry
        return left

    def _directories(self) -> set[_Directory]:
        found = {self._top}
        pending: list[_Entry] = [*self._top.start.values(), *(n.entry for n in self._namings)]
        while pending:
            entry = pending.pop()
            if isinstance(entry, _Directory) and entry not in found:
                found.add(entry)
                pending += entry.start.values()
        return found


def _write(
    directory: _Directory, left: dict[_Directory, dict[str, _Entry]], path: Path, cut: Cut
) -> None:
    path.mkdir()
    for name, entry in left[directory].items():
        if isinstance(entry, _Directory):
            _write(entry, left, path / name, cut)
        else:
            (path / name).write_bytes(entry.content(cut.sectors))


def _sectors(offset: int, data: bytes) -> Iterable[tuple[int, bytes]]:
    """Parts of a write, each inside one sector."""
    at = 0
    while at < len(data):
        size = min(SECTOR - (offset + at) % SECTOR, len(data) - at)
        yield offset + at, data[at : at + size]
        at += size


def _resize(data: bytearray, length: int) -> None:
    if length < len(data):
        del data[length:]
    else:
        data.extend(bytes(length - len(data)))
