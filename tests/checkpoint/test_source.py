"""Files that must stay as they were when the checkpoint was inspected."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mergegit.checkpoint.source import SourceFile
from mergegit.errors import BadCheckpoint


@pytest.fixture
def source(tmp_path: Path) -> SourceFile:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(100)))
    status = path.stat()
    return SourceFile(path, "file", status.st_size, status.st_mtime_ns)


def test_bytes_are_read_from_where_they_are_asked(source: SourceFile) -> None:
    reader = source.reader()
    assert reader.read(90, 10) == bytes(range(90, 100))
    assert reader.read(0, 3) == bytes(range(3))
    assert reader.read(100, 0) == b""


def test_bytes_that_are_gone_are_missed(source: SourceFile) -> None:
    reader = source.reader()
    os.truncate(source.path, 50)
    assert reader.read(0, 50) == bytes(range(50))
    with pytest.raises(BadCheckpoint, match="became shorter while it was read"):
        reader.read(40, 20)


def test_a_file_that_changed_is_not_opened(source: SourceFile) -> None:
    os.utime(source.path, ns=(0, 0))
    with pytest.raises(BadCheckpoint, match="changed while it was read"):
        source.reader()


def test_a_file_that_vanished_is_named(source: SourceFile) -> None:
    source.path.unlink()
    with pytest.raises(BadCheckpoint, match="vanished while the checkpoint was read"):
        source.reader()


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="looks into /proc")
def test_a_reader_that_is_not_needed_any_more_is_closed(source: SourceFile) -> None:
    before = os.listdir("/proc/self/fd")
    reader = source.reader()
    assert len(os.listdir("/proc/self/fd")) == len(before) + 1
    del reader
    assert len(os.listdir("/proc/self/fd")) == len(before)
