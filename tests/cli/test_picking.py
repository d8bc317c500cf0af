"""`mergegit cherry-pick`, `revert` and `rebase`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mergegit import Repository
from tests.cli.conftest import CommandLine
from tests.families import Family, tiny_checkpoint

MERGED = [
    "commit", "branch", "is_new", "read_bytes", "base_read_bytes", "written_bytes", "seconds",
]  # fmt: skip
MORE = ["exact", "notes"]

Of = Callable[[str], str]


def parents(mergegit: CommandLine, ref: str) -> list[str]:
    found: list[str] = mergegit.ok("show", ref, "--json").json["parents"]
    return found


def test_cherry_pick(mergegit: CommandLine, commit_of: Of) -> None:
    before, prose = commit_of("merged"), commit_of("prose")
    lines = mergegit.ok("cherry-pick", "prose", "--onto", "merged", "--budget", "70%").lines
    assert lines[0].split(", budget")[0].endswith("task_arithmetic of prose on base merged")
    assert lines[-2].startswith("merged into merged: ")
    assert parents(mergegit, "merged") == [before, prose]
    recipe = next(
        line for line in mergegit.ok("log", "merged", "-n", "1").lines if "Recipe:" in line
    )
    assert recipe.endswith("prose(weight=1, base=base)")
    log = mergegit.ok("log", "merged", "--oneline", "-n", "1").out
    assert log.endswith("cherry-pick prose onto merged under 70%\n")
    mergegit.ok("verify", "merged", "--replay")


def test_cherry_pick_json(mergegit: CommandLine, commit_of: Of) -> None:
    arguments = ("cherry-pick", "prose", "--onto", "merged", "--json", "-b", "more", "-m", "why")
    dry = mergegit.ok(*arguments, "--dry-run").json
    assert list(dry) == [*mergegit.ok("plan", "math", "--json").json, *MORE]
    assert (dry["exact"], dry["notes"]) == (False, [])
    facts = mergegit.ok(*arguments).json
    assert list(facts) == [*dry][: -len(MORE)] + MERGED + MORE
    assert facts["plan"] == dry["plan"]
    assert (facts["branch"], facts["commit"]) == ("more", commit_of("more"))
    assert facts["read_bytes"] == facts["planned_bytes"] > 0
    assert facts["recipe"]["experts"][0]["base"]["ref"] == "base"
    assert mergegit.ok("show", "more", "--json").json["message"] == "why"


def test_a_note_for_what_is_in_it_already(mergegit: CommandLine) -> None:
    result = mergegit("cherry-pick", "math", "--onto", "merged", "--scale", "0.5")
    assert result.code == 0
    assert result.err == (
        "note: merged is made of math already: what it changed is added once more\n"
    )


def test_what_can_not_be_added(mergegit: CommandLine) -> None:
    message, hint = mergegit("cherry-pick", "base", "--onto", "merged").failed()
    assert message == "base was added without a base: what it changed is not known"
    assert "mergegit add CHECKPOINT --name base --base REF" in hint
    message, hint = mergegit("cherry-pick", "prose", "--onto", "merged~1").failed()
    assert message == "merged~1 is no branch, and can't move to what comes out"
    assert hint == "name the branch of the result with -b"
    mergegit("cherry-pick", "prose", "--onto", "nothing").failed()
    for scale in ("nan", "inf"):
        message, _ = mergegit("cherry-pick", "prose", "--onto", "merged", "--scale", scale).failed(
            2
        )
        assert "it must be finite" in message
    message, _ = mergegit("cherry-pick", "prose").failed(2)
    assert message == "missing option '--onto'"


def test_raw_blocks_are_stored_where_that_is_asked_for(family_place: Path) -> None:
    there = CommandLine(family_place)
    options = ("cherry-pick", "math", "--onto", "base", "--json")
    raw = there.ok(*options, "-b", "raw", "--encoding", "raw", "--scale", "3").json["written_bytes"]
    with Repository.open(family_place) as repository:
        manifest = repository.manifest("raw")
        size = sum(repository.tensor(t).nbytes for t in set(manifest.tensors.values()))
    delta = there.ok(*options, "-b", "delta", "--scale", "2").json["written_bytes"]
    assert raw > 0.9 * size > 1.5 * delta


def test_revert_of_an_additive_merge(mergegit: CommandLine, commit_of: Of) -> None:
    old = commit_of("merged")
    result = mergegit("revert", "code", "--from", "merged")
    assert result.code == 0
    assert result.err == "note: merged is merged again without code: exact\n"
    assert parents(mergegit, "merged") == [commit_of("base"), commit_of("math")]
    assert commit_of("merged@{1}") == old
    recipe = mergegit.ok("show", "merged", "--json").json["recipe"]
    assert recipe["experts"][0]["parameters"] == {"weight": 0.5}
    assert mergegit.ok("reflog", "merged").lines[0].endswith("revert code from merged")
    message, hint = mergegit("revert", "math", "--from", "merged").failed()
    assert message.startswith("without math nothing is left of merged but its base")
    assert f"`mergegit reset merged {commit_of('base')[:10]}`" in hint


def test_revert_by_subtraction(mergegit: CommandLine, commit_of: Of) -> None:
    mergegit.ok("merge", "math", "prose", "--method", "ties", "-p", "density=0.5", "-b", "voted")
    old = commit_of("voted")
    result = mergegit("revert", "prose", "--from", "voted", "--json")
    assert result.code == 0
    assert result.json["exact"] is False
    assert result.json["notes"] == [
        "voted was merged by ties, which does not add experts up: what prose changed is "
        "subtracted, which is approximate"
    ]
    assert result.json["recipe"]["experts"][0]["parameters"] == {"weight": -1.0}
    assert parents(mergegit, "voted") == [old, commit_of("prose")]


def test_rebase(mergegit: CommandLine, commit_of: Of, tmp_path: Path) -> None:
    mergegit.ok("add", tiny_checkpoint(tmp_path / "next", 3), "--no-base")
    old = commit_of("math")
    mergegit.ok("rebase", "math", "--onto", "next")
    assert parents(mergegit, "math") == [commit_of("next"), old]
    mergegit.ok("rebase", "code", "--onto", "next", "-b", "next-code")
    facts = mergegit.ok("merge", "math", "next-code", "--json").json
    assert facts["base"] == commit_of("next")
    message, _ = mergegit("rebase", "math", "--onto", "next").failed()
    assert message == "math stands on next already"


@pytest.mark.parametrize(
    "command", ["cherry-pick math --onto prose", "revert math --from merged",
                "rebase math --onto prose"],
)  # fmt: skip
def test_a_dry_run_changes_nothing(
    command: str, mergegit: CommandLine, place: Path, tiny_family: Family
) -> None:
    before = mergegit.ok("log", "--json").out
    result = mergegit(*command.split(), "--dry-run")
    assert result.code == 0
    assert result.out.startswith("plan ")
    assert mergegit.ok("log", "--json").out == before
