"""Refs: names, compare-and-swap, logs, and many processes at once."""

from __future__ import annotations

import errno
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mergegit.errors import Damaged, InvalidName, RefConflict, Unconfirmed, UnknownRef
from mergegit.objects import CommitId
from mergegit.storage.location import Location, create
from mergegit.storage.refs import LogEntry, Refs, Space, check_name
from tests.storage.samples import an_id, move

A, B, C = (CommitId(letter * 32) for letter in (b"\xaa", b"\xbb", b"\xcc"))


@pytest.fixture
def refs(location: Location) -> Refs:
    return Refs(location)


# -- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "main",
        "math-v2",
        "feature/math",
        "a/b/c/d",
        "llama-3.1-8b",
        "naïve",
        "模型",
        "v1.0",
        "abc",
        "deadbeefz",
        "a" * 200,
        "a.b",
        "locked",
        "HEADS",
    ],
)
def test_good_names_are_allowed(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        "/a",
        "a/",
        "a//b",
        "a..b",
        "..",
        "../a",
        ".a",
        "a/.b",
        "a.",
        "-a",
        "a b",
        "a\tb",
        "a\nb",
        "a\0b",
        "a\x7fb",
        "a~1",
        "a^",
        "a:b",
        "a?",
        "a*",
        "a[b]",
        "a\\b",
        "a@{1}",
        "@",
        "a.lock",
        "a.lock/b",
        "HEAD",
        "dead",
        "0" * 64,
        "deadbeef",
        "a" * 201,
        "é" * 101,
        "\udcff",
        "caf\udce9",
    ],
)
def test_bad_names_are_refused(name: str) -> None:
    with pytest.raises(InvalidName) as caught:
        check_name(name)
    assert caught.value.hint
    caught.value.message.encode()


def test_a_refused_name_is_told_to_be_a_branchs_or_a_tags() -> None:
    for space, word in (("heads", "branch"), ("tags", "tag")):
        with pytest.raises(InvalidName, match=word):
            check_name("a b", space)  # type: ignore[arg-type]


NAMES = st.text(max_size=20) | st.text("ab./-@{~lock", max_size=12)


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
@settings(max_examples=60, deadline=None)
@given(NAMES)
def test_names_that_are_allowed_are_allowed_by_git(name: str) -> None:
    with suppress(InvalidName):
        check_name(name)
        result = subprocess.run(["git", "check-ref-format", f"refs/heads/{name}"], check=False)
        assert result.returncode == 0


@settings(max_examples=30, deadline=None)
@given(NAMES)
@example("é" * 100)
@example("a/" * 99 + "b")
@example("%2F")
@example("a.log/b")
def test_every_allowed_name_can_be_stored_and_listed(name: str) -> None:
    try:
        check_name(name)
    except InvalidName:
        return
    with tempfile.TemporaryDirectory() as directory:
        refs = Refs(create(Path(directory))[0])
        refs.update(move(name, None, A))
        assert refs.read("heads", name) == A
        assert refs.all("heads") == {name: A}
        assert [entry.new for entry in refs.log("heads", name)] == [A]
        refs.update(move(name, A, None))
        assert refs.all("heads") == {}


@settings(max_examples=25, deadline=None)
@given(NAMES)
def test_a_name_that_is_not_allowed_changes_nothing(name: str) -> None:
    try:
        check_name(name)
    except InvalidName:
        with tempfile.TemporaryDirectory() as directory:
            refs = Refs(create(Path(directory))[0])
            before = sorted(Path(directory).rglob("*"))
            with pytest.raises(InvalidName):
                refs.update(move(name, None, A))
            assert sorted(Path(directory).rglob("*")) == before


@pytest.mark.parametrize("name", ["a\0b", "../../format", "a" * 300, "", "/", ".", "\udcff", "a/"])
def test_a_name_that_no_ref_can_have_names_none(name: str, refs: Refs) -> None:
    refs.update(move("a", None, A))
    assert refs.read("heads", name) is None
    with pytest.raises(UnknownRef):
        refs.require("heads", name)


# -- moving ---------------------------------------------------------------------------------------


def test_a_new_ref_stands_where_it_was_put(refs: Refs) -> None:
    refs.update(move("main", None, A))
    assert refs.read("heads", "main") == refs.require("heads", "main") == A
    assert refs.all("heads") == {"main": A}


def test_the_file_of_a_ref_is_a_line_of_hexadecimal_digits(refs: Refs, location: Location) -> None:
    refs.update(move("a/b", None, A))
    assert (location.refs / "heads" / "a" / "b").read_bytes() == b"aa" * 32 + b"\n"


def test_a_ref_moves_from_where_it_is_expected(refs: Refs) -> None:
    refs.update(move("main", None, A))
    refs.update(move("main", A, B))
    assert refs.read("heads", "main") == B


@pytest.mark.parametrize(
    ("old", "new"), [(B, C), (B, None), (B, A)], ids=["move", "delete", "back"]
)
def test_a_ref_that_moved_meanwhile_stays(old: CommitId, new: CommitId, refs: Refs) -> None:
    refs.update(move("main", None, A))
    with pytest.raises(RefConflict, match="moved by another command") as caught:
        refs.update(move("main", old, new))
    assert "again" in caught.value.hint
    assert refs.read("heads", "main") == A
    assert len(refs.log("heads", "main")) == 1


@pytest.mark.parametrize(("space", "word"), [("heads", "branch"), ("tags", "tag")])
def test_a_ref_that_must_be_new_does_not_replace_another(
    space: Space, word: str, refs: Refs
) -> None:
    refs.update(move("v1", None, A, space=space))
    with pytest.raises(RefConflict, match=f"{word} v1 exists already"):
        refs.update(move("v1", None, B, space=space))
    assert refs.read(space, "v1") == A


def test_a_ref_that_is_gone_does_not_move(refs: Refs) -> None:
    with pytest.raises(RefConflict):
        refs.update(move("main", A, B))
    assert refs.read("heads", "main") is None


def test_branches_and_tags_do_not_meet(refs: Refs) -> None:
    refs.update(move("v1", None, A))
    refs.update(move("v1", None, B, space="tags"))
    assert (refs.all("heads"), refs.all("tags")) == ({"v1": A}, {"v1": B})


def test_a_ref_that_is_not_there_is_unknown(refs: Refs) -> None:
    assert refs.read("heads", "main") is None
    with pytest.raises(UnknownRef, match="no branch main"):
        refs.require("heads", "main")
    with pytest.raises(UnknownRef, match="no tag v1"):
        refs.require("tags", "v1")


def test_refs_are_listed_in_order_however_deep(refs: Refs) -> None:
    for name in ("b", "a/z", "c/d/e", "a/b"):
        refs.update(move(name, None, A))
    assert list(refs.all("heads")) == ["a/b", "a/z", "b", "c/d/e"]


def test_what_a_killed_command_left_beside_the_refs_is_not_listed(
    refs: Refs, location: Location
) -> None:
    refs.update(move("main", None, A))
    (location.refs / "heads" / ".main.1234.tmp").write_text("half")
    assert refs.all("heads") == {"main": A}


# -- a name that is the beginning of another ------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second"), [("a", "a/b"), ("a/b", "a"), ("a", "a/b/c"), ("a/b/c", "a/b")]
)
def test_a_name_can_not_be_a_folder_of_others(first: str, second: str, refs: Refs) -> None:
    refs.update(move(first, None, A))
    with pytest.raises(RefConflict, match="can't stand beside"):
        refs.update(move(second, None, B))
    assert refs.all("heads") == {first: A}
    assert refs.read("heads", second) is None


def test_names_that_only_look_like_folders_stand_beside_each_other(refs: Refs) -> None:
    for name in ("a", "ab/c", "a-b", "b/a"):
        refs.update(move(name, None, A))
    assert len(refs.all("heads")) == 4


def test_a_deleted_name_makes_room_for_names_below_it_and_back(refs: Refs) -> None:
    refs.update(move("a", None, A))
    refs.update(move("a", A, None))
    refs.update(move("a/b/c", None, B))
    refs.update(move("a/b/c", B, None))
    refs.update(move("a", None, C))
    assert refs.all("heads") == {"a": C}


def test_folders_that_a_killed_command_left_are_in_no_ones_way(
    refs: Refs, location: Location
) -> None:
    (location.refs / "heads" / "a" / "b").mkdir(parents=True)
    refs.update(move("a", None, A))
    assert refs.all("heads") == {"a": A}


# -- deleting -------------------------------------------------------------------------------------


def test_a_deleted_ref_is_gone_with_its_folders(refs: Refs, location: Location) -> None:
    refs.update(move("a/b/c", None, A))
    refs.update(move("a/d", None, A))
    refs.update(move("a/b/c", A, None))
    assert refs.all("heads") == {"a/d": A}
    assert not (location.refs / "heads" / "a" / "b").exists()
    refs.update(move("a/d", A, None))
    assert os.listdir(location.refs / "heads") == []


def test_deleting_what_is_not_there_is_a_conflict(refs: Refs) -> None:
    with pytest.raises(RefConflict):
        refs.update(move("main", A, None))


# -- logs -----------------------------------------------------------------------------------------


def test_the_log_tells_where_a_ref_stood_newest_first(refs: Refs) -> None:
    refs.update(move("main", None, A, time=1, reason="add math"))
    refs.update(move("main", A, B, time=2, reason="merge"))
    refs.update(move("main", B, None, time=3, reason="delete"))
    author = "Ada <ada@example.org>"
    assert refs.log("heads", "main") == [
        LogEntry(B, None, author, 3, "delete"),
        LogEntry(A, B, author, 2, "merge"),
        LogEntry(None, A, author, 1, "add math"),
    ]


def test_the_line_of_a_log_is_frozen(refs: Refs, location: Location) -> None:
    refs.update(move("a/b", None, A, reason="add math"))
    (log,) = (location.logs / "heads").iterdir()
    assert log.read_bytes() == (
        b"0" * 64 + b" " + b"aa" * 32 + b" 1700000000 Ada <ada@example.org>\tadd math\n"
    )


def test_a_ref_without_a_past_has_an_empty_log(refs: Refs) -> None:
    assert refs.log("heads", "main") == []


def test_the_log_outlives_the_ref(refs: Refs) -> None:
    refs.update(move("main", None, A))
    refs.update(move("main", A, None))
    refs.update(move("main", None, B))
    assert [entry.new for entry in refs.log("heads", "main")] == [B, None, A]


def test_logs_of_names_that_look_alike_are_kept_apart(refs: Refs) -> None:
    for name, commit in (("a/b", A), ("a%2Fb", B), ("a-b", C)):
        refs.update(move(name, None, commit))
    assert [refs.log("heads", name)[0].new for name in ("a/b", "a%2Fb", "a-b")] == [A, B, C]


LINES = st.text(max_size=20)


@settings(max_examples=25, deadline=None)
@given(LINES, LINES)
@example("", "")
@example("a\u2028b", "c\x85d\x0be\x1cf")
@example("Ada\nB", "a\ttab and\r\nlines")
def test_any_author_and_reason_are_one_line(author: str, reason: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        refs = Refs(create(Path(directory))[0])
        refs.update(move("main", None, A, author=author, reason=reason))
        refs.update(move("main", A, B))
        newest, oldest = refs.log("heads", "main")
        assert (newest.old, newest.new, oldest.new) == (A, B, A)
        for text, found in ((author, oldest.author), (reason, oldest.reason)):
            assert found == text.translate(dict.fromkeys(map(ord, "\0\t\r\n"), " "))


def test_what_is_not_text_is_written_as_a_question_mark(refs: Refs) -> None:
    refs.update(move("main", None, A, author="Andr\udce9", reason="caf\udce9"))
    (entry,) = refs.log("heads", "main")
    assert (entry.author, entry.reason) == ("Andr?", "caf?")


def test_the_log_is_written_before_the_ref_moves(
    refs: Refs, location: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    refs.update(move("main", None, A))

    def fail(source: Path, target: Path) -> None:
        raise OSError("the power went out")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        with pytest.raises(OSError, match="power"):
            refs.update(move("main", A, B))
    assert refs.read("heads", "main") == A
    assert refs.log("heads", "main")[0].new == B
    refs.update(move("main", A, C))
    assert refs.read("heads", "main") == C


def test_a_line_that_was_cut_short_does_not_swallow_the_next(
    refs: Refs, location: Location
) -> None:
    refs.update(move("main", None, A))
    (log,) = (location.logs / "heads").iterdir()
    log.write_bytes(log.read_bytes() + b"cut short")
    refs.update(move("main", A, B))
    assert log.read_bytes().splitlines()[-1].startswith(A.hex().encode())


def test_a_line_whose_beginning_a_power_cut_took_counts_for_nothing(
    refs: Refs, location: Location
) -> None:
    """A disk may write the end of a line and not its beginning, which reads as zeros then."""
    refs.update(move("main", None, A))
    (log,) = (location.logs / "heads").iterdir()
    whole = log.read_bytes()
    log.write_bytes(whole + bytes(100) + whole[-50:])
    assert [entry.new for entry in refs.log("heads", "main")] == [A]
    refs.update(move("main", A, B))
    assert log.read_bytes().startswith(whole + A.hex().encode())
    assert [entry.new for entry in refs.log("heads", "main")] == [B, A]


def test_a_move_that_the_disk_does_not_confirm_is_told_as_made(
    refs: Refs, location: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    refs.update(move("main", None, A))
    heads, sync = location.refs / "heads", os.fsync

    def fail(fd: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}") == os.fspath(heads):
            raise OSError(errno.EIO, "the disk is ill")
        sync(fd)

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(Unconfirmed, match="is written, but the disk did not confirm it"):
        refs.update(move("main", A, B))
    assert refs.read("heads", "main") == B
    with pytest.raises(Unconfirmed, match="is renamed to"):
        refs.rename(move("main", B, None), move("other", None, B))
    assert refs.read("heads", "other") == B
    with pytest.raises(Unconfirmed, match="is removed, but"):
        refs.update(move("other", B, None))
    assert refs.read("heads", "other") is None


def test_who_has_looked_before_loses_to_another_and_is_told_to_try_again(refs: Refs) -> None:
    refs.update(move("main", None, A))
    with pytest.raises(RefConflict, match="moved by another command") as caught:
        refs.update(move("main", None, B), has_looked=True)
    assert "run the command again" in caught.value.hint


def test_what_killed_commands_left_is_cleared(refs: Refs, location: Location) -> None:
    refs.update(move("a/b", None, A))
    for name in ("a/empty", "left/over"):
        (location.refs / "heads" / name).mkdir(parents=True)
    (location.temporary / "ref").write_bytes(b"half")
    refs.clear()
    assert refs.all("heads") == {"a/b": A}
    left = {path.relative_to(location.refs).as_posix() for path in location.refs.rglob("*")}
    assert left == {"heads", "heads/a", "heads/a/b", "tags"}
    assert list(location.temporary.iterdir()) == []


@pytest.mark.parametrize("data", [b"what is this", b"\xff\xfe", b"\n", b"aa bb cc dd\te"])
def test_a_damaged_log_is_told_as_such(data: bytes, refs: Refs, location: Location) -> None:
    refs.update(move("main", None, A))
    (log,) = (location.logs / "heads").iterdir()
    log.write_bytes(data + b"\n")
    with pytest.raises(Damaged, match="a line of a ref's log"):
        refs.log("heads", "main")


# -- expiry ---------------------------------------------------------------------------------------


def stands(log: list[LogEntry]) -> list[tuple[bytes | None, bytes | None]]:
    return [(entry.old, entry.new) for entry in log]


def test_a_log_forgets_what_is_too_old(refs: Refs) -> None:
    refs.update(move("main", None, A, time=100))
    refs.update(move("main", A, B, time=200))
    refs.update(move("main", B, C, time=300))
    assert refs.expired("heads", "main", 200) == 2
    refs.expire("heads", "main", 200)
    assert stands(refs.log("heads", "main")) == [(B, C)]


def test_a_line_between_younger_ones_stays_whatever_its_clock_said(refs: Refs) -> None:
    for old, new, time in ((None, A, 100), (A, B, 300), (B, C, 50), (C, A, 400)):
        refs.update(move("main", old, new, time=time))
    refs.expire("heads", "main", 200)
    assert stands(refs.log("heads", "main")) == [(C, A), (B, C), (A, B)]


def test_of_a_ref_that_exists_it_is_remembered_who_moved_it_there(refs: Refs) -> None:
    refs.update(move("main", None, A, time=100))
    refs.update(move("main", A, B, time=200, author="Bob", reason="merge"))
    refs.expire("heads", "main", None)
    assert refs.log("heads", "main") == [LogEntry(None, B, "Bob", 200, "merge")]
    assert refs.expired("heads", "main", None) == 0
    assert refs.read("heads", "main") == B


def test_a_deleted_ref_is_forgotten_with_its_log(refs: Refs, location: Location) -> None:
    refs.update(move("a/b%c", None, A, time=100))
    refs.update(move("a/b%c", A, None, time=200))
    assert refs.logged("heads") == ["a/b%c"]
    refs.expire("heads", "a/b%c", 199)
    assert stands(refs.log("heads", "a/b%c")) == [(A, None)]
    refs.expire("heads", "a/b%c", 200)
    assert refs.logged("heads") == []
    assert list((location.logs / "heads").iterdir()) == []


def test_a_log_goes_on_after_it_forgot(refs: Refs) -> None:
    refs.update(move("main", None, A, time=100))
    refs.expire("heads", "main", None)
    refs.update(move("main", A, B, time=200))
    assert stands(refs.moves("heads", "main")) == [(A, B), (None, A)]


def test_a_line_of_a_move_that_did_not_happen_is_no_move(refs: Refs, location: Location) -> None:
    """A crash between the log and the ref leaves one."""
    refs.update(move("main", None, A, time=100))
    path = location.refs / "heads" / "main"
    refs.update(move("main", A, B, time=200))
    path.write_text(f"{A.hex()}\n")
    assert stands(refs.log("heads", "main")) == [(A, B), (None, A)]
    assert stands(refs.moves("heads", "main")) == [(None, A)]
    refs.update(move("main", A, C, time=300))
    assert stands(refs.moves("heads", "main")) == [(A, C), (None, A)]
    refs.expire("heads", "main", 250)
    assert stands(refs.log("heads", "main")) == [(A, C)]


# -- damage and durability ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data", [b"", b"\n", b"aa" * 31, b"aa" * 33, b"zz" * 32, b"\xff\xfe", b"ref: refs/heads/x\n"]
)
def test_a_ref_that_holds_no_commit_is_damaged(data: bytes, refs: Refs, location: Location) -> None:
    (location.refs / "heads" / "main").write_bytes(data)
    for look in (lambda: refs.read("heads", "main"), lambda: refs.all("heads")):
        with pytest.raises(Damaged, match="branch main") as caught:
            look()
        assert str(location.logs) in caught.value.hint


def test_a_move_is_durable(refs: Refs, location: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    fsync = os.fsync

    def record_fsync(fd: int) -> None:
        synced.append(os.fstat(fd).st_ino)
        fsync(fd)

    monkeypatch.setattr(os, "fsync", record_fsync)
    refs.update(move("main", None, A))
    path = location.refs / "heads" / "main"
    (log,) = (location.logs / "heads").iterdir()
    assert {path.stat().st_ino, path.parent.stat().st_ino, log.stat().st_ino} <= set(synced)
    assert synced.index(log.stat().st_ino) < synced.index(path.stat().st_ino)


# -- many at once ---------------------------------------------------------------------------------

WORKERS, MOVES = 3, 12


def _advance(root: Path, worker: int) -> None:
    """Move the branch to commits of one's own, from wherever it stands."""
    refs = Refs(Location(root))
    for number in range(MOVES):
        new = an_id(1 + worker * MOVES + number)
        while True:
            try:
                refs.update(move("main", refs.read("heads", "main"), new, reason=str(worker)))
                break
            except RefConflict:
                continue


def test_many_processes_lose_no_move(refs: Refs, location: Location) -> None:
    context = multiprocessing.get_context("spawn")
    workers = [
        context.Process(target=_advance, args=(location.root, worker)) for worker in range(WORKERS)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0] * WORKERS
    log = refs.log("heads", "main")[::-1]
    assert sorted(entry.new or b"" for entry in log) == [
        an_id(number) for number in range(1, 1 + WORKERS * MOVES)
    ]
    assert [entry.old for entry in log] == [None, *(entry.new for entry in log[:-1])]
    assert refs.read("heads", "main") == log[-1].new


def _create(root: Path, name: str, worker: int) -> None:
    with suppress(RefConflict):
        Refs(Location(root)).update(move(name, None, an_id(worker + 1)))


def test_of_many_that_create_a_branch_one_does(refs: Refs, location: Location) -> None:
    context = multiprocessing.get_context("spawn")
    names = ["a", "a/b", "a"]
    workers = [
        context.Process(target=_create, args=(location.root, name, number))
        for number, name in enumerate(names)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert len(refs.all("heads")) == 1


def test_a_holder_of_the_lock_that_is_killed_blocks_nobody(refs: Refs, location: Location) -> None:
    script = (
        "import fcntl, os, sys\n"
        "fd = os.open(sys.argv[1], os.O_RDWR)\n"
        "fcntl.flock(fd, fcntl.LOCK_EX)\n"
        "print('held', flush=True)\n"
        "sys.stdin.read()\n"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", script, location.lock_file],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        holder.kill()
    refs.update(move("main", None, A))
    assert refs.read("heads", "main") == A
