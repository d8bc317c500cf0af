"""`mergegit tag`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.cli.conftest import CommandLine


def test_a_line_for_each_tag(mergegit: CommandLine, commit_of: Callable[[str], str]) -> None:
    commit = commit_of("merged")[:10]
    assert mergegit.ok("tag").lines == [
        f"v1  {commit}  merge math, code by task_arithmetic under 60%"
    ]


def test_a_tag_is_made_and_deleted(mergegit: CommandLine, commit_of: Callable[[str], str]) -> None:
    commit = commit_of("math")[:10]
    assert mergegit.ok("tag", "v0", "math").out == f"tag v0 made at {commit}\n"
    assert mergegit.ok("tag", "-d", "v0").out == f"tag v0 deleted; it was at {commit}\n"
    mergegit("show", "v0").failed()


def test_a_tag_does_not_move(mergegit: CommandLine, commit_of: Callable[[str], str]) -> None:
    before = commit_of("v1")
    message, hint = mergegit("tag", "v1", "math").failed()
    assert message == "tag v1 exists already"
    assert "mergegit tag -d" in hint
    assert commit_of("v1") == before


def test_json(mergegit: CommandLine, commit_of: Callable[[str], str]) -> None:
    assert mergegit.ok("tag", "--json").json == {"v1": commit_of("merged")}
    math = commit_of("math")
    assert mergegit.ok("tag", "v0", "math", "--json").json == {"tag": "v0", "commit": math}
    assert mergegit.ok("tag", "-d", "v0", "--json").json == {"tag": "v0", "commit": math}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["v0"], "name the commit that the tag should point to, too"),
        (["-d"], "name the tag"),
        (["-d", "v1", "v2"], "-d takes one name"),
    ],
)
def test_wrong_usage(arguments: list[str], said: str, mergegit: CommandLine) -> None:
    assert mergegit("tag", *arguments).failed(2)[0] == said
