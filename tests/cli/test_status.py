"""`mergegit status`."""

from __future__ import annotations

import re

from tests.cli.conftest import CommandLine


def test_what_there_is_and_what_it_takes(mergegit: CommandLine) -> None:
    lines = mergegit.ok("status").lines
    root = (mergegit.directory / ".mergegit").resolve()
    assert lines[0] == f"repository {root} (format 1)"
    assert lines[1] == "  5 commits, 5 branches, 1 tag"
    assert re.fullmatch(r"  \d+ blocks and \d+ objects in \d+ packs", lines[2])
    assert re.fullmatch(
        r"  [\d.]+ [KM]iB of checkpoints in [\d.]+ [KM]iB on disk \(ratio \d\.\d\d\)", lines[3]
    )
    assert lines[4] == ""
    assert [line.strip() for line in lines[5:]] == [
        line.strip() for line in mergegit.ok("branch").lines
    ]


def test_json(mergegit: CommandLine) -> None:
    status = mergegit.ok("status", "--json").json
    assert list(status) == [
        "root", "format", "branches", "tags", "commits", "blocks", "objects", "packs",
        "checkpoint_bytes", "disk_bytes", "deduplication_ratio",
    ]  # fmt: skip
    assert (status["branches"], status["tags"], status["commits"]) == (5, 1, 5)
    ratio = status["checkpoint_bytes"] / status["disk_bytes"]
    assert status["deduplication_ratio"] == ratio


def test_many_branches_are_cut(mergegit: CommandLine) -> None:
    for number in range(20):
        mergegit.ok("branch", f"b{number:02}", "math")
    assert mergegit.ok("status").lines[-1] == "  ... and 5 more; `mergegit branch` lists them"


def test_an_empty_repository(nowhere: CommandLine) -> None:
    nowhere.ok("init")
    assert nowhere.ok("status").lines[1:] == ["  empty; begin with `mergegit add CHECKPOINT`"]
    assert nowhere.ok("status", "--json").json["commits"] == 0


def test_from_below_the_repository(mergegit: CommandLine) -> None:
    below = mergegit.directory / "a" / "b"
    below.mkdir(parents=True)
    assert CommandLine(below).ok("status").lines[0] == mergegit.ok("status").lines[0]
