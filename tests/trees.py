"""Directories as values, to compare them by."""

from __future__ import annotations

from pathlib import Path

from blake3 import blake3


def tree_of(root: Path) -> dict[str, bytes | None]:
    """Every file below a directory with its bytes, and every directory with None."""
    return {
        path.relative_to(root).as_posix(): path.read_bytes() if path.is_file() else None
        for path in root.rglob("*")
    }


def fingerprint(root: Path) -> dict[str, str]:
    """Every file below a directory with a hash of its bytes, and its time of change.

    LMDB's lock file is left out: readers write their places into it.
    """
    return {
        path.relative_to(root).as_posix(): (
            f"{blake3(path.read_bytes()).hexdigest()} {path.stat().st_mtime_ns}"
        )
        for path in root.rglob("*")
        if path.is_file() and path.name != "lock.mdb"
    }
