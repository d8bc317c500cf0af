"""Where a repository lies: its directories, its format version, and whether the place will do."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mergegit.encoding import FORMAT_VERSION
from mergegit.errors import NoSpace, NotARepository, Unconfirmed, UnusableRepository

DIRECTORY: Final = ".mergegit"

_NETWORK_FILE_SYSTEMS: Final = frozenset(
    {
        *("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "davfs"),
        *("glusterfs", "lustre", "beegfs", "gpfs"),
        *("fuse.sshfs", "fuse.s3fs", "fuse.gcsfuse", "fuse.rclone", "fuse.glusterfs"),
        *("fuse.ceph", "fuse.davfs2"),
    }
)


@dataclass(frozen=True, slots=True)
class Location:
    """The paths inside one ``.mergegit`` directory."""

    root: Path

    @property
    def version_file(self) -> Path:
        return self.root / "format"

    @property
    def packs(self) -> Path:
        return self.root / "packs"

    @property
    def trash(self) -> Path:
        return self.root / "trash"

    @property
    def refs(self) -> Path:
        return self.root / "refs"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def catalog(self) -> Path:
        return self.root / "catalog"

    @property
    def temporary(self) -> Path:
        return self.root / "tmp"

    @property
    def lock_file(self) -> Path:
        return self.root / "lock"

    @property
    def lease_file(self) -> Path:
        return self.root / "lease"


def create(directory: Path) -> tuple[Location, bool]:
    """Make an empty repository in ``directory``, or find the one that is there.

    The version file is written last: a directory without one is not a repository, and making it
    again completes it. Returns the location and whether it is new.
    """
    location = Location(directory / DIRECTORY)
    if _is_there(location):
        _check(location)
        return location, False
    try:
        make_directory(location.root, _nearest(location.root))
        refuse_network_file_system(location.root)
        for path in (location.packs, location.refs, location.logs, location.temporary):
            path.mkdir(exist_ok=True)
        (location.refs / "heads").mkdir(exist_ok=True)
        (location.refs / "tags").mkdir(exist_ok=True)
        location.lock_file.touch()
        location.lease_file.touch()
        with locked(location.lock_file):
            version = f"mergegit repository {FORMAT_VERSION}\n"
            write_durably(location.version_file, version.encode(), location.temporary / "format")
    except FileNotFoundError as error:
        raise UnusableRepository(
            f"no directory can be made in {directory}", hint="choose another directory"
        ) from error
    except PermissionError as error:
        raise UnusableRepository(
            f"no permission to make a repository in {directory}",
            hint="choose a directory that you may write to",
        ) from error
    except (FileExistsError, NotADirectoryError) as error:
        raise UnusableRepository(
            f"{error.filename} is in the way: not a directory", hint="choose another directory"
        ) from error
    return location, True


def _nearest(path: Path) -> Path:
    """The directory above a path that is there."""
    return next(parent for parent in path.parents if parent.exists())


def discover(start: Path) -> Location:
    """The repository of ``start`` or of the nearest directory above it that has one."""
    for directory in (start.absolute(), *start.absolute().parents):
        location = Location(directory / DIRECTORY)
        if _is_there(location):
            _check(location)
            return location
    raise NotARepository(
        f"{start.absolute()} is not in a mergegit repository "
        f"(no {DIRECTORY} there or in any directory above)",
        hint="run `mergegit init` where the repository should be, or name it with -C",
    )


def _is_there(location: Location) -> bool:
    try:
        return location.version_file.is_file()
    except PermissionError as error:
        raise _not_readable(location) from error


def _not_readable(location: Location) -> UnusableRepository:
    return UnusableRepository(
        f"no permission to read {location.root}", hint="ask its owner for access"
    )


def _check(location: Location) -> None:
    """Raises ``UnusableRepository`` where the repository can't be worked with."""
    refuse_network_file_system(location.root)
    try:
        words = location.version_file.read_text("ascii").split()
        version = int(words[2])
    except (ValueError, IndexError) as error:
        raise UnusableRepository(
            f"{location.version_file} does not say which format the repository has",
            hint="it should read `mergegit repository 1`; restore it if the rest is intact",
        ) from error
    except PermissionError as error:
        raise _not_readable(location) from error
    if version > FORMAT_VERSION:
        raise UnusableRepository(
            f"the repository {location.root} has format {version}; "
            f"this mergegit knows formats up to {FORMAT_VERSION}",
            hint="upgrade mergegit",
        )


def file_system_type(path: Path) -> str | None:
    """The type of the file system that holds ``path``, where the system tells (Linux)."""
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return None
    real = os.path.realpath(path)
    best: tuple[str, str | None] = ("", None)
    for line in lines:
        left, _, right = line.partition(" - ")
        mount = left.split(" ")[4].replace("\\040", " ")
        inside = real == mount or real.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best[0]):
            best = (mount, right.split(" ")[0])
    return best[1]


def refuse_network_file_system(path: Path) -> None:
    """LMDB's locks and memory map are not safe on network file systems: refuse those."""
    kind = file_system_type(path)
    if kind in _NETWORK_FILE_SYSTEMS:
        raise UnusableRepository(
            f"{path} lies on a network file system ({kind}), where the catalog is not safe",
            hint="keep the repository on a local disk",
        )


def disk_bytes(root: Path) -> int:
    """Bytes that the files below a directory take on disk, without those that go meanwhile."""
    total = 0
    for directory, _, files in os.walk(root):
        for file in files:
            with suppress(FileNotFoundError):
                total += os.stat(os.path.join(directory, file)).st_blocks * 512
    return total


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds the lock of a file; the kernel frees it when its holder dies."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def write_durably(path: Path, data: bytes, temporary: Path) -> None:
    """Write a small file so that after a crash it is the old one or the new one.

    ``temporary`` is where it is written first, on the same file system. Whoever writes there
    holds the repository's lock: what a killed process left is overwritten. Raises ``Unconfirmed``
    where it is the new one, and that may not outlive a power cut.
    """
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    confirm(path.parent, f"{path} is written")


def confirm(directory: Path, done: str) -> None:
    """Make durable what was done in a directory. Raises ``Unconfirmed``, which says what."""
    try:
        sync_directory(directory)
    except OSError as error:
        raise Unconfirmed(
            f"{done}, but the disk did not confirm it ({os.strerror(error.errno or 0)})",
            hint="see to the disk, run the command again, and check with `mergegit fsck`",
        ) from error


def make_directory(path: Path, root: Path) -> None:
    """Make a directory durably, with those below ``root`` that lead to it.

    Those that are there are made durable all the same: who made them may have died before.
    """
    if path != root:
        make_directory(path.parent, root)
        path.mkdir(exist_ok=True)
        sync_directory(path.parent)


def no_space(place: Path, number: int = errno.ENOSPC) -> NoSpace:
    """The error of a full disk or, by the number of the system's error, of a full quota."""
    what = "the quota is used up" if number == errno.EDQUOT else "no space left"
    return NoSpace(
        f"{what} on the disk of {place}",
        hint="free some space and run the command again; nothing was lost",
    )


def sync_directory(path: Path) -> None:
    """Make renames in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
