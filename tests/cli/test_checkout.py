"""`mergegit checkout`."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from tests.cli.conftest import CommandLine
from tests.families import Family
from tests.trees import tree_of


def test_it_writes_the_files_and_says_how_many(
    mergegit: CommandLine, tiny_family: Family, tmp_path: Path
) -> None:
    result = mergegit.ok("checkout", "math", tmp_path / "out")
    assert tree_of(tmp_path / "out") == tree_of(tiny_family.experts[0])
    said = rf"math written to {re.escape(str(tmp_path))}/out: 5 files, 1\.\d\d KiB, \d\.\d\d s\n"
    assert re.fullmatch(said, result.out)


def test_json(mergegit: CommandLine, commit_of: Callable[[str], str]) -> None:
    report = mergegit.ok("checkout", "v1", "out", "--json").json
    assert list(report) == ["commit", "directory", "files", "bytes", "seconds"]
    files = [file for file in (mergegit.directory / "out").rglob("*") if file.is_file()]
    assert report["commit"] == commit_of("merged")
    assert report["directory"] == "out"
    assert report["files"] == len(files)
    assert report["bytes"] == sum(file.stat().st_size for file in files)


def test_a_target_in_the_way(mergegit: CommandLine) -> None:
    mergegit.ok("checkout", "math", "out")
    message, hint = mergegit("checkout", "math", "out").failed()
    assert message == "directory out is not empty"
    assert hint == "choose a directory that does not exist"


def test_a_directory_whose_name_is_not_utf8(mergegit: CommandLine) -> None:
    result = mergegit.ok("checkout", "math", "caf\udce9")
    assert "math written to caf\\udce9" in result.out
    assert (mergegit.directory / "caf\udce9" / "config.json").is_file()
