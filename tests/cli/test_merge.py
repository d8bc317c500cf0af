"""`mergegit merge`."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from mergegit._version import VERSION
from tests.cli.conftest import CommandLine
from tests.cli.test_plan import EXPERT_KEYS, KEYS
from tests.trees import fingerprint


def test_it_shows_the_plan_then_what_was_done(
    mergegit: CommandLine, commit_of: Callable[[str], str]
) -> None:
    lines = mergegit.ok("merge", "math", "prose", "--budget", "50%").lines
    assert lines[0].startswith("plan ")
    assert lines[-2] == f"merged into math+prose: {commit_of('math+prose')[:10]}"
    assert re.fullmatch(
        r"  read [\d.]+ K?i?B of experts and [\d.]+ K?i?B of the base; "
        r"wrote [\d.]+ K?i?B; \d\.\d\d s",
        lines[-1],
    )


def test_json(mergegit: CommandLine, commit_of: Callable[[str], str]) -> None:
    report = mergegit.ok("merge", "math", "prose", "--budget", "50%", "-b", "joined", "--json").json
    assert list(report) == [
        *KEYS, "commit", "branch", "is_new", "read_bytes", "base_read_bytes", "written_bytes",
        "seconds",
    ]  # fmt: skip
    assert [list(expert) for expert in report["experts"]] == [EXPERT_KEYS] * 2
    assert (report["branch"], report["is_new"]) == ("joined", True)
    assert report["commit"] == commit_of("joined")
    assert report["read_bytes"] == report["planned_bytes"] <= report["budget_bytes"]
    assert report["base_read_bytes"] == report["base_bytes"]
    assert report["written_bytes"] > 0


def test_the_commit_has_base_and_experts_for_parents(
    mergegit: CommandLine, commit_of: Callable[[str], str]
) -> None:
    mergegit.ok("merge", "math", "prose", "-m", "both")
    commit = mergegit.ok("show", "math+prose", "--json").json
    assert commit["parents"] == [commit_of("base"), commit_of("math"), commit_of("prose")]
    assert commit["message"] == "both"
    assert commit["execution"]["mergegit"] == VERSION
    assert sorted(commit["execution"]) == [
        "base_read_bytes", "machine", "mergegit", "read_bytes", "recipe", "seconds", "software",
        "spared_bytes", "written_bytes",
    ]  # fmt: skip


def test_the_same_merge_again_reads_nothing(
    mergegit: CommandLine, commit_of: Callable[[str], str]
) -> None:
    arguments = ("merge", "math", "prose", "--budget", "50%")
    mergegit.ok(*arguments)
    before = fingerprint(mergegit.directory)
    result = mergegit.ok(*arguments)
    commit = commit_of("math+prose")[:10]
    assert result.out == f"math+prose holds this merge already, at {commit}; nothing to do\n"
    report = mergegit.ok(*arguments, "--json").json
    assert (report["is_new"], report["read_bytes"], report["written_bytes"]) == (False, 0, 0)
    assert fingerprint(mergegit.directory) == before


def test_another_merge_of_the_same_experts_has_another_branch(mergegit: CommandLine) -> None:
    mergegit.ok("merge", "math", "prose")
    report = mergegit.ok("merge", "math", "prose", "--method", "ties", "--json").json
    assert report["branch"] == "math+prose-2"


def test_a_branch_moves_forward(mergegit: CommandLine, commit_of: Callable[[str], str]) -> None:
    before = commit_of("merged")
    report = mergegit.ok("merge", "merged", "prose", "-b", "merged", "--json").json
    assert report["commit"] == commit_of("merged") != before
    assert commit_of("merged^2") == before


def test_a_branch_does_not_move_backward(
    mergegit: CommandLine, commit_of: Callable[[str], str]
) -> None:
    before = commit_of("merged")
    message, hint = mergegit("merge", "math", "prose", "-b", "merged").failed()
    assert "branch merged would not move forward" in message
    assert "-b" in hint
    assert commit_of("merged") == before


def test_a_dry_run_shows_the_plan_and_stops(mergegit: CommandLine) -> None:
    arguments = ("math", "prose", "--budget", "50%")
    planned = mergegit.ok("plan", *arguments).out
    as_json = mergegit.ok("plan", *arguments, "--json").json
    before = fingerprint(mergegit.directory)
    assert mergegit.ok("merge", *arguments, "--dry-run").out == planned
    assert mergegit.ok("merge", *arguments, "--dry-run", "--json").json == as_json
    assert fingerprint(mergegit.directory) == before


def test_the_plan_of_a_commit_is_carried_out_again(
    mergegit: CommandLine, commit_of: Callable[[str], str]
) -> None:
    commit = mergegit.ok("show", "merged", "--json").json
    for place, plan in enumerate((commit["plan"][:12], "merged", "v1")):
        report = mergegit.ok("merge", "--plan", plan, "-b", f"again-{place}", "--json").json
        again = mergegit.ok("show", f"again-{place}", "--json").json
        assert report["plan"] == commit["plan"]
        assert again["manifest"] == commit["manifest"]


def test_what_is_no_plan(mergegit: CommandLine) -> None:
    (mergegit.directory / "file").write_bytes(b"no plan\n{}\n")
    assert mergegit("merge", "--plan", "file").failed()[0] == "file is not a plan"
    assert mergegit("merge", "--plan", "math").failed()[0] == "'math' is neither a plan nor a merge"
    message, hint = mergegit("merge", "--plan", "nothing").failed()
    assert message == "there is no file, plan or merge 'nothing'"
    assert "`mergegit plan` printed" in hint


@pytest.mark.parametrize(
    "option",
    ["--base=base", "--method=ties", "-pweight=1", "--budget=10%", "--seed=1", "--dtype=f16",
     "--ignore-extra", "--allow-nonfinite"],
)  # fmt: skip
def test_what_a_plan_says_can_not_be_said_otherwise(option: str, mergegit: CommandLine) -> None:
    message, _ = mergegit("merge", "--plan", "merged", option).failed(2)
    assert message.startswith("--plan says it all; -")
    name = option.partition("=")[0] if option.startswith("--") else "-p"
    assert f"; {name} can't change it" in message


def test_experts_or_a_plan(mergegit: CommandLine) -> None:
    assert "name experts, a plan with --plan or a recipe with -c" in mergegit("merge").failed(2)[0]
    assert "one of them" in mergegit("merge", "math", "--plan", "merged").failed(2)[0]


def test_what_earlier_merges_made_is_said_and_not_read_again(mergegit: CommandLine) -> None:
    mergegit.ok("merge", "math", "code", "-b", "first")
    plan = mergegit.ok("plan", "math", "code", "--json").json
    assert plan["planned_bytes"] == 0 < plan["remembered_bytes"]
    assert [expert["planned_bytes"] for expert in plan["experts"]] == [0, 0]
    said = mergegit.ok("merge", "math", "code", "-b", "second").out
    assert "is remembered from earlier merges; 0 B will be read" in said
    report = mergegit.ok("merge", "math", "code", "-b", "third", "--anew", "--json").json
    assert report["read_bytes"] == report["planned_bytes"] == plan["remembered_bytes"]
