"""LMDB's environments: open once in a process, made whole or not at all, one opening at a time."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import lmdb

from mergegit.storage import pages

MAP_BYTES: Final = 1 << 40
"""Address space reserved once. The file grows with its contents alone."""


class Environments:
    """The LMDB environments that this process has open, each with its number of users.

    LMDB allows an environment to be open once in a process; repositories may be open any number
    of times. What a fork inherits does not count: a child opens its own.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[tuple[int, str], tuple[lmdb.Environment, int]] = {}

    def open(self, path: Path, read_only: bool) -> lmdb.Environment:
        with self._lock:
            key = (os.getpid(), os.path.realpath(path))
            known = self._open.get(key)
            if known is None:
                known = _open(path, read_only), 0
            self._open[key] = known[0], known[1] + 1
            return known[0]

    def close(self, path: Path) -> None:
        with self._lock:
            key = (os.getpid(), os.path.realpath(path))
            known = self._open.pop(key, None)
            if known is None:
                return
            if known[1] > 1:
                self._open[key] = known[0], known[1] - 1
            else:
                known[0].close()


environments = Environments()
"""Those of this process."""


def _open(path: Path, read_only: bool) -> lmdb.Environment:
    """Open an environment, which is made if it is not there, one process at a time.

    The first process that opens an environment sets up what all share, which others wait for in
    ``lmdb.open``. If it dies meanwhile they go on with what is not set up, and the next to write
    takes an older state for the newest. So they wait here. Raises ``pages.Unsound`` where LMDB
    would go astray.
    """
    if not read_only and not path.exists():
        path.mkdir(parents=True, exist_ok=True)
    with _opening(path):
        if not read_only:
            _create(path)
        with suppress(FileNotFoundError, NotADirectoryError):  # LMDB says so
            pages.check_beginning(path / "data.mdb")
        return lmdb.open(
            os.fspath(path),
            map_size=MAP_BYTES,
            max_dbs=8,
            max_readers=512,
            readonly=read_only,
            create=not read_only,
            lock=True,
        )


@contextmanager
def _opening(path: Path) -> Iterator[None]:
    """Holds the lock of a directory, if it is one; the kernel frees it when its holder dies."""
    if not path.is_dir():
        yield  # LMDB says what is wrong
        return
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _create(path: Path) -> None:
    """Make an empty environment, if there is none, so that it is there whole or not at all.

    LMDB writes the beginning of its file in place, and would not know it again if that was cut.
    """
    file, fresh = path / "data.mdb", path / "data.mdb.new"
    if file.exists() or not path.is_dir():
        return
    fresh.unlink(missing_ok=True)
    lmdb.open(os.fspath(fresh), subdir=False, lock=False).close()
    _sync_file(fresh)
    os.rename(fresh, file)


def _sync_file(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
