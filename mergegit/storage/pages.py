"""The pages of the catalog's file: do they still make sound trees?

LMDB believes what it reads, so that damage can lead it astray, or beyond the end of its file. This
looks at the file as bytes, by `pread` alone, and follows every tree of one state of it: each page
is where it says, is reached once, and holds its nodes in order, inside itself; and no page that is
free is in use. The layout is that of LMDB 0.9 on a little-endian machine of 64 bits; files of
another layout pass.
"""

from __future__ import annotations

import os
import struct
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_HEADER: Final = struct.Struct("<QHHHH")  # number, pad, flags, lower, upper
_META: Final = struct.Struct("<IIQQ")  # magic, version, address, size of the map
_TREE: Final = struct.Struct("<IHHQQQQQ")  # pad, flags, depth, pages of 3 kinds, entries, root
_NODE: Final = struct.Struct("<HHHH")  # low and high half of a length or page, flags, key's length
_LAST: Final = struct.Struct("<QQ")  # last page, number of the state
_OVERFLOW: Final = struct.Struct("<QHHI")  # number, pad, flags, pages

_MAGIC: Final = 0xBEEFC0DE
_VERSION: Final = 1
_BRANCH, _LEAF, _OVERFLOWS, _META_PAGE = 1, 2, 4, 8
_BIG, _SUBTREE = 1, 2
_NO_PAGE: Final = (1 << 64) - 1
_METAS: Final = 2
_MAX_DEPTH: Final = 32
_LOOKS: Final = 5
_PAUSE: Final = 0.002
"""How often, and after how many seconds each, what seems wrong is looked at again."""


class Unsound(Exception):
    """A page that is not what the tree above it says."""


@dataclass(frozen=True, slots=True)
class _Tree:
    """What leads to a tree: its root, its height, and how many entries it has."""

    depth: int
    entries: int
    root: int

    @classmethod
    def unpack(cls, data: bytes, offset: int) -> _Tree:
        _, _, depth, _, _, _, entries, root = _TREE.unpack_from(data, offset)
        return cls(depth, entries, root)


@dataclass(frozen=True, slots=True)
class _State:
    """One of the two states that a file remembers."""

    number: int
    last: int
    free: _Tree
    main: _Tree


def check(file: Path, number: int) -> bool:
    """Check the state of a file that has this number, which a reader must hold on to.

    Returns false where that state is gone from the file by now. Raises ``Unsound``.
    """
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if _has_another_layout(fd):
            return True
        size = _page_size(fd)
        states = [_state(_page(fd, place, size), place) for place in range(_METAS)]
        for state in states:
            if state.number == number:
                _Walk(fd, size, state).run()
                return True
        return False
    finally:
        os.close(fd)


def check_beginning(file: Path) -> None:
    """Check what every reader of a file goes by: its two states, and the tree of its tables.

    Others may write meanwhile, and use pages again that were looked at: what is wrong once may be
    right. Raises ``Unsound`` where it stays wrong.
    """
    for left in reversed(range(_LOOKS)):
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if os.fstat(fd).st_size and not _has_another_layout(fd):  # an empty one is a new one
                size = _page_size(fd)
                states = [_state(_page(fd, place, size), place) for place in range(_METAS)]
                _Walk(fd, size, max(states, key=lambda state: state.number)).tables()
            return
        except Unsound:
            if not left:
                raise
            time.sleep(_PAUSE)
        finally:
            os.close(fd)


def _has_another_layout(fd: int) -> bool:
    """Whether a file is of another version of LMDB, which will say whether it can read it."""
    if sys.byteorder != "little" or struct.calcsize("P") != 8:
        return True
    beginning = os.pread(fd, 8, _HEADER.size).ljust(8, b"\0")
    return beginning[:4] == _MAGIC.to_bytes(4, "little") and beginning[4] != _VERSION


def _page_size(fd: int) -> int:
    """The size of pages, which the tree of free pages has in a field that it does not need."""
    data = os.pread(fd, _HEADER.size + _META.size + 4, 0)
    if len(data) < _HEADER.size + _META.size + 4:
        raise Unsound("its file is cut off")
    size: int = struct.unpack_from("<I", data, _HEADER.size + _META.size)[0]
    if not 512 <= size <= 1 << 16 or size & (size - 1):
        raise Unsound(f"pages of {size} bytes")
    return size


def _page(fd: int, number: int, size: int) -> bytes:
    data = os.pread(fd, size, number * size)
    if len(data) < size:
        raise Unsound(f"page {number} is cut off")
    return data


def _state(data: bytes, place: int) -> _State:
    number, _, flags, _, _ = _HEADER.unpack_from(data)
    magic, version, _, _ = _META.unpack_from(data, _HEADER.size)
    if (number, flags, magic, version) != (place, _META_PAGE, _MAGIC, _VERSION):
        raise Unsound(f"page {place} does not begin the file of an index")
    trees = _HEADER.size + _META.size
    last, state = _LAST.unpack_from(data, trees + 2 * _TREE.size)
    free, main = (_Tree.unpack(data, trees + place * _TREE.size) for place in range(2))
    return _State(state, last, free, main)


class _Walk:
    """Every page that one state of a file reaches."""

    def __init__(self, fd: int, size: int, state: _State) -> None:
        self._fd = fd
        self._size = size
        self._state = state
        self._seen: set[int] = set()
        self._free: set[int] = set()
        self._tables: list[_Tree] = []
        self._only_tables = False

    def run(self) -> None:
        self._walk(self._state.free, is_free=True, may_nest=False)
        self._walk(self._state.main, is_free=False, may_nest=True)
        both = self._seen & self._free
        if both:
            raise Unsound(f"page {min(both)} is in use and free")

    def tables(self) -> None:
        """The tree of tables alone; of each table, where it begins."""
        self._only_tables = True
        self._walk(self._state.main, is_free=False, may_nest=True)
        for tree in (self._state.free, *self._tables):
            if tree.root != _NO_PAGE and not _METAS <= tree.root <= self._state.last:
                raise Unsound(f"page {tree.root} of {self._state.last + 1} is named")

    def _walk(self, tree: _Tree, *, is_free: bool, may_nest: bool) -> None:
        if tree.root == _NO_PAGE:
            if tree.entries:
                raise Unsound(f"{tree.entries} entries without a page")
            return
        if not 1 <= tree.depth <= _MAX_DEPTH:
            raise Unsound(f"a tree {tree.depth} pages high")
        entries = 0
        last: bytes | None = None
        pending = [(tree.root, 1)]
        while pending:
            number, depth = pending.pop()
            data, flags, nodes = self._nodes(number)
            if (flags == _LEAF) != (depth == tree.depth):
                raise Unsound(f"page {number} is at the wrong height")
            if flags == _BRANCH:
                children = [self._child(data, at) for at in nodes]
                pending += [(child, depth + 1) for child in reversed(children)]
                continue
            for at in nodes:
                key, value = self._leaf(data, number, at, may_nest)
                order = key[::-1] if is_free else key  # those keys are numbers, lowest byte first
                if last is not None and order <= last:
                    raise Unsound(f"page {number} is out of order")
                last = order
                entries += 1
                if is_free:
                    self._add_free(value, number)
        if entries != tree.entries:
            raise Unsound(f"{entries} entries where {tree.entries} should be")

    def _nodes(self, number: int) -> tuple[bytes, int, list[int]]:
        """A page of a tree, its kind, and where its nodes are."""
        self._reach(number)
        data = _page(self._fd, number, self._size)
        own, _, flags, lower, upper = _HEADER.unpack_from(data)
        if own != number or flags not in (_BRANCH, _LEAF):
            raise Unsound(f"page {number} is not a page of a tree")
        count, odd = divmod(lower - _HEADER.size, 2)
        if count < 1 or odd or not lower <= upper <= self._size:
            raise Unsound(f"page {number} has no sound bounds")
        places = struct.unpack_from(f"<{count}H", data, _HEADER.size)
        if min(places) < upper or max(places) > self._size - _NODE.size:
            raise Unsound(f"page {number} has nodes outside of itself")
        return data, flags, list(places)

    def _reach(self, number: int) -> None:
        if not _METAS <= number <= self._state.last:
            raise Unsound(f"page {number} of {self._state.last + 1} is named")
        if number in self._seen:
            raise Unsound(f"page {number} is named twice")
        self._seen.add(number)

    @staticmethod
    def _child(data: bytes, at: int) -> int:
        low, high, top, _ = _NODE.unpack_from(data, at)
        number: int = low | high << 16 | top << 32
        return number

    def _leaf(self, data: bytes, number: int, at: int, may_nest: bool) -> tuple[bytes, bytes]:
        """The key and the value of a node; a tree in it is walked."""
        low, high, flags, key_size = _NODE.unpack_from(data, at)
        size = low | high << 16
        start = at + _NODE.size + key_size
        stored = 8 if flags & _BIG else size
        if start + stored > self._size:
            raise Unsound(f"page {number} has a node that is longer than itself")
        key, value = data[at + _NODE.size : start], data[start : start + stored]
        if flags & _SUBTREE:
            if not may_nest or flags & _BIG or size != _TREE.size:
                raise Unsound(f"page {number} has a tree where none may be")
            table = _Tree.unpack(value, 0)
            self._tables.append(table)
            if not self._only_tables:
                self._walk(table, is_free=False, may_nest=False)
        elif flags & _BIG:
            value = self._big(struct.unpack("<Q", value)[0], size)
        elif flags:
            raise Unsound(f"page {number} has a node of an unknown kind")
        return key, value

    def _big(self, number: int, size: int) -> bytes:
        """A value that has pages of its own."""
        self._reach(number)
        own, _, flags, count = _OVERFLOW.unpack_from(_page(self._fd, number, self._size))
        if own != number or flags != _OVERFLOWS or count * self._size < _OVERFLOW.size + size:
            raise Unsound(f"page {number} does not begin a long value")
        if number + count - 1 > self._state.last:
            raise Unsound(f"page {number} begins a value beyond the last page")
        for other in range(number + 1, number + count):
            self._reach(other)
        return os.pread(self._fd, size, number * self._size + _OVERFLOW.size)

    def _add_free(self, value: bytes, number: int) -> None:
        """A list of free pages: how many, and their numbers."""
        count = struct.unpack_from("<Q", value)[0] if len(value) >= 8 else 0
        if len(value) != 8 * (count + 1):
            raise Unsound(f"page {number} has a list of free pages of the wrong length")
        pages = struct.unpack_from(f"<{count}Q", value, 8)
        if pages and not _METAS <= min(pages) <= max(pages) <= self._state.last:
            raise Unsound(f"page {number} lists free pages that there are not")
        if len(set(pages)) != count or self._free.intersection(pages):
            raise Unsound(f"page {number} lists a free page twice")
        self._free.update(pages)
