"""`mergegit init`."""

from __future__ import annotations

from pathlib import Path

from tests.cli.conftest import CommandLine
from tests.trees import fingerprint


def test_it_makes_a_repository_here(nowhere: CommandLine) -> None:
    result = nowhere.ok("init")
    root = (nowhere.directory / ".mergegit").resolve()
    assert result.out == f"empty repository made in {root}\n"
    assert nowhere.ok("status").out.splitlines()[0] == f"repository {root} (format 1)"


def test_it_makes_a_repository_in_a_directory_that_is_not_there_yet(nowhere: CommandLine) -> None:
    nowhere.ok("init", "a/b")
    assert (nowhere.directory / "a" / "b" / ".mergegit" / "format").is_file()


def test_again_changes_nothing(mergegit: CommandLine) -> None:
    before = fingerprint(mergegit.directory)
    assert "there is a repository already in" in mergegit.ok("init").out
    assert fingerprint(mergegit.directory) == before


def test_it_completes_what_was_begun(nowhere: CommandLine) -> None:
    (nowhere.directory / ".mergegit" / "refs").mkdir(parents=True)
    assert "empty repository made" in nowhere.ok("init").out
    nowhere.ok("fsck")


def test_json(nowhere: CommandLine) -> None:
    root = str((nowhere.directory / ".mergegit").resolve())
    assert nowhere.ok("init", "--json").json == {"root": root, "is_new": True}
    assert nowhere.ok("init", "--json").json == {"root": root, "is_new": False}


def test_another_directory_by_option(nowhere: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    nowhere.ok("-C", tmp_path / "other", "init", "models")
    assert (tmp_path / "other" / "models" / ".mergegit").is_dir()
