"""Diffs of the files around the weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mergegit import Repository
from mergegit.repository import file_changes
from mergegit.repository.file_changes import LONGEST, FileChange
from tests.families import tiny_checkpoint

Change = Callable[[str, bytes | None, bytes | None], list[FileChange]]


@pytest.fixture
def change(repository: Repository, tmp_path: Path) -> Change:
    """The diff of two checkpoints of which one file differs; None is not there."""

    def compare(path: str, old: bytes | None, new: bytes | None) -> list[FileChange]:
        for name, data in (("old", old), ("new", new)):
            checkpoint = tiny_checkpoint(tmp_path / name)
            (checkpoint / "README.md").write_text("same\n")
            if data is not None:
                (checkpoint / path).write_bytes(data)
            repository.add(checkpoint, no_base=True)
        return list(repository.diff("old", "new").files)

    return compare


def test_text_is_compared_line_by_line(change: Change) -> None:
    (file,) = change("notes.txt", b"one\ntwo\nthree\n", b"one\n2\nthree\n")
    assert (file.path, file.status, file.old_bytes, file.new_bytes) == (
        "notes.txt", "changed", 14, 12,
    )  # fmt: skip
    assert file.lines == (
        "--- a/notes.txt", "+++ b/notes.txt", "@@ -1,3 +1,3 @@", " one", "-two", "+2", " three",
    )  # fmt: skip


def test_a_line_without_an_end_is_another_line(change: Change) -> None:
    (file,) = change("notes.txt", b"one\n", b"one")
    assert file.lines is not None
    assert file.lines[3:] == ("-one", "+one  (no newline at the end)")


@pytest.mark.parametrize("data", [b"\0\1\2", b"caf\xe9"])
def test_what_is_no_text_is_binary(data: bytes, change: Change) -> None:
    (file,) = change("blob.bin2", b"text", data)
    assert file.is_binary
    assert file.lines is None
    assert (file.old_bytes, file.new_bytes) == (4, len(data))


def test_long_files_are_not_compared_and_not_called_binary(change: Change) -> None:
    (file,) = change("vocab.txt", b"a\n", b"b\n" * (LONGEST // 2 + 1))
    assert file.lines is None
    assert not file.is_binary


def test_long_files_are_not_even_read(change: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_changes, "LONGEST", 3)
    monkeypatch.setattr(file_changes, "_text", lambda *_: pytest.fail("it was read"))
    assert len(change("vocab.txt", b"aaaa", b"bbbb")) == 1


@pytest.mark.parametrize(("old", "new", "status"), [(b"x", None, "removed"), (None, b"x", "added")])
def test_files_of_one_side_alone(
    old: bytes | None, new: bytes | None, status: str, change: Change
) -> None:
    (file,) = change("extra.txt", old, new)
    assert (file.status, file.lines) == (status, None)
    assert {file.old_bytes, file.new_bytes} == {1, None}


def test_files_that_are_the_same_are_not_listed(change: Change) -> None:
    assert change("notes.txt", b"same\n", b"same\n") == []
