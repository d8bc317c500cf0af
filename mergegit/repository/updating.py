"""`checkout --update`: a directory brought to another commit, with the files rewritten that differ.

Files are compared by their contents, block by block against ids: nothing has to be remembered about
a directory, and nothing is read from the store for what is there already. Each file is replaced
whole; a run that was cut off leaves some files of the one commit and some of the other, and the
next run finishes.
"""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mergegit.checkpoint.directory import IGNORED
from mergegit.checkpoint.header import read_header
from mergegit.checkpoint.writer import (
    FilePart,
    check_path,
    make_below,
    replace_file,
    sweep_files,
)
from mergegit.dtypes import byte_length
from mergegit.encoding import hash_block
from mergegit.errors import BadCheckpoint, BadTarget, NoSpace
from mergegit.objects import BLOCK_ELEMENTS, BlockId, block_count, block_elements
from mergegit.repository.companions import INDEX, WEIGHT_SUFFIXES
from mergegit.storage.store import Store

Chunks = Callable[[Sequence[FilePart]], Iterator[bytes]]


@dataclass(frozen=True, slots=True)
class Updated:
    """What an update did: files rewritten and their bytes, files that stayed as they were, and
    those that were removed or are there beside the commit's."""

    written: int
    nbytes: int
    unchanged: int
    removed: tuple[str, ...]
    kept: tuple[str, ...]


def update_directory(
    store: Store,
    directory: Path,
    files: Sequence[tuple[str, Sequence[FilePart]]],
    directories: Sequence[str],
    chunks: Chunks,
) -> Updated:
    """Bring ``directory`` to hold ``files``, each with what it is made of.

    What it holds besides is removed where it would be taken for the model's weights and the
    repository has all that is in it; other files stay. Raises ``BadTarget``, before anything is
    changed, where such weights are nowhere else, or something is in the way; and ``NoSpace``.
    """
    if directory.is_symlink() or not directory.is_dir():
        raise BadTarget(
            f"{directory} is no directory to update",
            hint="check out without --update into a directory that does not exist",
        )
    wanted = {check_path(path) for path, _ in files}
    for path in (*wanted, *directories):
        _check_way(directory, check_path(path))
    others = sorted(set(_files_in(directory)) - wanted)
    misleading = [path for path in others if _is_taken_for_weights(path)]
    for path in misleading:
        if not _is_stored(store, directory / path):
            raise BadTarget(
                f"{directory} holds {path}, which loaders may take for the model's, and the "
                "repository does not have what is in it",
                hint="move it elsewhere, or add it to the repository first",
            )
    sweep_files(directory)
    written = nbytes = unchanged = 0
    try:
        for path in directories:
            make_below(directory, path)
        for path, parts in files:
            target = directory / path
            if _holds(target, parts):
                unchanged += 1
                continue
            nbytes += replace_file(directory, path, chunks(parts))
            written += 1
        for path in misleading:
            (directory / path).unlink()
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoSpace(
                f"no space left on the disk of {directory}",
                hint="free some space and run the command again; it goes on where it stopped",
            ) from error
        raise BadTarget(
            f"can't write into {directory} ({os.strerror(error.errno or 0)})",
            hint="see to the directory and run the command again; it goes on where it stopped",
        ) from error
    kept = tuple(path for path in others if path not in misleading)
    return Updated(written, nbytes, unchanged, tuple(misleading), kept)


def _files_in(directory: Path) -> Iterator[str]:
    for top, folders, names in os.walk(directory):
        folders[:] = [name for name in folders if name not in IGNORED]
        for name in names:
            yield os.path.relpath(os.path.join(top, name), directory)


def _check_way(directory: Path, path: str) -> None:
    """Nothing that a file is written through may lead elsewhere, or be of another kind."""
    way = directory
    for part in Path(path).parent.parts:
        way /= part
        if way.is_symlink() or (way.exists() and not way.is_dir()):
            raise BadTarget(
                f"{way} is no directory, and {path} would be written below it",
                hint="remove it, or check out into a directory that does not exist",
            )
    if (directory / path).is_symlink():
        raise BadTarget(
            f"{directory / path} is a symbolic link, which may lead out of the directory",
            hint="remove it, or check out into a directory that does not exist",
        )


def _is_taken_for_weights(path: str) -> bool:
    return path == INDEX or (os.sep not in path and path.endswith(WEIGHT_SUFFIXES))


def _holds(path: Path, parts: Sequence[FilePart]) -> bool:
    """Whether a file holds these parts and nothing else; converted tensors are not compared."""
    if not path.is_file() or any(part.dtype is not None for part in parts):
        return False
    if path.stat().st_size != sum(part.nbytes for part in parts):
        return False
    with open(path, "rb", buffering=0) as file:
        for part in parts:
            if part.tensor is None:
                if file.read(len(part.literal)) != part.literal:
                    return False
                continue
            for index, block in enumerate(part.tensor.blocks()):
                if hash_block(file.read(part.tensor.block_nbytes(index))) != block:
                    return False
    return True


def _is_stored(store: Store, path: Path) -> bool:
    """Whether the repository has every block of a file."""
    blocks = set(_blocks_of(path))
    return len(store.catalog.forms_of(blocks)) == len(blocks)


def _blocks_of(path: Path) -> Iterator[BlockId]:
    """The ids of a file's blocks as they are stored: those of its tensors, or of its bytes."""
    with open(path, "rb", buffering=0) as file:
        try:
            header = read_header(file.fileno(), path)
        except BadCheckpoint:
            file.seek(0)
            while data := file.read(BLOCK_ELEMENTS):
                yield hash_block(data)
            return
        for entry in header.tensors:
            file.seek(header.data_offset + entry.begin)
            elements = math.prod(entry.shape)
            for index in range(block_count(elements)):
                part = block_elements(elements, index)
                yield hash_block(file.read(byte_length(entry.dtype, part)))
