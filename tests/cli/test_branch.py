"""`mergegit branch`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.cli.conftest import CommandLine
from tests.trees import fingerprint


def test_a_line_for_each_branch(mergegit: CommandLine, commit_of: Callable[[str], str]) -> None:
    assert mergegit.ok("branch").lines == [
        f"base    {commit_of('base')[:10]}  add base",
        f"code    {commit_of('code')[:10]}  add code",
        f"math    {commit_of('math')[:10]}  add math",
        f"merged  {commit_of('merged')[:10]}  merge math, code by task_arithmetic under 60%",
        f"prose   {commit_of('prose')[:10]}  add prose",
    ]


def test_a_branch_is_made(mergegit: CommandLine, commit_of: Callable[[str], str]) -> None:
    commit = commit_of("math")
    assert mergegit.ok("branch", "best", "merged^2").out == (f"branch best made at {commit[:10]}\n")
    assert commit_of("best") == commit


def test_a_branch_is_renamed(mergegit: CommandLine, commit_of: Callable[[str], str]) -> None:
    commit = commit_of("math")
    assert mergegit.ok("branch", "-m", "math", "maths").out == (
        f"branch maths was math; it is at {commit[:10]}\n"
    )
    assert commit_of("maths") == commit
    mergegit("show", "math").failed()


def test_a_branch_is_deleted(mergegit: CommandLine, commit_of: Callable[[str], str]) -> None:
    commit = commit_of("math")
    assert mergegit.ok("branch", "-d", "math").out == (
        f"branch math deleted; it was at {commit[:10]}\n"
    )
    mergegit("show", "math").failed()
    mergegit.ok("show", commit)


def test_json(mergegit: CommandLine, commit_of: Callable[[str], str]) -> None:
    names = ["base", "code", "math", "merged", "prose"]
    assert mergegit.ok("branch", "--json").json == {name: commit_of(name) for name in names}
    math = commit_of("math")
    assert mergegit.ok("branch", "best", "math", "--json").json == {
        "branch": "best",
        "commit": math,
    }
    assert mergegit.ok("branch", "-m", "best", "good", "--json").json == {
        "branch": "good", "commit": math,
    }  # fmt: skip
    assert mergegit.ok("branch", "-d", "good", "--json").json == {"branch": "good", "commit": math}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["best"], "name the commit that the branch should point to, too"),
        (["-m", "math"], "name the branch's new name, too"),
        (["-d"], "name the branch"),
        (["-d", "math", "code"], "-d takes one name"),
        (["-d", "-m", "math"], "-d and -m exclude each other"),
    ],
)
def test_wrong_usage_changes_nothing(
    arguments: list[str], said: str, mergegit: CommandLine
) -> None:
    before = fingerprint(mergegit.directory)
    assert mergegit("branch", *arguments).failed(2)[0] == said
    assert fingerprint(mergegit.directory) == before


def test_a_name_that_is_taken(mergegit: CommandLine) -> None:
    message, hint = mergegit("branch", "math", "base").failed()
    assert message == "branch math exists already"
    assert "mergegit branch -d" in hint
