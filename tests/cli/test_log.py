"""`mergegit log`."""

from __future__ import annotations

import re
from collections.abc import Callable

from tests.cli.conftest import AUTHOR, CommandLine
from tests.families import Family

COMMIT_KEYS = [
    "commit", "refs", "manifest", "parents", "author", "time", "message", "recipe", "plan",
    "execution",
]  # fmt: skip


def test_all_commits_newest_first(mergegit: CommandLine, commit_of: Callable[[str], str]) -> None:
    lines = mergegit.ok("log", "--oneline").lines
    assert lines == [
        f"{commit_of('merged')[:10]} (merged, tag: v1) merge math, code by task_arithmetic "
        "under 60%",
        f"{commit_of('prose')[:10]} (prose) add prose",
        f"{commit_of('code')[:10]} (code) add code",
        f"{commit_of('math')[:10]} (math) add math",
        f"{commit_of('base')[:10]} (base) add base",
    ]


def test_a_commit_in_full(mergegit: CommandLine, commit_of: Callable[[str], str]) -> None:
    lines = mergegit.ok("log", "merged", "-n", "1").lines
    assert lines[0] == f"commit {commit_of('merged')} (merged, tag: v1)"
    assert lines[1] == "Base:     base"
    assert lines[2] == "Experts:  math code"
    assert lines[3] == f"Author:   {AUTHOR}"
    assert re.fullmatch(r"Date:     \w{3} \w{3} \d\d \d\d:\d\d:\d\d \d{4} [+-]\d{4}", lines[4])
    assert lines[5] == (
        "Recipe:   task_arithmetic lambda=1 lines=0 normalize=false math(weight=0.5) code(weight=1)"
    )
    assert lines[6].startswith("Read:     ")
    assert lines[7:] == ["", "    merge math, code by task_arithmetic under 60%"]


def test_the_history_of_one_ref(mergegit: CommandLine) -> None:
    assert [line.split()[-1] for line in mergegit.ok("log", "--oneline", "math").lines] == [
        "math",
        "base",
    ]


def test_a_new_version_names_the_one_before(
    mergegit: CommandLine, commit_of: Callable[[str], str], tiny_family: Family
) -> None:
    old = commit_of("math")[:10]
    mergegit.ok("add", tiny_family.experts[1], "--name", "math")
    lines = mergegit.ok("log", "math", "-n", "1").lines
    assert lines[1:3] == ["Base:     base", f"Previous: {old}"]


def test_a_base_that_has_a_tag_alone_is_called_by_it(mergegit: CommandLine) -> None:
    mergegit.ok("tag", "origin", "base")
    mergegit.ok("branch", "-d", "base")
    assert mergegit.ok("log", "math", "-n", "1").lines[1] == "Base:     origin"


def test_at_most_so_many(mergegit: CommandLine) -> None:
    assert len(mergegit.ok("log", "--oneline", "-n", "2").lines) == 2
    assert mergegit.ok("log", "-n", "0").out == ""
    mergegit("log", "-n", "-1").failed(2)


def test_the_graph_draws_a_merge_above_its_parents(mergegit: CommandLine) -> None:
    lines = mergegit.ok("log", "--graph", "--oneline").lines
    assert [re.sub(r"  [0-9a-f]{10} .*", "", line) for line in lines] == [
        "●",
        "├─┬─╮",
        "│ │ │ ●",
        "│ │ ● │",
        "│ ● │ │",
        "├─┴─┴─╯",
        "●",
    ]


def test_the_text_of_a_commit_stands_in_one_column_of_the_graph(mergegit: CommandLine) -> None:
    lines = mergegit.ok("log", "--graph").lines
    last = next(number for number, line in enumerate(lines) if "(base)" in line)
    assert lines[last].startswith("●  commit ")
    assert lines[last + 1].startswith("   Author:   ")
    assert lines[-1] == "       add base"
    assert all(line == line.rstrip() for line in lines)


def test_json(mergegit: CommandLine, commit_of: Callable[[str], str]) -> None:
    commits = mergegit.ok("log", "--json").json
    assert [list(commit) for commit in commits] == [COMMIT_KEYS] * 5
    merged, base = commits[0], commits[-1]
    assert merged["commit"] == commit_of("merged")
    assert merged["refs"] == ["merged", "tag: v1"]
    assert merged["parents"] == [commit_of(ref) for ref in ("base", "math", "code")]
    assert merged["recipe"]["experts"][0]["parameters"] == {"weight": 0.5}
    assert (base["parents"], base["recipe"], base["plan"]) == ([], None, None)
    assert base["time"] == 1_700_000_000
    assert mergegit.ok("log", "--json", "-n", "1").json == [merged]


def test_an_empty_repository_has_no_history(nowhere: CommandLine) -> None:
    nowhere.ok("init")
    result = nowhere("log")
    assert (result.code, result.out) == (0, "")
    assert "begin with `mergegit add CHECKPOINT`" in result.err
    assert nowhere("log", "--json").json == []


def test_a_message_can_not_write_on_the_terminal(
    mergegit: CommandLine, tiny_family: Family
) -> None:
    mergegit.ok("add", tiny_family.experts[1], "--name", "math", "-m", "a\x1b[2Jb\nc")
    for arguments in (("log",), ("log", "--oneline"), ("branch",), ("status",), ("show", "math")):
        out = mergegit.ok(*arguments).out
        assert "\x1b" not in out
        assert "a\\x1b[2Jb" in out
