"""Where a repository lies, and whether the place will do."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mergegit.errors import NotARepository, UnusableRepository
from mergegit.storage import location as location_module
from mergegit.storage.location import (
    Location,
    create,
    discover,
    disk_bytes,
    file_system_type,
    make_directory,
    write_durably,
)

NOBODY = 65534


@contextmanager
def unprivileged() -> Iterator[None]:
    """Work as a user to whom permissions apply, also where the tests run as root."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def public() -> Iterator[Path]:
    """A directory that everyone may enter and read, and no unprivileged user write to."""
    directory = Path(tempfile.mkdtemp())
    directory.chmod(0o555)
    yield directory
    directory.chmod(0o755)
    shutil.rmtree(directory)


# -- making one -----------------------------------------------------------------------------------


def test_a_new_repository_is_empty_and_says_its_format(tmp_path: Path) -> None:
    location, is_new = create(tmp_path)
    assert is_new
    assert location.root == tmp_path / ".mergegit"
    assert location.version_file.read_text() == "mergegit repository 1\n"
    for directory in (
        location.packs,
        location.logs,
        location.temporary,
        location.refs / "heads",
        location.refs / "tags",
    ):
        assert os.listdir(directory) == []


def test_directories_above_are_made(tmp_path: Path) -> None:
    create(tmp_path / "a" / "b")
    assert discover(tmp_path / "a" / "b") == Location(tmp_path / "a" / "b" / ".mergegit")


def test_making_it_again_changes_nothing(tmp_path: Path) -> None:
    location, _ = create(tmp_path)
    (location.refs / "heads" / "main").write_text("aa" * 32)
    before = sorted(tmp_path.rglob("*"))
    times = [path.stat().st_mtime_ns for path in before]
    assert create(tmp_path) == (location, False)
    assert sorted(tmp_path.rglob("*")) == before
    assert [path.stat().st_mtime_ns for path in before] == times


def test_one_that_was_half_made_is_completed(tmp_path: Path) -> None:
    location, _ = create(tmp_path)
    location.version_file.unlink()
    location.temporary.rmdir()
    assert create(tmp_path) == (location, True)
    assert location.temporary.is_dir()
    assert discover(tmp_path) == location


def test_the_version_is_written_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(source: Path, target: Path) -> None:
        raise OSError("the power went out")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        with pytest.raises(OSError, match="power"):
            create(tmp_path)
    assert (tmp_path / ".mergegit" / "refs" / "tags").is_dir()
    with pytest.raises(NotARepository):
        discover(tmp_path)


@pytest.mark.parametrize("below", ["", "repository", "a/b/c"])
def test_a_file_in_the_way_is_named(below: str, tmp_path: Path) -> None:
    file = tmp_path / ("repository" if below else ".mergegit")
    file.write_text("mine")
    with pytest.raises(UnusableRepository, match="in the way") as caught:
        create(tmp_path / "repository" / below if below else tmp_path)
    assert str(tmp_path) in caught.value.message
    assert file.read_text() == "mine"


def test_without_permission_none_is_made(public: Path) -> None:
    with unprivileged(), pytest.raises(UnusableRepository, match="no permission to make"):
        create(public)
    assert os.listdir(public) == []


# -- finding one ----------------------------------------------------------------------------------


@pytest.mark.parametrize("start", ["", "a", "a/b", ".mergegit", ".mergegit/packs"])
def test_a_repository_is_found_upwards(start: str, tmp_path: Path) -> None:
    location, _ = create(tmp_path)
    (tmp_path / "a" / "b").mkdir(parents=True)
    assert discover(tmp_path / start) == location


def test_the_nearest_repository_is_found(tmp_path: Path) -> None:
    create(tmp_path)
    inner, _ = create(tmp_path / "a")
    (tmp_path / "a" / "b").mkdir()
    assert discover(tmp_path / "a" / "b") == inner


def test_a_relative_start_is_taken_from_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    location, _ = create(tmp_path)
    (tmp_path / "a").mkdir()
    monkeypatch.chdir(tmp_path / "a")
    assert discover(Path()) == location
    assert discover(Path("gone/far")) == location


def test_where_there_is_none_the_way_to_one_is_told(tmp_path: Path) -> None:
    with pytest.raises(NotARepository) as caught:
        discover(tmp_path)
    assert str(tmp_path) in caught.value.message
    assert "mergegit init" in caught.value.hint


def test_a_directory_without_a_version_is_passed_over(tmp_path: Path) -> None:
    location, _ = create(tmp_path)
    (tmp_path / "a" / ".mergegit").mkdir(parents=True)
    assert discover(tmp_path / "a") == location


def test_one_that_may_not_be_read_is_told_as_such(public: Path) -> None:
    public.chmod(0o755)
    location, _ = create(public)
    (public / "a").mkdir()
    public.chmod(0o555)
    location.root.chmod(0)
    try:
        with unprivileged(), pytest.raises(UnusableRepository, match="no permission to read"):
            discover(public / "a")
    finally:
        location.root.chmod(0o755)


def test_a_version_that_may_not_be_read_is_told_as_such(public: Path) -> None:
    public.chmod(0o755)
    location, _ = create(public)
    location.version_file.chmod(0)
    with unprivileged(), pytest.raises(UnusableRepository, match="no permission to read"):
        discover(public)


# -- versions -------------------------------------------------------------------------------------


@pytest.mark.parametrize("open_it", [discover, create])
def test_a_newer_format_asks_for_an_upgrade(open_it: object, tmp_path: Path) -> None:
    location, _ = create(tmp_path)
    location.version_file.write_text("mergegit repository 2\n")
    with pytest.raises(UnusableRepository, match="has format 2") as caught:
        open_it(tmp_path)  # type: ignore[operator]
    assert "upgrade" in caught.value.hint
    assert location.version_file.read_text() == "mergegit repository 2\n"


@pytest.mark.parametrize(
    "data",
    [b"", b"\n", b"mergegit repository", b"mergegit repository one", b"\xff\xfe\xfd", b"1"],
)
def test_a_version_that_says_nothing_is_told_as_such(data: bytes, tmp_path: Path) -> None:
    location, _ = create(tmp_path)
    location.version_file.write_bytes(data)
    with pytest.raises(UnusableRepository, match="does not say which format"):
        discover(tmp_path)


# -- file systems ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["nfs", "nfs4", "cifs", "lustre", "fuse.sshfs", "9p", "ceph"])
def test_a_network_file_system_is_refused(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(location_module, "file_system_type", lambda path: kind)
    with pytest.raises(UnusableRepository, match=kind) as caught:
        create(tmp_path)
    assert "local disk" in caught.value.hint
    with pytest.raises(NotARepository):
        discover(tmp_path)


def test_a_repository_that_was_moved_to_a_network_file_system_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(tmp_path)
    monkeypatch.setattr(location_module, "file_system_type", lambda path: "nfs4")
    for open_it in (discover, create):
        with pytest.raises(UnusableRepository, match="nfs4"):
            open_it(tmp_path)


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "zfs", "tmpfs", "overlay", "apfs", None])
def test_a_local_file_system_will_do(
    kind: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(location_module, "file_system_type", lambda path: kind)
    location, _ = create(tmp_path)
    assert discover(tmp_path) == location


MOUNTS = """\
22 1 8:1 / / rw - ext4 /dev/sda1 rw
23 22 0:20 / /data rw,relatime shared:1 - nfs4 server:/data rw
24 23 8:2 / /data/local rw - xfs /dev/sdb1 rw
25 22 0:21 / /my\\040disk rw - cifs //server/share rw
26 22 0:22 / /twice rw - nfs server:/a rw
27 22 8:3 / /twice rw - ext4 /dev/sdc1 rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "ext4"),
        ("/home/ada", "ext4"),
        ("/data", "nfs4"),
        ("/data/models", "nfs4"),
        ("/data/local/models", "xfs"),
        ("/database", "ext4"),
        ("/my disk/models", "cifs"),
        ("/twice/over", "ext4"),
    ],
)
def test_the_file_system_is_that_of_the_nearest_mount(
    path: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "read_text", lambda self: MOUNTS)
    monkeypatch.setattr(os.path, "realpath", os.fspath)
    assert file_system_type(Path(path)) == kind


def test_where_the_system_does_not_tell_nothing_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Path) -> str:
        raise FileNotFoundError(errno.ENOENT, "no /proc")

    monkeypatch.setattr(Path, "read_text", fail)
    assert file_system_type(tmp_path) is None


@pytest.mark.skipif(not Path("/proc/self/mountinfo").exists(), reason="Linux tells")
def test_the_system_tells_of_its_own_file_systems() -> None:
    assert file_system_type(Path("/proc")) == "proc"


# -- small files ----------------------------------------------------------------------------------


def test_a_small_file_is_the_old_one_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, temporary = tmp_path / "x", tmp_path / "temporary"
    write_durably(path, b"old", temporary)
    assert path.read_bytes() == b"old"

    def fail(source: Path, target: Path) -> None:
        raise OSError("the power went out")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        with pytest.raises(OSError, match="power"):
            write_durably(path, b"new", temporary)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["x"]
    write_durably(path, b"new", temporary)
    assert path.read_bytes() == b"new"


def test_directories_are_made_durable_though_they_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who made them may have been killed before they were."""
    synced, sync = [], os.fsync
    (tmp_path / "a").mkdir()

    def record(fd: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{fd}")))
        sync(fd)

    monkeypatch.setattr(os, "fsync", record)
    make_directory(tmp_path / "a" / "b", tmp_path)
    assert (tmp_path / "a" / "b").is_dir()
    assert synced == [tmp_path, tmp_path / "a"]


def test_files_that_go_meanwhile_take_no_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("goes", "stays"):
        (tmp_path / name).write_bytes(bytes(5000))
    walk = os.walk

    def walk_then_remove(root: Path) -> Iterator[tuple[str, list[str], list[str]]]:
        found = list(walk(root))
        (tmp_path / "goes").unlink()
        yield from found

    monkeypatch.setattr(os, "walk", walk_then_remove)
    assert disk_bytes(tmp_path) == (tmp_path / "stays").stat().st_blocks * 512


def test_what_a_killed_process_left_of_a_small_file_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "temporary").write_bytes(b"a longer half")
    write_durably(tmp_path / "x", b"new", tmp_path / "temporary")
    assert (tmp_path / "x").read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["x"]


def test_a_small_file_is_synced_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[object] = []
    fsync, replace = os.fsync, os.replace

    def record_fsync(fd: int) -> None:
        events.append(os.fstat(fd).st_ino)
        fsync(fd)

    def record_replace(source: Path, target: Path) -> None:
        events.append("replace")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "replace", record_replace)
    write_durably(tmp_path / "x", b"new", tmp_path / "temporary")
    assert events == [(tmp_path / "x").stat().st_ino, "replace", tmp_path.stat().st_ino]
