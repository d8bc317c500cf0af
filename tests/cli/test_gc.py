"""`mergegit gc`."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mergegit.storage.lease import Lease
from mergegit.storage.location import discover
from tests.cli.conftest import CommandLine, environment
from tests.trees import fingerprint

FACTS = [
    "dry_run", "commits", "forgotten_moves", "trashed", "trashed_bytes", "rewritten",
    "written_bytes", "removed", "removed_bytes", "trash_bytes", "freed_bytes", "seconds",
]  # fmt: skip
SIZE = r"[\d.]+ (?:B|KiB)"


def pack_bytes(place: Path) -> int:
    packs = (place / ".mergegit" / "packs").iterdir()
    return sum(path.stat().st_blocks * 512 for path in packs)


def test_where_everything_is_needed_it_says_so(mergegit: CommandLine) -> None:
    mergegit.ok("gc", "--expire", "9999w")
    assert mergegit.ok("gc", "--expire", "9999w").out == "there is nothing to collect\n"


def test_what_it_reclaims_is_what_the_packs_took(mergegit: CommandLine, place: Path) -> None:
    mergegit.ok("branch", "-d", "prose")
    before = pack_bytes(place)
    report = mergegit.ok("gc", "--expire", "0", "--grace", "0", "--json").json
    assert list(report) == FACTS
    assert report["freed_bytes"] == before - pack_bytes(place) > 0
    assert report["dry_run"] is False
    mergegit.ok("fsck")


def test_what_it_does_is_said_line_by_line(mergegit: CommandLine) -> None:
    mergegit.ok("branch", "-d", "prose")
    out = mergegit.ok("gc", "--expire", "0").out
    assert re.fullmatch(
        rf"2 moves of refs forgotten\n"
        rf"\d+ packs moved to the trash: {SIZE}\n"
        rf"0 B reclaimed on disk; {SIZE} stay in the trash until their grace period ends\n",
        out,
    )
    assert re.fullmatch(
        rf"there is nothing to collect; {SIZE} stay in the trash until their grace period ends\n",
        mergegit.ok("gc").out,
    )
    out = mergegit.ok("gc", "--grace", "0").out
    assert re.fullmatch(rf"\d+ packs removed for good: ({SIZE})\n\1 reclaimed on disk\n", out)


def test_a_dry_run_says_what_would_be_and_changes_nothing(
    mergegit: CommandLine, place: Path
) -> None:
    mergegit.ok("branch", "-d", "prose")
    before = fingerprint(place)
    out = mergegit.ok("gc", "--expire", "0", "--grace", "0", "--dry-run").out
    assert fingerprint(place) == before
    assert re.fullmatch(
        rf"2 moves of refs would be forgotten\n"
        rf"(\d+ packs) would be moved to the trash: ({SIZE})\n"
        rf"\1 would be removed for good: \2\n"
        rf"\2 would be reclaimed on disk\n",
        out,
    )


def test_durations(mergegit: CommandLine) -> None:
    for duration in ("0", "90s", "5m", "12h", "30d", "2w"):
        mergegit.ok("gc", "--grace", duration, "--dry-run")
    for wrong in ("", "x", "-1d", "3", "1.5d", "1y", "99999999d"):
        message, _ = mergegit("gc", "--expire", wrong).failed(2)
        assert "is no duration; write 0, or a number and s, m, h, d or w, like 30d" in message


def test_while_another_command_writes_it_says_so(mergegit: CommandLine, place: Path) -> None:
    with Lease(discover(place)).shared():
        message, hint = mergegit("gc").failed()
    assert message.startswith("another command is at work in ")
    assert hint == "run this again when that has ended"


def test_it_waits_where_it_is_told_to(mergegit: CommandLine, place: Path) -> None:
    with Lease(discover(place)).shared():
        process = subprocess.Popen(
            [sys.executable, "-m", "mergegit", "gc", "--wait"],
            cwd=place, env=environment(), stdout=subprocess.PIPE,
        )  # fmt: skip
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(2)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert b"collect" in out or b"forgotten" in out


def test_a_deleted_branch_comes_back_as_its_help_says(
    mergegit: CommandLine, commit_of: Callable[[str], str]
) -> None:
    commit = commit_of("prose")
    mergegit.ok("branch", "-d", "prose")
    mergegit.ok("gc", "--expire", "9999w", "--grace", "0")
    mergegit.ok("branch", "prose", "prose@{1}")
    assert commit_of("prose") == commit
    mergegit.ok("fsck")
