"""`mergegit reflog`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mergegit.cli.text import local_time
from tests.cli.conftest import AUTHOR, CommandLine


def test_where_who_when_and_by_which_command(
    mergegit: CommandLine, commit_of: Callable[[str], str]
) -> None:
    (line,) = mergegit.ok("reflog", "merged").lines
    commit, when = commit_of("merged")[:10], local_time(1_700_000_100)
    assert line == f"{commit} merged@{{0}}  {when}  {AUTHOR}  merge: math, code"


def test_all_refs_newest_first(mergegit: CommandLine) -> None:
    mergegit.ok("branch", "a-long-name", "math")
    lines = mergegit.ok("reflog").lines
    selectors = [line.split()[1] for line in lines]
    assert selectors == [
        "a-long-name@{0}", "merged@{0}", "v1@{0}", "prose@{0}", "code@{0}", "math@{0}", "base@{0}",
    ]  # fmt: skip
    assert len({line.index("  ", line.index("}")) for line in lines}) > 1
    assert len({line.index(AUTHOR) for line in lines}) == 1


def test_a_deleted_branch(mergegit: CommandLine, commit_of: Callable[[str], str]) -> None:
    commit = commit_of("math")
    mergegit.ok("branch", "-d", "math")
    deleted, added = mergegit.ok("reflog", "math").lines
    assert deleted.startswith("---------- math@{0}  ")
    assert deleted.endswith("  deleted")
    assert added.startswith(f"{commit[:10]} math@{{1}}  ")


def test_json(mergegit: CommandLine, commit_of: Callable[[str], str]) -> None:
    (tag,) = mergegit.ok("reflog", "v1", "--json").json
    assert tag == {
        "ref": "v1",
        "kind": "tag",
        "number": 0,
        "selector": "v1@{0}",
        "old": None,
        "new": commit_of("merged"),
        "author": AUTHOR,
        "time": 1_700_000_100,
        "reason": "created from merged",
    }
    mergegit.ok("branch", "-d", "math")
    deleted, added = mergegit.ok("reflog", "math", "--json").json
    assert (deleted["kind"], deleted["new"]) == ("branch", None)
    assert deleted["old"] == added["new"]


def test_what_never_was_is_unknown(mergegit: CommandLine) -> None:
    message, hint = mergegit("reflog", "mathh").failed()
    assert message == "there is no branch, tag or commit 'mathh'"
    assert hint.startswith("did you mean math")


@pytest.mark.parametrize("ref", ["merged~1", "math@{0}"])
def test_what_is_no_branch_or_tag_has_no_log(ref: str, mergegit: CommandLine) -> None:
    message, hint = mergegit("reflog", ref).failed()
    assert message == f"{ref!r} has no log"
    assert "`mergegit reflog`" in hint


def test_an_empty_repository_has_an_empty_log(nowhere: CommandLine) -> None:
    nowhere.ok("init")
    assert nowhere.ok("reflog").out == ""
    assert nowhere.ok("reflog", "--json").json == []
