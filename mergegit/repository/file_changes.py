"""What differs between two commits' files around the weights."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from mergegit.objects import TensorId
from mergegit.repository.spots import is_asked_for
from mergegit.storage.store import Store

LONGEST: Final = 1 << 18
"""Bytes of the longest file that is compared line by line: time grows with the square of it."""


@dataclass(frozen=True, slots=True)
class FileChange:
    """What became of a file.

    ``old_bytes`` and ``new_bytes`` are its sizes, None where it is not there. ``lines`` are a
    unified diff, None where the file was added or removed, is not text (``is_binary``), or is too
    long.
    """

    path: str
    status: Literal["changed", "added", "removed"]
    old_bytes: int | None
    new_bytes: int | None
    lines: tuple[str, ...] | None = None
    is_binary: bool = False


def compare_files(
    store: Store,
    old: Mapping[str, TensorId],
    new: Mapping[str, TensorId],
    patterns: Sequence[str] = (),
) -> Iterator[FileChange]:
    """The files that differ, by path. Reads those that are in both, and are not too long."""
    for path in sorted(old.keys() | new.keys()):
        before, after = old.get(path), new.get(path)
        if before == after or not is_asked_for(path, patterns):
            continue
        if before is not None and after is not None:
            yield _changed(store, path, before, after)
        elif before is not None:
            yield FileChange(path, "removed", store.tensor(before).nbytes, None)
        elif after is not None:
            yield FileChange(path, "added", None, store.tensor(after).nbytes)


def _changed(store: Store, path: str, before: TensorId, after: TensorId) -> FileChange:
    sizes = (store.tensor(before).nbytes, store.tensor(after).nbytes)
    if max(sizes) > LONGEST:
        return FileChange(path, "changed", *sizes)
    old, new = _text(store, before), _text(store, after)
    if old is None or new is None:
        return FileChange(path, "changed", *sizes, is_binary=True)
    lines = difflib.unified_diff(_lines(old), _lines(new), f"a/{path}", f"b/{path}", lineterm="")
    return FileChange(path, "changed", *sizes, tuple(lines))


def _text(store: Store, tensor_id: TensorId) -> str | None:
    """A file's text, or None where it is none."""
    data = b"".join(store.read_block(block) for block in store.tensor(tensor_id).blocks())
    try:
        return None if b"\0" in data else data.decode()
    except UnicodeDecodeError:
        return None


def _lines(text: str) -> list[str]:
    """Lines without their ends; the last one says so where it has none."""
    lines = text.split("\n")
    if lines[-1]:
        lines[-1] += "  (no newline at the end)"
    else:
        lines.pop()
    return lines
