"""Branches and tags as the repository makes, moves and deletes them, and what their logs tell."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest

from mergegit import Repository
from mergegit.errors import InvalidName, MergegitError, RefConflict, UnknownRef
from tests.families import EXPERTS, Family, tiny_checkpoint


def test_every_checkpoint_has_a_branch(tiny: Repository) -> None:
    assert list(tiny.branches()) == sorted(["base", *EXPERTS])
    assert tiny.tags() == {}


def test_a_branch_and_a_tag_are_made_at_a_commit(tiny: Repository) -> None:
    commit = tiny.resolve("math")
    assert tiny.create_branch("best", "math") == commit
    assert tiny.create_tag("v1", "math~0") == commit
    assert tiny.branches()["best"] == tiny.tags()["v1"] == commit


def test_a_name_that_is_taken_stays_where_it_is(tiny: Repository) -> None:
    before = tiny.resolve("math")
    with pytest.raises(RefConflict, match="branch math exists already"):
        tiny.create_branch("math", "code")
    tiny.create_tag("v1", "math")
    with pytest.raises(RefConflict, match="tag v1 exists already"):
        tiny.create_tag("v1", "code")
    assert tiny.resolve("math") == tiny.tags()["v1"] == before


@pytest.mark.parametrize(
    "name",
    ["", "a b", "a~1", "a^", "a:b", "a..b", "/a", "a/", "a//b", ".a", "a/.b", "-a", "a.lock",
     "a\0", "a\n", "a\x7f", "a*", "[a", "a?", "a\\b", "a@b", "HEAD", "deadbeef", "0123", "\udcff",
     "n" * 201],
)  # fmt: skip
def test_a_name_that_could_be_misread_is_refused(name: str, tiny: Repository) -> None:
    before = (tiny.branches(), tiny.tags())
    for make in (tiny.create_branch, tiny.create_tag):
        with pytest.raises(InvalidName):
            make(name, "math")
    assert (tiny.branches(), tiny.tags()) == before


@pytest.mark.parametrize("name", ["a", "a/b", "Größe", "v1.0", "a+b", "abc", "xyz-0123", "a_b=c"])
def test_a_good_name_is_taken(name: str, tiny: Repository) -> None:
    tiny.create_branch(name, "math")
    assert tiny.resolve(name) == tiny.resolve("math")


def test_a_name_is_not_the_directory_of_others(tiny: Repository) -> None:
    tiny.create_branch("release/v1", "math")
    for name in ("release", "release/v1/small"):
        with pytest.raises(RefConflict, match="can't stand beside release/v1"):
            tiny.create_branch(name, "math")
    tiny.delete_branch("release/v1")
    tiny.create_branch("release", "math")
    assert "release" in tiny.branches()


def test_a_directory_that_a_killed_command_left_is_no_obstacle(tiny: Repository) -> None:
    (tiny.store.location.refs / "heads" / "release" / "inner").mkdir(parents=True)
    tiny.create_branch("release", "math")
    assert tiny.resolve("release") == tiny.resolve("math")


def test_a_deleted_ref_is_gone_and_its_commit_is_not(tiny: Repository) -> None:
    commit = tiny.resolve("math")
    tiny.create_tag("v1", "math")
    assert tiny.delete_branch("math") == commit
    assert tiny.delete_tag("v1") == commit
    with pytest.raises(UnknownRef):
        tiny.resolve("math")
    with pytest.raises(UnknownRef):
        tiny.resolve("v1")
    assert tiny.resolve(commit.hex()) == commit
    assert tiny.load(commit.hex())


def test_what_is_not_there_can_not_be_deleted_or_renamed(tiny: Repository) -> None:
    with pytest.raises(UnknownRef, match="there is no branch nothing"):
        tiny.delete_branch("nothing")
    with pytest.raises(UnknownRef, match="there is no tag math"):
        tiny.delete_tag("math")
    with pytest.raises(UnknownRef, match="there is no branch nothing"):
        tiny.rename_branch("nothing", "something")


def test_a_renamed_branch_has_one_name(tiny: Repository) -> None:
    commit = tiny.resolve("math")
    assert tiny.rename_branch("math", "maths") == commit
    assert "math" not in tiny.branches()
    assert tiny.resolve("maths") == commit


def test_renaming_onto_another_branch_changes_neither(tiny: Repository) -> None:
    before = tiny.branches()
    with pytest.raises(RefConflict):
        tiny.rename_branch("math", "code")
    assert tiny.branches() == before


def test_the_log_of_a_branch_tells_where_it_stood(tiny: Repository, tiny_family: Family) -> None:
    first = tiny.resolve("math")
    second = tiny.add(tiny_family.experts[1], name="math").commit
    tiny.delete_branch("math")
    entries = tiny.reflog("math")
    assert [(entry.old, entry.new) for entry in entries] == [
        (second, None),
        (first, second),
        (None, first),
    ]
    assert [entry.reason.split(":")[0] for entry in entries] == ["deleted", "add", "add"]
    assert {entry.author for entry in entries} == {tiny.author}


def test_a_branch_without_a_log_has_an_empty_one(tiny: Repository) -> None:
    assert tiny.reflog("nothing") == []


def test_of_two_writers_of_one_branch_one_wins_and_one_is_told(
    tiny: Repository, tmp_path: Path
) -> None:
    """The other writer moves the branch after this one has looked where it stands."""
    path = tiny_checkpoint(tmp_path / "math", moved=7)
    commit = tiny.resolve("code")
    pending = ["math"]

    def meddle(_what: str, _done: int, _total: int) -> None:
        while pending:
            tiny.delete_branch(pending[0])
            tiny.create_branch(pending.pop(), "code")

    with pytest.raises(RefConflict, match="moved by another command") as caught:
        tiny.add(path, progress=meddle)
    assert "run the command again" in caught.value.hint
    assert tiny.resolve("math") == commit
    assert tiny.add(path).is_new
    assert tiny.fsck().is_clean


def test_many_threads_make_many_branches(tiny: Repository) -> None:
    failed: list[MergegitError] = []

    def make(number: int) -> None:
        try:
            tiny.create_branch(f"b/{number % 10}", "math")
        except RefConflict as error:
            failed.append(error)

    threads = [threading.Thread(target=make, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(failed) == 10
    assert sum(name.startswith("b/") for name in tiny.branches()) == 10
    assert all(len(tiny.reflog(f"b/{number}")) == 1 for number in range(10))


def test_history_is_that_of_branches_and_tags(tiny: Repository, tiny_family: Family) -> None:
    tiny.create_tag("v1", "math")
    tiny.delete_branch("math")
    tiny.delete_branch("code")
    shown = [commit_id for commit_id, _ in tiny.log()]
    assert set(shown) == {tiny.resolve("base"), tiny.resolve("v1"), tiny.resolve("prose")}
    assert shown[-1] == tiny.resolve("base")
    assert [commit_id for commit_id, _ in tiny.log("v1")] == [
        tiny.resolve("v1"),
        tiny.resolve("base"),
    ]


def test_a_repository_may_be_moved(tiny: Repository, tmp_path: Path) -> None:
    commit = tiny.resolve("math")
    root = tiny.store.location.root.parent
    tiny.close()
    shutil.move(root, tmp_path / "elsewhere")
    with Repository.open(tmp_path / "elsewhere") as moved:
        assert moved.resolve("math") == commit
        assert moved.fsck().is_clean


# -- reset and reflog -----------------------------------------------------------------------------


def test_a_branch_is_reset_to_any_commit_and_back(tiny: Repository) -> None:
    math, code = tiny.resolve("math"), tiny.resolve("code")
    assert tiny.reset_branch("math", "code") == (math, code)
    assert tiny.resolve("math") == code
    assert tiny.reset_branch("math", "math@{1}") == (code, math)
    assert [entry.reason for entry in tiny.reflog("math")[:2]] == [
        "reset to math@{1}", "reset to code",
    ]  # fmt: skip


def test_a_reset_to_where_it_stands_is_no_move(tiny: Repository) -> None:
    math = tiny.resolve("math")
    assert tiny.reset_branch("math", "math") == (math, math)
    assert len(tiny.reflog("math")) == 1


def test_only_what_is_there_is_reset(tiny: Repository) -> None:
    tiny.create_tag("v1", "math")
    for name in ("v1", "nothing"):
        with pytest.raises(UnknownRef, match=f"there is no branch {name}"):
            tiny.reset_branch(name, "base")
    with pytest.raises(UnknownRef):
        tiny.reset_branch("math", "nothing")
    assert len(tiny.reflog("math")) == 1


def test_the_log_of_all_is_in_the_order_of_time(tiny: Repository) -> None:
    clock = iter(range(2_000_000_000, 2_000_000_100))
    tiny._clock = lambda: float(next(clock))
    tiny.create_tag("v1", "math")
    tiny.delete_branch("code")
    tiny.reset_branch("math", "base")
    moves = tiny.reflog()
    assert [(move.space, move.selector) for move in moves[:3]] == [
        ("heads", "math@{0}"), ("heads", "code@{0}"), ("tags", "v1@{0}"),
    ]  # fmt: skip
    assert len(moves) == 7
    for move in moves:
        if move.new is not None:
            assert tiny.resolve(move.selector) == move.new
