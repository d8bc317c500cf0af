"""What is in a checkout, to compare it by."""

from __future__ import annotations

import os
import re
from pathlib import Path

from tests.trees import tree_of


def contents(path: str | os.PathLike[str]) -> dict[str, str | None]:
    """Every file below a directory with its bytes in hex, and every directory with None; nothing
    where there is no directory."""
    found = tree_of(Path(path)) if os.path.isdir(path) else {}
    return {
        name: None if data is None else _without_commit(data).hex() for name, data in found.items()
    }


def _without_commit(data: bytes) -> bytes:
    """A file without the line by which a merge's card names its commit: that has a time in it."""
    return re.sub(rb"(?m)^Checked out from mergegit commit .*\n", b"", data)
