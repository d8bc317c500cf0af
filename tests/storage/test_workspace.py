"""A command's temporary directory: kept while its process lives, removed when it is dead."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mergegit.storage.location import Location
from mergegit.storage.workspace import Workspace, sweep

HOLD = """
import sys
from pathlib import Path
from mergegit.storage.location import Location
from mergegit.storage.workspace import Workspace
workspace = Workspace(Location(Path(sys.argv[1])))
(workspace.path / "half.pack").write_bytes(b"half")
print(workspace.path, flush=True)
sys.stdin.read()
"""


@contextmanager
def process_with_workspace(location: Location) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Another process that holds a workspace until it is killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, location.root],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            assert process.stdout is not None
            yield process, Path(process.stdout.readline().strip())
        finally:
            process.kill()


def temporary_files(location: Location) -> list[str]:
    return sorted(os.listdir(location.temporary))


def test_a_workspace_is_an_empty_directory_of_its_own(location: Location) -> None:
    one, two = Workspace(location), Workspace(location)
    assert one.path != two.path
    for workspace in (one, two):
        assert workspace.path.parent == location.temporary
        assert list(workspace.path.iterdir()) == []


def test_a_removed_workspace_leaves_nothing(location: Location) -> None:
    workspace = Workspace(location)
    (workspace.path / "a").mkdir()
    (workspace.path / "a" / "x").write_bytes(b"1")
    workspace.remove()
    assert temporary_files(location) == []


def test_removing_twice_is_harmless(location: Location) -> None:
    workspace = Workspace(location)
    workspace.remove()
    other = Workspace(location)
    workspace.remove()
    assert other.path.is_dir()
    assert len(temporary_files(location)) == 2


def test_the_workspace_of_a_killed_process_is_swept(location: Location) -> None:
    with process_with_workspace(location) as (process, theirs):
        assert (theirs / "half.pack").exists()
        process.kill()
        process.wait()
        sweep(location)
    assert temporary_files(location) == []


def test_the_workspace_of_a_living_process_is_kept(location: Location) -> None:
    with process_with_workspace(location) as (_, theirs):
        before = temporary_files(location)
        sweep(location)
        assert temporary_files(location) == before
        assert (theirs / "half.pack").read_bytes() == b"half"


def test_a_new_workspace_sweeps_the_dead_and_keeps_the_living(location: Location) -> None:
    with (
        process_with_workspace(location) as (dead, killed),
        process_with_workspace(location) as (_, living),
    ):
        dead.kill()
        dead.wait()
        mine = Workspace(location)
        assert not killed.exists()
        assert living.is_dir()
        assert mine.path.is_dir()


def test_ones_own_workspace_is_kept(location: Location) -> None:
    workspace = Workspace(location)
    sweep(location)
    assert workspace.path.is_dir()


def test_a_lock_without_a_workspace_is_swept(location: Location) -> None:
    (location.temporary / "123-abcd.lock").touch()
    sweep(location)
    assert temporary_files(location) == []


def test_a_workspace_whose_lock_is_gone_is_swept(location: Location) -> None:
    """A power cut may take the one and leave the other."""
    orphan = location.temporary / "123-0123abcd"
    orphan.mkdir()
    (orphan / "half.pack").write_bytes(b"half")
    sweep(location)
    assert temporary_files(location) == []


def test_a_workspace_that_can_not_be_locked_leaves_nothing(
    location: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(fd: int, how: int) -> None:
        raise OSError(errno.EIO, "the disk is ill")

    monkeypatch.setattr(fcntl, "flock", fail)
    with pytest.raises(OSError, match="ill"):
        Workspace(location)
    assert temporary_files(location) == []


def test_a_workspace_that_can_not_be_removed_is_no_error(
    location: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command has succeeded by then; the next one removes it."""
    workspace = Workspace(location)

    def fail(*_arguments: object, **_options: object) -> None:
        raise OSError(errno.EIO, "the disk is ill")

    with monkeypatch.context() as patch:
        for name in ("unlink", "rmdir"):
            patch.setattr(os, name, fail)
        workspace.remove()
    assert temporary_files(location) != []
    sweep(location)
    assert temporary_files(location) == []


def test_other_temporary_files_are_not_touched(location: Location) -> None:
    (location.temporary / "ref").write_bytes(b"half")
    sweep(location)
    assert temporary_files(location) == ["ref"]
