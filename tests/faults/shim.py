"""The layer under the calls that write: compiling it, arming it, and reading its log."""

from __future__ import annotations

import ctypes
import enum
import errno
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

SOURCE: Final = Path(__file__).with_name("shim.c")


class Operation(enum.IntEnum):
    """What a call does, as ``shim.c`` numbers it."""

    OPEN = 1
    WRITE = 2
    TRUNCATE = 3
    SYNC = 4
    RENAME = 5
    LINK = 6
    UNLINK = 7
    MKDIR = 8
    RMDIR = 9
    CHANGE = 10
    LOCK = 11


CREATED: Final = 1
EMPTIED: Final = 2
DURABLE: Final = 4


class Kind(enum.IntEnum):
    """What happens at the call, as ``shim.c`` numbers it."""

    NONE = 0
    KILL = 1
    TEAR = 2
    FAIL = 3
    FULL = 4
    SHORTEN = 5
    HALT = 6


@dataclass(frozen=True, slots=True)
class Fault:
    """What is to happen at which call, counted from zero."""

    kind: Kind = Kind.NONE
    point: int = -1
    errno: int = 0

    @property
    def ends_the_process(self) -> bool:
        return self.kind in (Kind.KILL, Kind.TEAR)


@dataclass(frozen=True, slots=True)
class Call:
    """A call as the log has it. ``error`` is 0 where it succeeded; ``offset`` is a length for
    TRUNCATE; ``data`` is what was really written."""

    operation: Operation
    error: int
    flags: int
    inode: int
    offset: int
    path: str
    other: str
    data: bytes

    def below(self, root: Path) -> str:
        """The call in words, with paths from ``root``."""
        names = [os.path.relpath(p, root) for p in (self.path, self.other) if p]
        failed = f" failed: {errno.errorcode[self.error]}" if self.error else ""
        return f"{self.operation.name.lower()} {' -> '.join(names)}{failed}"


_HEAD = struct.Struct("<IIiIQQIII")


def calls_of(log: Path) -> Iterator[Call]:
    """The calls that a log holds, in order."""
    data = log.read_bytes()
    at = 0
    while at < len(data):
        length, operation, error, flags, inode, offset, path, other, size = _HEAD.unpack_from(
            data, at
        )
        start = at + _HEAD.size
        names = data[start : start + path + other]
        start += path + other
        yield Call(
            Operation(operation),
            error,
            flags,
            inode,
            offset,
            os.fsdecode(names[:path]),
            os.fsdecode(names[path:]),
            data[start : start + size],
        )
        at += 4 + length


def why_not() -> str | None:
    """Why the layer can't be used here; None where it can."""
    if os.uname().sysname != "Linux":
        return "the layer under system calls is written for Linux"
    if shutil.which("cc") is None:
        return "there is no C compiler (cc) to compile the layer under system calls with"
    return None


def compile_shim(directory: Path) -> Path:
    """The compiled layer, made in ``directory``."""
    library = directory / "shim.so"
    flags = ["-std=gnu11", "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror"]
    subprocess.run(["cc", *flags, "-o", library, SOURCE, "-lpthread", "-ldl"], check=True)
    return library


def environment(
    library: Path, root: Path | None = None, log: Path | None = None, fault: Fault | None = None
) -> dict[str, str]:
    """The environment of a process under the layer, which is armed from its start if ``root`` is
    given."""
    variables = {**os.environ, "LD_PRELOAD": str(library)}
    if root is not None and log is not None:
        chosen = fault or Fault()
        variables["MERGEGIT_SHIM_ROOT"] = str(root)
        variables["MERGEGIT_SHIM_LOG"] = str(log)
        variables["MERGEGIT_SHIM_FAULT"] = f"{chosen.point} {chosen.kind:d} {chosen.errno}"
    return variables


def arm(root: str, log: str, fault: Fault) -> None:
    """Arm the layer in this process, which was started under it."""
    library = ctypes.CDLL(None)
    opened = library.faults_arm(
        os.fsencode(root),
        os.fsencode(log),
        ctypes.c_long(fault.point),
        int(fault.kind),
        fault.errno,
    )
    assert opened >= 0, f"the log {log} can't be opened"
