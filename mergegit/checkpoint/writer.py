"""Writing a checkpoint's files, so that the directory appears whole or not at all."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from mergegit.checkpoint.directory import IGNORED
from mergegit.dtypes import byte_length
from mergegit.errors import BadTarget, NoSpace, Unconfirmed
from mergegit.objects import Manifest, Tensor, TensorId

_TEMPORARY = ".mergegit"
"""How names end of files and directories that are not complete."""


@dataclass(frozen=True, slots=True)
class FilePart:
    """A run of a file's bytes: literal, or the blocks of a tensor.

    ``dtype`` is the one that the tensor's elements are to be converted to, or None where they are
    written as they are; ``name`` is what the tensor is called then.
    """

    literal: bytes = b""
    tensor: Tensor | None = None
    dtype: str | None = None
    name: str = ""

    @property
    def nbytes(self) -> int:
        if self.tensor is None:
            return len(self.literal)
        return byte_length(self.dtype or self.tensor.dtype, self.tensor.elements)


def file_parts(
    manifest: Manifest,
    load_tensor: Callable[[TensorId], Tensor],
    load_bytes: Callable[[Tensor], bytes],
) -> Iterator[tuple[str, list[FilePart]]]:
    """Every file of a checkpoint with what it is made of, in the order of writing."""
    for path, tensor_id in manifest.files.items():
        yield path, [FilePart(tensor=load_tensor(tensor_id))]
    for shard in manifest.shards:
        header = load_bytes(load_tensor(shard.header))
        parts = [header_part(header)]
        parts += [
            FilePart(tensor=load_tensor(manifest.tensor_of(shard, name))) for name in shard.names
        ]
        yield shard.path, parts


def header_part(text: bytes) -> FilePart:
    """How a safetensors file begins whose header has this text."""
    return FilePart(literal=struct.pack("<Q", len(text)) + text)


def check_path(path: str) -> str:
    """A manifest's path, if it stays inside the directory. Raises ``BadTarget``."""
    parts = PurePosixPath(path).parts
    bad = not parts or path.startswith("/") or "\0" in path or "\\" in path
    if bad or any(part in ("..", ".") or part in IGNORED for part in parts):
        raise BadTarget(
            f"the commit holds a file called {path!r}, which would be written elsewhere",
            hint="the commit was not made by mergegit; do not trust it",
        )
    return path


@contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """A temporary directory that becomes ``target`` on success and vanishes otherwise.

    ``target`` must not exist, or be an empty directory. What a killed process left beside it is
    removed. Raises ``BadTarget`` and ``NoSpace``.
    """
    _check_free(target)
    target = target.absolute()
    parent = target.parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        _sweep(target)
        temporary = parent / f".{target.name}.{secrets.token_hex(4)}.mergegit"
        temporary.mkdir()
    except (PermissionError, NotADirectoryError, FileExistsError, FileNotFoundError) as error:
        raise BadTarget(
            f"can't write beside {target} ({os.strerror(error.errno or 0)})",
            hint="choose a directory that you may write to",
        ) from error
    fd = os.open(temporary, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield temporary
        for directory, _, _ in os.walk(temporary):
            _sync_directory(Path(directory))
        os.rename(temporary, target)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoSpace(
                f"no space left on the disk of {parent}",
                hint="free some space or choose another disk; nothing was left behind",
            ) from error
        if isinstance(error, OSError) and error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            raise BadTarget(
                f"{target} was filled by another program meanwhile",
                hint="choose a directory that does not exist",
            ) from error
        raise
    finally:
        os.close(fd)
    try:
        _sync_directory(parent)
    except OSError as error:
        raise Unconfirmed(
            f"{target} is written, but the disk did not confirm it "
            f"({os.strerror(error.errno or 0)})",
            hint="see to the disk, remove the directory, and check the commit out again",
        ) from error


def _check_free(target: Path) -> None:
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise BadTarget(
            f"{target} exists and is not a directory", hint="choose a directory that does not exist"
        )
    if target.exists() and any(target.iterdir()):
        raise BadTarget(
            f"directory {target} is not empty", hint="choose a directory that does not exist"
        )


def _sweep(target: Path) -> None:
    """Remove temporary directories of ``target`` whose processes are gone."""
    for leftover in target.parent.glob(f".{_escape(target.name)}.*.mergegit"):
        fd = os.open(leftover, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        else:
            shutil.rmtree(leftover, ignore_errors=True)
        finally:
            os.close(fd)


def _escape(name: str) -> str:
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)


def write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> int:
    """Write a file durably; returns its length in bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    total = 0
    with open(path, "xb", buffering=0) as file:
        for chunk in chunks:
            view = memoryview(chunk)
            while view:
                written = file.write(view)
                view = view[written:]
                total += written
        os.fsync(file.fileno())
    return total


def replace_file(directory: Path, path: str, chunks: Iterable[bytes | memoryview]) -> int:
    """Write ``path`` below ``directory`` under another name, then put it in its place, durably.

    Returns its length in bytes.
    """
    target = directory / path
    make_below(directory, os.path.dirname(path))
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}{_TEMPORARY}")
    try:
        total = write_file(temporary, chunks)
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_directory(target.parent)
    return total


def make_below(directory: Path, path: str) -> None:
    """Make a directory below another, if it is not there."""
    (directory / path).mkdir(parents=True, exist_ok=True)


def sweep_files(directory: Path) -> None:
    """Remove what a killed ``replace_file`` left anywhere below."""
    for leftover in directory.rglob(f".*{_TEMPORARY}"):
        if leftover.is_file() and not leftover.is_symlink():
            leftover.unlink()


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
