"""`mergegit log`."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from mergegit import Repository
from mergegit.cli.commit_format import PLACEHOLDERS
from mergegit.objects import Commit
from mergegit.storage.refs import RefUpdate
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


# -- which commits ---------------------------------------------------------------------------------


def shown(mergegit: CommandLine, *arguments: str) -> list[str]:
    return mergegit.ok("log", "--format", "%s", *arguments).lines


MERGE = "merge math, code by task_arithmetic under 60%"


def test_conditions(mergegit: CommandLine) -> None:
    assert shown(mergegit, "--method", "task_arithmetic") == [MERGE]
    assert shown(mergegit, "--expert", "math") == [MERGE]
    assert shown(mergegit, "--expert", "math", "--since", "2023-01-01") == [MERGE]
    assert shown(mergegit, "--author", "ada@example", "-n", "2") == [MERGE, "add prose"]
    assert shown(mergegit, "math", "--", "norm") == ["add math", "add base"]


def test_times(mergegit: CommandLine, tiny_family: Family) -> None:
    mergegit.ok("add", tiny_family.experts[1], "--name", "math", "-m", "now")
    assert shown(mergegit, "--since", "2 weeks") == ["now"]
    assert shown(mergegit, "--since", "yesterday") == ["now"]
    assert len(shown(mergegit, "--since", "2023-11-01")) == 6


def test_parts_of_names_of_tensors(mergegit: CommandLine) -> None:
    """Of each expert of the tiny family one tensor is the base's."""
    for part, unmoved in (("embed_tokens", "math"), ("up_proj", "code"), ("norm", "prose")):
        titles = shown(mergegit, "--", part)
        assert f"add {unmoved}" not in titles
        assert len(titles) == 4
    assert len(shown(mergegit, "--", "embed_tokens", "norm")) == 5


def test_that_there_is_none_is_said(mergegit: CommandLine) -> None:
    for arguments in (("--method", "ties"), ("--author", "Grace"), ("--", "nothing")):
        result = mergegit("log", *arguments)
        assert (result.code, result.out) == (0, "")
        assert result.err == "note: no commit is like that\n"
    assert mergegit.ok("log", "--method", "ties", "--json").json == []


def test_wrong_conditions(mergegit: CommandLine) -> None:
    message, _ = mergegit("log", "--since", "soon").failed(2)
    assert "'soon' is neither a date like 2025-06-01 nor a time like '2 weeks'" in message
    mergegit("log", "--expert", "nothing").failed()
    message, _ = mergegit("log", "math", "norm").failed(2)
    assert "unexpected extra argument" in message
    for option in ("--oneline", "--json"):
        message, _ = mergegit("log", "--format", "%h", option).failed(2)
        assert "--format goes without" in message


def test_a_graph_of_some_commits_joins_them_by_what_lies_between(mergegit: CommandLine) -> None:
    mergegit.ok("merge", "merged", "prose", "--base", "base", "-b", "more", "-m", "more")
    lines = mergegit.ok("log", "--graph", "--format", "%s", "--method", "task_arithmetic").lines
    assert lines == ["●  more", f"●  {MERGE}"]
    lines = mergegit.ok("log", "--graph", "--format", "%s", "--", "norm").lines
    assert [line for line in lines if "●" in line][-1] == "●  add base"
    assert "add prose" not in "".join(lines)
    lines = mergegit.ok("log", "--graph", "--format", "%s", "--expert", "math").lines
    assert lines == [f"●  {MERGE}"]


def test_where_no_line_leads_on_the_graph_is_broken(
    mergegit: CommandLine, tiny_family: Family
) -> None:
    mergegit.ok("merge", "math", "prose", "-b", "other", "-m", "other")
    lines = mergegit.ok("log", "--graph", "--format", "%s", "--method", "task_arithmetic").lines
    assert lines == ["●  other", "", f"●  {MERGE}"]


# -- in which form ---------------------------------------------------------------------------------


def test_a_format_of_ones_own(mergegit: CommandLine, commit_of: Callable[[str], str]) -> None:
    form = "%H %h|%P|%p|%an|%at|%s|%d|%D|%m|%e|%%"
    merged, *_, base = mergegit.ok("log", "--format", form).lines
    parents = [commit_of(ref) for ref in ("base", "math", "code")]
    assert merged.split("|") == [
        f"{commit_of('merged')} {commit_of('merged')[:10]}", " ".join(parents),
        " ".join(parent[:10] for parent in parents), AUTHOR, "1700000100", MERGE,
        " (merged, tag: v1)", "merged, tag: v1", "task_arithmetic", "math, code", "%",
    ]  # fmt: skip
    assert base.split("|")[1:3] == ["", ""]
    assert base.split("|")[-3:] == ["", "", "%"]


def test_what_a_merge_measured(mergegit: CommandLine) -> None:
    facts = mergegit.ok("log", "merged", "-n", "1", "--json").json[0]
    execution, manifest = facts["execution"], facts["manifest"]
    plan = mergegit.ok("show", facts["plan"], "--json").json
    line = mergegit.ok("log", "merged", "-n", "1", "--format", "%T|%R|%W|%S|%E|%r|%ad|%ai|%B").out
    parts = line.rstrip("\n").split("|")
    assert parts[:4] == [
        manifest, str(execution["read_bytes"]), str(execution["written_bytes"]),
        str(execution["seconds"]),
    ]  # fmt: skip
    assert float(parts[4]) == round(plan["predicted_error"], 3)
    assert parts[5].split()[1] in ("B", "KiB")
    assert re.fullmatch(r"2023-11-1\d \d\d:\d\d:\d\d[+-]\d\d:\d\d", parts[7])
    assert parts[8] == facts["message"]


def test_lines_of_a_format_stand_in_one_column_of_the_graph(mergegit: CommandLine) -> None:
    lines = mergegit.ok("log", "--graph", "--format", "%h%n%s", "merged", "-n", "1").lines
    assert lines[0].startswith("●  ")
    assert lines[2].endswith(f"  {MERGE}")
    assert lines[2].startswith("│ │ │")


def test_a_placeholder_that_is_not_there(mergegit: CommandLine) -> None:
    for form, unknown in (("%q", "'%q'"), ("%h %", "'%'"), ("%a", "'%a'"), ("%%%z", "'%z'")):
        message, _ = mergegit("log", "--format", form).failed(2)
        assert f"{unknown} is no placeholder; there are %H, %h" in message


def test_every_placeholder_is_explained(mergegit: CommandLine) -> None:
    out = mergegit.ok("log", "--help").out
    page = (Path(__file__).parents[2] / "docs" / "history-verbs.md").read_text()
    for name in PLACEHOLDERS:
        assert f"\n  %{name} " in out
        assert f"`%{name}`" in page


def test_how_much_changed(mergegit: CommandLine) -> None:
    lines = mergegit.ok("log", "math", "--stat").lines
    assert [line for line in lines if "tensor" in line] == [
        "    2 of 3 tensors changed; 1 of 3 blocks shared", "    3 tensors, 3 blocks",
    ]  # fmt: skip
    short = mergegit.ok("log", "math", "--stat", "--oneline").lines
    assert short[1] == "  2 of 3 tensors changed; 1 of 3 blocks shared"
    facts = mergegit.ok("log", "math", "--stat", "--json").json
    assert facts[0]["stat"] == {
        "tensors": 3, "changed": 2, "added": 0, "removed": 0, "blocks": 3, "shared": 1,
    }  # fmt: skip
    graph = mergegit.ok("log", "math", "--stat", "--oneline", "--graph").lines
    assert graph[1] == "│    2 of 3 tensors changed; 1 of 3 blocks shared"


def test_an_octopus_of_twenty_parents(
    mergegit: CommandLine, place: Path, commit_of: Callable[[str], str]
) -> None:
    """As many lanes as parents, which all come together again, and text beside each commit."""
    with Repository.open(place) as repository:
        base = repository.resolve("base")
        manifest = repository.commit("base").manifest
        with repository.store.transaction() as transaction:
            experts = [
                transaction.write_commit(Commit(manifest, (base,), "a", 2_000_000 + i, f"e{i}"))
                for i in range(20)
            ]
            merge = Commit(manifest, (base, *experts), "a", 3_000_000, "octopus")
            made = transaction.write_commit(merge)
            transaction.publish(RefUpdate("heads", "octopus", None, made, "a", 0, "for a test"))
    lines = mergegit.ok("log", "octopus", "--graph", "--format", "%s").lines
    assert lines[0] == "●  octopus"
    assert lines[1] == "├" + "─┬" * 19 + "─╮"
    assert sorted(line.split()[-1] for line in lines[2:22]) == sorted(f"e{i}" for i in range(20))
    for line in lines[2:22]:
        assert line.count("●") == 1
        assert line[: line.index("●")] == "│ " * (line.index("●") // 2)
    assert lines[-2] == "├" + "─┴" * 19 + "─╯"
    assert lines[-1] == "●  add base"
    assert len(lines) == 24
