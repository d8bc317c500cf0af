"""Where a checkpoint's bytes come from: files that must stay as they were when inspected."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from mergegit.errors import BadCheckpoint


class Reader(Protocol):
    """Gives the bytes of a file, to several threads at once."""

    def read(self, offset: int, length: int) -> bytes:
        """``length`` bytes from ``offset`` on. Raises ``BadCheckpoint`` where they are not there.

        Of a shard, no read reaches from one tensor into the next.
        """
        ...


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file of the checkpoint: where it is, its path inside, and how it was when inspected."""

    path: Path
    inside: str
    size: int
    mtime_ns: int

    def open(self) -> int:
        """An open descriptor. Raises ``BadCheckpoint`` where the file is not as it was."""
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise BadCheckpoint(
                f"{self.path} vanished while the checkpoint was read", hint="run the command again"
            ) from error
        try:
            self.check_unchanged(fd)
        except BadCheckpoint:
            os.close(fd)
            raise
        return fd

    def check_unchanged(self, fd: int) -> None:
        now = os.fstat(fd)
        if (now.st_size, now.st_mtime_ns) != (self.size, self.mtime_ns):
            raise BadCheckpoint(
                f"{self.path} changed while it was read", hint="run the command again"
            )

    def reader(self) -> Reader:
        """The file, open for as long as the reader is kept. Raises ``BadCheckpoint``."""
        return _FileReader(self)


class _FileReader:
    def __init__(self, source: SourceFile) -> None:
        self._source = source
        self._fd = source.open()

    def read(self, offset: int, length: int) -> bytes:
        data = os.pread(self._fd, length, offset)
        while len(data) < length:
            more = os.pread(self._fd, length - len(data), offset + len(data))
            if not more:
                raise BadCheckpoint(
                    f"{self._source.path} became shorter while it was read",
                    hint="run the command again when the file is complete",
                )
            data += more
        return data

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            os.close(self._fd)
