"""A place for files that costs no writes to a disk, where the system has one."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_MEMORY = "/dev/shm"


@contextmanager
def directory_in_memory() -> Iterator[Path]:
    """A new directory, in memory if possible, that is removed at the end."""
    usable = os.path.isdir(_MEMORY) and os.access(_MEMORY, os.W_OK)
    path = Path(tempfile.mkdtemp(prefix="mergegit-", dir=_MEMORY if usable else None))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
