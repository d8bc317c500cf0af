"""`mergegit reset`."""

from __future__ import annotations

from collections.abc import Callable

from tests.cli.conftest import CommandLine


def test_a_branch_moves_back_and_forth(
    mergegit: CommandLine, commit_of: Callable[[str], str]
) -> None:
    merged, base = commit_of("merged"), commit_of("base")
    assert mergegit.ok("reset", "merged", "merged~1").out == (
        f"branch merged moved to {base[:10]}; it was at {merged[:10]}\n"
    )
    assert commit_of("merged") == base
    mergegit.ok("reset", "merged", "merged@{1}")
    assert commit_of("merged") == merged


def test_a_branch_that_stands_there_stays(
    mergegit: CommandLine, commit_of: Callable[[str], str]
) -> None:
    assert mergegit.ok("reset", "merged", "v1").out == (
        f"branch merged is at {commit_of('v1')[:10]} already\n"
    )
    assert len(mergegit.ok("reflog", "merged").lines) == 1


def test_json(mergegit: CommandLine, commit_of: Callable[[str], str]) -> None:
    was, commit = commit_of("math"), commit_of("code")
    assert mergegit.ok("reset", "math", "code", "--json").json == {
        "branch": "math", "commit": commit, "was": was,
    }  # fmt: skip


def test_the_log_says_who_did_it_and_how(mergegit: CommandLine) -> None:
    mergegit.ok("reset", "math", "code")
    assert mergegit.ok("reflog", "math").lines[0].endswith("Ada <ada@example.org>  reset to code")


def test_only_branches_are_reset(mergegit: CommandLine) -> None:
    message, hint = mergegit("reset", "v1", "math").failed()
    assert (message, hint) == ("there is no branch v1", "`mergegit branch` lists them")


def test_to_what_is_there(mergegit: CommandLine) -> None:
    message, _ = mergegit("reset", "math", "nothing").failed()
    assert message == "there is no branch, tag or commit 'nothing'"
