"""`mergegit repack`."""

from __future__ import annotations

import re

from tests.cli.conftest import CommandLine
from tests.families import Family
from tests.trees import fingerprint


def test_plain_bytes_become_deltas_and_back(mergegit: CommandLine, family: Family) -> None:
    mergegit.ok("add", family.base, "--name", "big", "--no-base")
    mergegit.ok("add", family.experts[0], "--base", "big", "--encoding", "raw", "--name", "expert")
    log = mergegit.ok("log", "--json").out
    result = mergegit.ok("repack", "expert")
    assert re.fullmatch(
        r"repacked \d+ blocks: [\d.]+ MiB became [\d.]+ [KM]iB; [\d.]+ s\n", result.out
    )
    report = mergegit.ok("repack", "expert", "--encoding", "raw", "--json").json
    assert list(report) == ["commits", "blocks", "before_bytes", "after_bytes", "seconds"]
    assert report["before_bytes"] < report["after_bytes"]
    assert mergegit.ok("log", "--json").out == log
    mergegit.ok("fsck")


def test_what_is_stored_so_already_stays(mergegit: CommandLine) -> None:
    mergegit.ok("repack")
    before = fingerprint(mergegit.directory)
    assert mergegit.ok("repack").out == "everything is stored so already\n"
    assert fingerprint(mergegit.directory) == before


def test_a_base_goes_with_named_refs(mergegit: CommandLine) -> None:
    mergegit("repack", "--base", "base").failed(2)
    mergegit("repack", "math", "--base", "base", "--encoding", "raw").failed(2)
