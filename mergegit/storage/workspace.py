"""A command's temporary directory inside the repository, and the removal of dead ones.

Beside each directory stands a lock file that its process holds. The kernel frees the lock when
the process dies, however it dies, so that whoever can take the lock may remove the directory.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from pathlib import Path

from mergegit.storage.location import Location


class Workspace:
    """A directory for one command's unpublished files."""

    def __init__(self, location: Location) -> None:
        sweep(location)
        while True:
            self.path = location.temporary / f"{os.getpid()}-{secrets.token_hex(4)}"
            self._lock_path = _lock_path(self.path)
            self._fd = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            if _is_open_file(self._lock_path, self._fd):
                break
            os.close(self._fd)
        try:
            self.path.mkdir()
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        try:
            shutil.rmtree(self.path, ignore_errors=True)
            self._lock_path.unlink(missing_ok=True)
        finally:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1


def sweep(location: Location) -> None:
    """Remove the workspaces of processes that are gone."""
    for lock_path in location.temporary.glob("*.lock"):
        try:
            fd = os.open(lock_path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        else:
            shutil.rmtree(lock_path.with_suffix(""), ignore_errors=True)
            lock_path.unlink(missing_ok=True)
        finally:
            os.close(fd)


def live_processes(location: Location) -> list[int]:
    """The processes that hold workspaces."""
    found = []
    for lock_path in sorted(location.temporary.glob("[0-9]*-*.lock")):
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
