"""A command's temporary directory inside the repository, and the removal of dead ones.

Beside each directory stands a lock file that its process holds. The kernel frees the lock when
the process dies, however it dies, so that whoever can take the lock may remove the directory. The
lock file is there first and goes last: a directory without one is dead, too.

Nothing here is worth failing for when it is removed: what stays is removed by the next command.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Final

from mergegit.storage.location import Location

_NAME: Final = "[0-9]*-" + "[0-9a-f]" * 8
"""What workspaces are called: the process, and eight digits by chance."""


class Workspace:
    """A directory for one command's unpublished files."""

    def __init__(self, location: Location) -> None:
        sweep(location)
        while True:
            self.path = location.temporary / f"{os.getpid()}-{secrets.token_hex(4)}"
            self._lock_path = _lock_path(self.path)
            self._fd = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX)
                if _is_open_file(self._lock_path, self._fd):
                    self.path.mkdir()
                    return
            except BaseException:
                self.remove()
                raise
            os.close(self._fd)

    def remove(self) -> None:
        if self._fd < 0:
            return
        try:
            _remove(self.path)
        finally:
            os.close(self._fd)
            self._fd = -1


def sweep(location: Location) -> None:
    """Remove the workspaces of processes that are gone."""
    directories = [path for path in location.temporary.glob(_NAME) if path.is_dir()]
    for path in directories:
        if not _lock_path(path).exists():  # a power cut, or a disk that failed, took its lock
            _remove(path)
    for lock_path in location.temporary.glob("*.lock"):
        try:
            fd = os.open(lock_path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue
        else:
            _remove(lock_path.with_suffix(""))
        finally:
            os.close(fd)


def _remove(path: Path) -> None:
    """Remove a workspace, and then its lock."""
    shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):
        _lock_path(path).unlink()


def live_processes(location: Location) -> list[int]:
    """The processes that hold workspaces."""
    found = []
    for lock_path in sorted(location.temporary.glob(f"{_NAME}.lock")):
        try:
            fd = os.open(lock_path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            found.append(int(lock_path.name.partition("-")[0]))
        finally:
            os.close(fd)
    return found


def _lock_path(path: Path) -> Path:
    return path.with_name(path.name + ".lock")


def _is_open_file(path: Path, fd: int) -> bool:
    """Whether ``path`` still names the open file: another process may have swept it away."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(fd))
    except FileNotFoundError:
        return False
