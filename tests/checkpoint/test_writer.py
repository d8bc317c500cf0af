"""Writing a checkpoint: the directory appears whole or not at all."""

from __future__ import annotations

import errno
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mergegit.checkpoint.directory import IGNORED
from mergegit.checkpoint.writer import (
    FilePart,
    check_path,
    file_parts,
    new_directory,
    write_file,
)
from mergegit.errors import BadTarget, NoSpace
from mergegit.objects import Manifest, Shard, Tensor, TensorId


def contents(directory: Path) -> dict[str, bytes]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


def fill(target: Path, error: BaseException | None = None) -> None:
    """Write a checkpoint of two files; fail after them where there is an error to fail with."""
    with new_directory(target) as directory:
        write_file(directory / "a" / "x", [b"one", b"two"])
        write_file(directory / "y", [])
        if error is not None:
            raise error


# -- the directory --------------------------------------------------------------------------------


def test_what_is_written_appears_at_the_target(tmp_path: Path) -> None:
    fill(tmp_path / "out")
    assert contents(tmp_path) == {"out/a/x": b"onetwo", "out/y": b""}


def test_nothing_appears_before_all_is_written(tmp_path: Path) -> None:
    with new_directory(tmp_path / "out") as directory:
        write_file(directory / "x", [b"1"])
        assert not (tmp_path / "out").exists()
        assert directory.parent == tmp_path
    assert (tmp_path / "out" / "x").read_bytes() == b"1"


def test_an_empty_directory_is_filled(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    fill(tmp_path / "out")
    assert set(contents(tmp_path / "out")) == {"a/x", "y"}


def test_directories_above_the_target_are_made(tmp_path: Path) -> None:
    fill(tmp_path / "a" / "b" / "out")
    assert "a/b/out/y" in contents(tmp_path)


def test_a_target_may_be_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    fill(Path("out"))
    assert set(contents(tmp_path)) == {"out/a/x", "out/y"}


def occupy_with_a_file(target: Path) -> None:
    target.write_text("mine")


def occupy_with_a_full_directory(target: Path) -> None:
    target.mkdir()
    (target / "mine").write_text("mine")


def occupy_with_a_link(target: Path) -> None:
    (target.parent / "elsewhere").mkdir()
    target.symlink_to("elsewhere")


def occupy_with_a_broken_link(target: Path) -> None:
    target.symlink_to("gone")


@pytest.mark.parametrize(
    ("occupy", "what"),
    [
        (occupy_with_a_file, "is not a directory"),
        (occupy_with_a_full_directory, "is not empty"),
        (occupy_with_a_link, "is not a directory"),
        (occupy_with_a_broken_link, "is not a directory"),
    ],
)
def test_what_stands_at_the_target_is_left_alone(
    occupy: Callable[[Path], None], what: str, tmp_path: Path
) -> None:
    occupy(tmp_path / "out")
    before = sorted(os.listdir(tmp_path)), contents(tmp_path)
    with pytest.raises(BadTarget, match=what):
        fill(tmp_path / "out")
    assert (sorted(os.listdir(tmp_path)), contents(tmp_path)) == before


def test_a_file_among_the_directories_above_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    with pytest.raises(BadTarget, match="out"):
        fill(tmp_path / "a" / "out")


@pytest.mark.parametrize(
    "error", [ValueError("damaged"), KeyboardInterrupt(), SystemExit(1)], ids=repr
)
def test_a_failure_midway_leaves_nothing(error: BaseException, tmp_path: Path) -> None:
    with pytest.raises(type(error)):
        fill(tmp_path / "out", error)
    assert os.listdir(tmp_path) == []


def test_a_failure_midway_leaves_an_empty_target_empty(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(ValueError, match="damaged"):
        fill(tmp_path / "out", ValueError("damaged"))
    assert os.listdir(tmp_path) == ["out"]
    assert os.listdir(tmp_path / "out") == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_told_as_such_and_leaves_nothing(number: int, tmp_path: Path) -> None:
    with pytest.raises(NoSpace) as caught:
        fill(tmp_path / "out", OSError(number, os.strerror(number)))
    assert str(tmp_path) in caught.value.message
    assert os.listdir(tmp_path) == []


def test_another_error_of_the_disk_stays_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="Input/output"):
        fill(tmp_path / "out", OSError(errno.EIO, os.strerror(errno.EIO)))
    assert os.listdir(tmp_path) == []


def test_a_target_that_another_program_fills_meanwhile_is_left_to_it(tmp_path: Path) -> None:
    target = tmp_path / "out"

    def fill_meanwhile() -> None:
        with new_directory(target) as directory:
            write_file(directory / "x", [b"1"])
            target.mkdir()
            (target / "theirs").write_text("theirs")

    with pytest.raises(BadTarget, match="meanwhile"):
        fill_meanwhile()
    assert contents(tmp_path) == {"out/theirs": b"theirs"}


def test_of_two_that_write_at_once_the_first_to_finish_wins(tmp_path: Path) -> None:
    target = tmp_path / "out"

    def overtake() -> None:
        with new_directory(target) as slow:
            write_file(slow / "slow", [b"1"])
            with new_directory(target) as fast:
                assert (slow / "slow").exists()
                write_file(fast / "fast", [b"2"])

    with pytest.raises(BadTarget, match="meanwhile"):
        overtake()
    assert contents(tmp_path) == {"out/fast": b"2"}


HANG = """
import sys, time
from pathlib import Path
from mergegit.checkpoint.writer import new_directory, write_file
with new_directory(Path(sys.argv[1])) as directory:
    write_file(directory / "x", [b"half"])
    print(directory, flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("name", ["out", "a[1]*?", "o.ut"])
def test_what_a_killed_process_left_is_removed(name: str, tmp_path: Path) -> None:
    target = tmp_path / name
    process = subprocess.Popen(
        [sys.executable, "-c", HANG, target], stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        leftover = Path(process.stdout.readline().strip())
        process.send_signal(signal.SIGKILL)
    assert (leftover / "x").read_bytes() == b"half"
    fill(target)
    assert os.listdir(tmp_path) == [name]


def test_what_a_living_process_writes_is_not_removed(tmp_path: Path) -> None:
    target = tmp_path / "out"
    process = subprocess.Popen(
        [sys.executable, "-c", HANG, target], stdout=subprocess.PIPE, text=True
    )
    with process:
        try:
            assert process.stdout is not None
            theirs = Path(process.stdout.readline().strip())
            fill(target)
            assert (theirs / "x").read_bytes() == b"half"
        finally:
            process.kill()


def test_files_of_others_that_look_alike_are_not_removed(tmp_path: Path) -> None:
    (tmp_path / ".other.0123abcd.mergegit").mkdir()
    (tmp_path / ".out.mergegit").mkdir()
    fill(tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == [".other.0123abcd.mergegit", ".out.mergegit", "out"]


# -- files ----------------------------------------------------------------------------------------


def test_a_file_is_its_chunks_one_after_the_other(tmp_path: Path) -> None:
    chunks = [b"abc", memoryview(b"defgh")[1:4], b"", b"\0"]
    assert write_file(tmp_path / "a" / "b" / "x", chunks) == 7
    assert (tmp_path / "a" / "b" / "x").read_bytes() == b"abcefg\0"


def test_a_file_that_is_there_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("mine")
    with pytest.raises(FileExistsError):
        write_file(tmp_path / "x", [b"yours"])
    assert (tmp_path / "x").read_text() == "mine"


def test_a_file_is_durable_before_its_directory_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[object] = []
    fsync, rename = os.fsync, os.rename

    def record_fsync(fd: int) -> None:
        events.append(("sync", os.fstat(fd).st_ino))
        fsync(fd)

    def record_rename(source: Path, target: Path) -> None:
        events.append("rename")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "rename", record_rename)
    fill(tmp_path / "out")
    renamed = events.index("rename")
    files = {("sync", (tmp_path / "out" / name).stat().st_ino) for name in ("a/x", "y")}
    assert files <= set(events[:renamed])
    assert ("sync", tmp_path.stat().st_ino) in events[renamed:]


# -- paths ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", ["config.json", "a/b/c.txt", "..data", "a..b", "...", "-rf", "naïve", ".gitattributes"]
)
def test_a_path_inside_is_allowed(path: str) -> None:
    assert check_path(path) == path


@pytest.mark.parametrize(
    "path",
    [
        "",
        ".",
        "..",
        "/",
        "/etc/passwd",
        "../x",
        "a/../../x",
        "a/..",
        "a\\..\\x",
        "C:\\x",
        "a\0b",
        *(f"{name}/hooks/x" for name in sorted(IGNORED)),
        *(f"a/{name}" for name in sorted(IGNORED)),
    ],
)
def test_a_path_that_leads_elsewhere_is_refused(path: str) -> None:
    with pytest.raises(BadTarget):
        check_path(path)


# -- what files are made of -----------------------------------------------------------------------


def test_files_come_first_then_shards_with_their_tensors_in_the_order_of_the_data() -> None:
    tensors = {
        TensorId(name * 32): Tensor("U8", (size,), bytes(32))
        for size, name in enumerate((b"c", b"h", b"w", b"v", b"s"), 1)
    }
    config, header, w, v, stray = tensors
    manifest = Manifest(
        tensors={"v": v, "w": w},
        shards=(Shard("model.safetensors", header, ("w", "v", "x"), {"x": stray}),),
        files={"config.json": config},
    )
    assert list(file_parts(manifest, tensors.__getitem__, lambda tensor: b"{}")) == [
        ("config.json", [FilePart(tensor=tensors[config])]),
        (
            "model.safetensors",
            [
                FilePart(literal=struct.pack("<Q", 2) + b"{}"),
                *(FilePart(tensor=tensors[name]) for name in (w, v, stray)),
            ],
        ),
    ]
