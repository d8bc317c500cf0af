"""The lease: writers share it, and whoever takes packs away has it alone.

A lock of one file, ``lease``. A writer holds it shared from before it looks up what is stored until
its ref has moved, so that nothing goes away that it found there. `gc` and `repack` hold it
exclusively. Writers do not wait for one another, and readers take no part. The kernel frees a lock
when its holder dies.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from mergegit.errors import Busy
from mergegit.storage.location import Location
from mergegit.storage.workspace import live_processes

_PATIENCE: Final = 1.0
"""Seconds for which an exclusive holder waits for short commands, such as a move of a ref."""
_PAUSE: Final = 0.02
_NOT_WRITABLE: Final = (errno.EACCES, errno.EPERM, errno.EROFS)


class Lease:
    """One repository's lease, as one open store takes it."""

    def __init__(self, location: Location) -> None:
        self._location = location
        self._owner: int | None = None
        """The thread that holds it exclusively: that thread may write as well."""

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Holds the lease with other writers. Waits while a `gc` or `repack` runs.

        Where the repository can't be written to there is nothing to hold, and nothing to fear.
        """
        if self._owner == threading.get_ident():
            yield
            return
        fd = self._open()
        if fd is None:
            yield
            return
        try:
            fcntl.flock(fd, fcntl.LOCK_SH)
            yield
        finally:
            os.close(fd)

    @contextmanager
    def exclusive(self, *, wait: bool = False) -> Iterator[None]:
        """Holds the lease alone. Raises ``Busy`` where a writer runs, or waits for its end.

        Never queues: a writer that starts meanwhile goes first.
        """
        fd = os.open(self._location.lease_file, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            self._lock_alone(fd, None if wait else time.monotonic() + _PATIENCE)
            self._owner = threading.get_ident()
            yield
        finally:
            self._owner = None
            os.close(fd)

    def _lock_alone(self, fd: int, deadline: float | None) -> None:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                if deadline is not None and time.monotonic() > deadline:
                    raise self._busy() from error
                time.sleep(_PAUSE)
            else:
                return

    def _busy(self) -> Busy:
        processes = ", ".join(map(str, live_processes(self._location)))
        where = f" (process {processes})" if processes else ""
        return Busy(
            f"another command is at work in {self._location.root}{where}",
            hint="run this again when that has ended",
        )

    def _open(self) -> int | None:
        try:
            flags = os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC
            return os.open(self._location.lease_file, flags, 0o644)
        except OSError as error:
            if error.errno in _NOT_WRITABLE and not os.access(self._location.root, os.W_OK):
                return None
            raise
