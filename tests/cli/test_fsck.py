"""`mergegit fsck`."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from mergegit import Repository
from tests.cli.conftest import CommandLine
from tests.repository.damage import flip, records_of

KEYS = [
    "clean", "packs", "blocks", "objects", "commits", "checked_bytes", "notes", "problems",
]  # fmt: skip


@pytest.fixture
def damaged(place: Path) -> Path:
    """Flip a bit of math's embedding; returns the pack."""
    with Repository.open(place) as repository:
        record = records_of(repository, "layer 4")[0]
    flip(record.pack, record.offset + 5)
    return record.pack


def test_a_sound_repository(mergegit: CommandLine) -> None:
    assert re.fullmatch(
        r"5 commits, \d+ objects, \d+ blocks, [\d.]+ KiB checked: clean\n", mergegit.ok("fsck").out
    )


def test_json(mergegit: CommandLine) -> None:
    report = mergegit.ok("fsck", "--json").json
    assert list(report) == KEYS
    assert (report["clean"], report["commits"]) == (True, 5)
    assert (report["notes"], report["problems"]) == ([], [])


def test_damage_is_named_and_the_exit_code_tells(mergegit: CommandLine, damaged: Path) -> None:
    result = mergegit("fsck")
    assert result.code == 1
    assert result.lines[-1].endswith("checked: 1 problem")
    (line,) = (line for line in result.lines if line.startswith("damage: "))
    assert damaged.stem in line
    assert "model." in line
    assert re.search(r"needed by [0-9a-f]{10} \(\w+\)", line)


def test_damage_comes_with_what_to_do(mergegit: CommandLine, damaged: Path) -> None:
    (hint,) = mergegit("fsck").err.splitlines()
    assert hint.startswith(" hint: ")
    assert "--rebuild-catalog" in hint


def test_damage_in_json(mergegit: CommandLine, damaged: Path) -> None:
    result = mergegit("fsck", "--json")
    assert result.code == 1
    assert list(result.json) == KEYS
    assert result.json["clean"] is False
    (problem,) = result.json["problems"]
    assert list(problem) == ["what", "commits"]
    assert damaged.stem in problem["what"]
    assert len(problem["commits"]) >= 1


def test_what_the_hint_says_mends_it(
    mergegit: CommandLine, damaged: Path, tiny_family: object
) -> None:
    """The pack is moved away, the catalog made anew, and the checkpoints added again."""
    shutil.move(damaged, mergegit.directory)
    assert mergegit("fsck", "--rebuild-catalog").code == 1
    for path in tiny_family.experts:  # type: ignore[attr-defined]
        mergegit("add", path)
    assert mergegit.ok("fsck").out.endswith("clean\n")


def test_a_note_is_no_problem(mergegit: CommandLine, place: Path) -> None:
    packs = place / ".mergegit" / "packs"
    shutil.copy(next(packs.glob("*.pack")), packs / f"{'0' * 32}.pack")
    result = mergegit("fsck")
    assert result.code == 0
    assert result.err.startswith(f"note: pack {'0' * 32} is not in use")
    assert result.out.endswith("clean\n")


def test_a_lost_catalog_is_made_again(mergegit: CommandLine, place: Path) -> None:
    log = mergegit.ok("log").out
    shutil.rmtree(place / ".mergegit" / "catalog")
    message, hint = mergegit("log").failed()
    assert "catalog" in message
    assert "`mergegit fsck --rebuild-catalog`" in hint
    result = mergegit("fsck", "--rebuild-catalog")
    assert result.code == 0
    assert re.fullmatch(r"catalog made anew from \d+ packs\n", result.err)
    assert result.out.endswith("clean\n")
    assert mergegit.ok("log").out == log
