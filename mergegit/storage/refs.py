"""Refs: small files that name a commit, each with a log of where it stood.

A branch moves by compare-and-swap under one lock of the whole repository, which the kernel frees
when its holder dies. A tag is written once. The log's line is written before the ref moves, so
that every place where a ref ever stood can be found again.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

from mergegit.errors import Damaged, InvalidName, RefConflict, UnknownRef
from mergegit.objects import ID_BYTES, CommitId
from mergegit.storage.location import (
    Location,
    confirm,
    locked,
    make_directory,
    sync_directory,
    write_durably,
)

Space = Literal["heads", "tags"]
SPACES: Final[tuple[Space, ...]] = ("heads", "tags")
_WORD: Final = {"heads": "branch", "tags": "tag"}
_MAX_NAME: Final = 200
_MAX_FILE_NAME: Final = 255
_FORBIDDEN: Final = re.compile(r"[\x00-\x20\x7f\ud800-\udfff~^:?*\[\\@{}]|\.\.|//|/\.|\.lock(/|$)")


@dataclass(frozen=True, slots=True)
class RefUpdate:
    """A move of a ref: from ``old`` (None where it must not exist) to ``new`` (None deletes)."""

    space: Space
    name: str
    old: CommitId | None
    new: CommitId | None
    author: str
    time: int
    reason: str


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One line of a ref's log. ``old`` or ``new`` is None where the ref did not exist."""

    old: CommitId | None
    new: CommitId | None
    author: str
    time: int
    reason: str


def check_name(name: str, space: Space = "heads") -> str:
    """``name`` if a branch or tag may be called so. Raises ``InvalidName``.

    The rules are Git's, and one more: a name of 4 to 64 hexadecimal digits would be read as an
    abbreviated commit id.
    """
    if re.fullmatch(r"[0-9a-f]{4,64}", name):
        raise InvalidName(
            f"{name!r} can't be the name of a {_WORD[space]}: it could be taken for a commit's id",
            hint="add a letter or a sign that is no hexadecimal digit",
        )
    if not _is_name(name):
        raise InvalidName(
            f"{name!r} can't be the name of a {_WORD[space]}",
            hint="use letters, digits, '-', '_', '.' and '/', as for Git's branches",
        )
    return name


def _is_name(name: str) -> bool:
    return (
        not _FORBIDDEN.search(name)
        and 0 < len(name.encode()) <= _MAX_NAME
        and len(_log_name(name).encode()) <= _MAX_FILE_NAME
        and not name.startswith(("/", "-", "."))
        and not name.endswith(("/", "."))
        and name != "HEAD"
    )


def _log_name(name: str) -> str:
    return name.replace("%", "%25").replace("/", "%2F") + ".log"


def _name_of_log(file: str) -> str:
    return file.removesuffix(".log").replace("%2F", "/").replace("%25", "%")


class Refs:
    """The refs of one repository."""

    def __init__(self, location: Location) -> None:
        self._location = location

    def read(self, space: Space, name: str) -> CommitId | None:
        """Where a ref stands; None where there is none. Raises ``Damaged``."""
        if not _is_name(name):
            return None
        path = self._path(space, name)
        try:
            text = path.read_text("ascii").strip()
            commit = bytes.fromhex(text)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None
        except ValueError:
            commit = b""
        if len(commit) != ID_BYTES:
            raise Damaged(
                f"{_WORD[space]} {name} does not hold a commit id",
                hint=f"see {self._log_path(space, name)} for where it stood",
            )
        return CommitId(commit)

    def names(self, space: Space) -> list[str]:
        """The names of a space's refs, in order."""
        root = self._location.refs / space
        return sorted(
            Path(directory, file).relative_to(root).as_posix()
            for directory, _, files in os.walk(root)
            for file in files
            if not file.startswith(".")
        )

    def all(self, space: Space) -> dict[str, CommitId]:
        """All refs of a space, by name in order. Raises ``Damaged``."""
        found = ((name, self.read(space, name)) for name in self.names(space))
        return {name: commit for name, commit in found if commit is not None}

    def log(self, space: Space, name: str) -> list[LogEntry]:
        """Where a ref stood, newest first."""
        try:
            text = self._log_path(space, name).read_text("utf-8", "replace")
        except FileNotFoundError:
            return []
        *lines, _torn = text.split("\n")
        if lines and "\0" in lines[-1]:
            lines.pop()  # torn, too: what a power cut left of it begins in its middle
        return [_parse_log_line(line, self._log_path(space, name)) for line in reversed(lines)]

    def logged(self, space: Space) -> list[str]:
        """The names that have a log, in order: refs, and refs that were deleted."""
        files = (self._location.logs / space).glob("*.log")
        return sorted(name for name in (_name_of_log(f.name) for f in files) if _is_name(name))

    def moves(self, space: Space, name: str) -> list[LogEntry]:
        """How a ref came to where it stands, newest first.

        Lines of moves that a crash prevented are left out: each move ends where the next begins.
        """
        moves = []
        stood = self.read(space, name)
        for entry in self.log(space, name):
            if entry.new == stood:
                moves.append(entry)
                stood = entry.old
        return moves

    def expired(self, space: Space, name: str, limit: int | None) -> int:
        """How many lines of a ref's log ``expire`` would forget, in whole or in part."""
        log = self.log(space, name)
        kept = self._unexpired(space, name, log, limit)
        return sum(entry not in kept for entry in log)

    def unexpired(self, space: Space, name: str, limit: int | None) -> list[LogEntry]:
        """The lines of a ref's log that ``expire`` would keep, newest first."""
        return self._unexpired(space, name, self.log(space, name), limit)

    def expire(self, space: Space, name: str, limit: int | None) -> None:
        """Forget the lines of a ref's log that were written up to ``limit`` (seconds, UTC), or,
        without one, all.

        Of a ref that exists the newest line stays, for who moved it there and when; where the ref
        had stood before is forgotten with the others.
        """
        with locked(self._location.lock_file):
            log = self.log(space, name)
            kept = self._unexpired(space, name, log, limit)
            path = self._log_path(space, name)
            if kept == log:
                return
            if kept:
                lines = b"".join(map(_log_line, reversed(kept)))
                write_durably(path, lines, self._location.temporary / "ref")
            else:
                path.unlink(missing_ok=True)
                sync_directory(path.parent)

    def _unexpired(
        self, space: Space, name: str, log: Sequence[LogEntry], limit: int | None
    ) -> list[LogEntry]:
        """The newest lines, down to the last one that is not too old."""
        count = len(log)
        while count and (limit is None or log[count - 1].time <= limit):
            count -= 1
        kept = list(log[:count])
        stands = self.read(space, name)
        if stands is not None and all(entry.new != stands for entry in kept):
            moved_there = [entry for entry in log[count:] if entry.new == stands]
            kept += [replace(entry, old=None) for entry in moved_there[:1]]
        return kept

    def update(self, update: RefUpdate, *, has_looked: bool = False) -> None:
        """Move a ref, if it is still where ``update.old`` says. Raises ``RefConflict``.

        Who ``has_looked`` for the ref before, and not found it, loses to another command when it
        is there by now; without, a ref that is there is in the way.
        """
        check_name(update.name, update.space)
        with locked(self._location.lock_file):
            self._check_current(update, has_looked=has_looked)
            self._apply(update)

    def rename(self, away: RefUpdate, here: RefUpdate) -> None:
        """Delete the ref ``away`` and make the ref ``here``, at once. Raises ``RefConflict``."""
        check_name(here.name, here.space)
        with locked(self._location.lock_file):
            self._check_current(away)
            self._check_current(here)
            old, new = (self._path(update.space, update.name) for update in (away, here))
            self._make_room(here)
            self._append_log(away)
            self._append_log(here)
            os.rename(old, new)
            for directory in {new.parent, old.parent}:
                confirm(directory, f"{old} is renamed to {new}")
            self._drop_empty_parents(old)

    def _check_current(self, update: RefUpdate, *, has_looked: bool = False) -> None:
        word = _WORD[update.space]
        current = self.read(update.space, update.name)
        if current != update.old:
            if update.old is None and not has_looked:
                raise RefConflict(
                    f"{word} {update.name} exists already",
                    hint=f"choose another name, or delete it with `mergegit {word} -d`",
                )
            raise RefConflict(
                f"{word} {update.name} was moved by another command meanwhile",
                hint="run the command again; nothing of the other one is lost",
            )

    def _apply(self, update: RefUpdate) -> None:
        path = self._path(update.space, update.name)
        if update.new is None:
            self._append_log(update)
            path.unlink()
            confirm(path.parent, f"{path} is removed")
            self._drop_empty_parents(path)
            return
        if update.old is None:
            self._make_room(update)
        self._append_log(update)
        write_durably(path, f"{update.new.hex()}\n".encode(), self._location.temporary / "ref")

    def _make_room(self, update: RefUpdate) -> None:
        """Prepare the place of a new ref. A name can't be a directory of other names as well."""
        for name in self.all(update.space):
            if name.startswith(update.name + "/") or update.name.startswith(name + "/"):
                raise RefConflict(
                    f"{_WORD[update.space]} {update.name} can't stand beside {name}",
                    hint="choose a name that is not the beginning of another before a '/'",
                )
        path = self._path(update.space, update.name)
        make_directory(path.parent, self._location.refs)
        if path.is_dir():
            shutil.rmtree(path)  # a killed command left it; no ref lies below

    def _append_log(self, update: RefUpdate) -> None:
        line = _log_line(update)
        path = self._log_path(update.space, update.name)
        make_directory(path.parent, self._location.logs)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            _drop_torn_line(fd)
            _write(fd, line)
            os.fsync(fd)
        finally:
            os.close(fd)
        sync_directory(path.parent)

    def clear(self) -> None:
        """Remove what killed commands left: directories without refs, and half a ref."""
        with locked(self._location.lock_file):
            (self._location.temporary / "ref").unlink(missing_ok=True)
            for space in SPACES:
                for directory, _, _ in os.walk(self._location.refs / space, topdown=False):
                    if Path(directory).parent != self._location.refs:
                        with suppress(OSError):
                            os.rmdir(directory)

    def _drop_empty_parents(self, path: Path) -> None:
        root = self._location.refs
        for parent in path.parents:
            if parent.parent == root:
                return
            try:
                parent.rmdir()
            except OSError:
                return

    def _path(self, space: Space, name: str) -> Path:
        return self._location.refs / space / name

    def _log_path(self, space: Space, name: str) -> Path:
        return self._location.logs / space / _log_name(name)

    def require(self, space: Space, name: str) -> CommitId:
        """Where a ref stands. Raises ``UnknownRef``."""
        commit = self.read(space, name)
        if commit is None:
            raise UnknownRef(
                f"there is no {_WORD[space]} {name}",
                hint=f"`mergegit {_WORD[space]}` lists them",
            )
        return commit


def _hex_or_zero(commit: CommitId | None) -> str:
    return commit.hex() if commit else "0" * (2 * ID_BYTES)


def _log_line(entry: RefUpdate | LogEntry) -> bytes:
    old, new = (_hex_or_zero(commit) for commit in (entry.old, entry.new))
    author = re.sub(r"[\0\t\n\r]", " ", entry.author)
    reason = re.sub(r"[\0\t\n\r]", " ", entry.reason)
    return f"{old} {new} {entry.time} {author}\t{reason}\n".encode("utf-8", "replace")


def _write(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def _drop_torn_line(fd: int) -> None:
    """Cut off what a killed process or a power cut left of a log's last line."""
    size = os.fstat(fd).st_size
    end = _end_of_line(fd, size)
    start = _end_of_line(fd, end - 1) if end else 0
    if b"\0" in os.pread(fd, end - start, start):
        end = start
    if end < size:
        os.ftruncate(fd, end)


def _end_of_line(fd: int, end: int) -> int:
    """Where the last whole line ends that lies before a place in a file."""
    while end > 0:
        start = max(0, end - 4096)
        at = os.pread(fd, end - start, start).rfind(b"\n")
        if at >= 0:
            return start + at + 1
        end = start
    return 0


def _parse_log_line(line: str, path: Path) -> LogEntry:
    try:
        head, _, reason = line.partition("\t")
        old, new, time, author = head.split(" ", 3)
        ids = [CommitId(bytes.fromhex(text)) if text.strip("0") else None for text in (old, new)]
        return LogEntry(ids[0], ids[1], author, int(time), reason)
    except ValueError as error:
        raise Damaged(
            f"a line of a ref's log, {path}, can't be read: {line[:80]!r}",
            hint="remove the line from the file, or the file; it only tells where the ref stood",
        ) from error
