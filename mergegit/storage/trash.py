"""The trash: packs that nothing needs any more, until their grace period is over.

A pack's time of change is when it came here. Readers that hold an old place find the pack here;
a person who wants it back moves the file to ``packs/`` and makes the catalog anew.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from mergegit.storage.location import Location, sync_directory


class Trash:
    """The trash of one repository."""

    def __init__(self, location: Location) -> None:
        self._location = location

    def names(self) -> list[str]:
        """The packs in it, by name."""
        return sorted(path.stem for path in self._location.trash.glob("*.pack"))

    def put(self, names: Iterable[str], now: float) -> None:
        """Move packs here, durably.

        A pack's time is set before it is moved: what a crash leaves here is never taken for older
        than it is.
        """
        wanted = list(names)
        if not wanted:
            return
        if not self._location.trash.exists():
            self._location.trash.mkdir()
            sync_directory(self._location.root)
        for name in wanted:
            path = _in(self._location.packs, name)
            _set_time(path, _ns(now))
            os.rename(path, _in(self._location.trash, name))
        sync_directory(self._location.trash)
        sync_directory(self._location.packs)

    def put_back(self, names: Iterable[str]) -> None:
        """Move packs to where they came from, durably."""
        wanted = list(names)
        for name in wanted:
            os.rename(_in(self._location.trash, name), _in(self._location.packs, name))
        if wanted:
            sync_directory(self._location.packs)
            sync_directory(self._location.trash)

    def older_than(self, seconds: float, now: float) -> list[str]:
        """The packs that came here at least so long ago; with 0, all."""
        if seconds <= 0:
            return self.names()
        limit = _ns(now - seconds)
        trash = self._location.trash
        return [n for n in self.names() if _in(trash, n).stat().st_mtime_ns <= limit]

    def remove(self, names: Iterable[str]) -> None:
        """Remove packs for good."""
        for name in names:
            _in(self._location.trash, name).unlink(missing_ok=True)


def _in(directory: Path, name: str) -> Path:
    return directory / f"{name}.pack"


def _set_time(path: Path, ns: int) -> None:
    """Set a file's time of change, durably."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.utime(fd, ns=(ns, ns))
        os.fsync(fd)
    finally:
        os.close(fd)


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
