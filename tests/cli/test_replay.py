"""`mergegit replay` and `mergegit verify`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from mergegit import Repository
from tests.cli.conftest import AUTHOR, CommandLine
from tests.repository.damage import flip, records_of

NAME = "model.embed_tokens.weight"
REPLAY_KEYS = [
    "commit", "plan", "method", "same", "manifest", "replayed", "tensors", "files",
    "stored_otherwise", "portable", "elsewhere", "read_bytes", "base_read_bytes", "seconds",
]  # fmt: skip
DISTANCE_KEYS = [
    "commit", "plan", "budget", "budget_bytes", "planned_bytes", "own_planned_bytes",
    "predicted_error", "error", "tensors", "read_bytes", "base_read_bytes", "seconds",
]  # fmt: skip


@pytest.fixture
def forged(place: Path) -> str:
    """A branch with a merge, one of whose tensors is not what its plan makes."""
    with Repository.open(place, author=AUTHOR) as repository:
        commit, manifest = repository.commit("merged"), repository.manifest("merged")
        tensors = {**manifest.tensors, NAME: repository.manifest("prose").tensors[NAME]}
        with repository.store.transaction() as transaction:
            other = transaction.write_manifest(dataclasses.replace(manifest, tensors=tensors))
            made = transaction.write_commit(dataclasses.replace(commit, manifest=other))
            transaction.publish()
        repository.create_branch("forged", made.hex())
    return "forged"


# -- replay ----------------------------------------------------------------------------------------


def test_the_same_bits(mergegit: CommandLine, commit_of: Callable[[str], str]) -> None:
    lines = mergegit.ok("replay", "merged").lines
    assert lines[0].startswith(f"merged {commit_of('merged')[:10]}: the same, bit for bit")
    facts = mergegit.ok("replay", "merged", "--json").json
    assert list(facts) == REPLAY_KEYS
    assert facts["same"] is True
    assert facts["manifest"] == facts["replayed"]
    assert (facts["tensors"], facts["files"]) == ([], [])
    assert facts["read_bytes"] == mergegit.ok("show", "merged", "--json").json["execution"][
        "read_bytes"
    ]  # fmt: skip


def test_other_bits_are_an_exit_code_of_one(mergegit: CommandLine, forged: str) -> None:
    result = mergegit("replay", forged)
    assert (result.code, result.err) == (1, "")
    assert "not the same: 1 tensor differs" in result.lines[0]
    assert result.lines[1].split() == ["tensor", "blocks", "error"]
    assert result.lines[2].split()[:2] == [NAME, "1"]
    facts = mergegit("replay", forged, "--json")
    assert facts.code == 1
    assert facts.json["same"] is False
    assert [tensor["name"] for tensor in facts.json["tensors"]] == [NAME]
    assert 0.0 < facts.json["tensors"][0]["error"] < 3.0


def test_what_is_no_merge(mergegit: CommandLine) -> None:
    message, hint = mergegit("replay", "math").failed()
    assert message == "math is no merge"
    assert "mergegit log" in hint


def test_the_distance_from_a_full_merge(family_place: Path) -> None:
    mergegit = CommandLine(family_place)
    mergegit.ok("merge", "math", "code", "--budget", "10%", "-b", "merged")
    facts = mergegit.ok("replay", "merged", "--budget", "100%", "--json").json
    assert list(facts) == DISTANCE_KEYS
    assert 0.0 < facts["error"] < 1.0
    assert facts["own_planned_bytes"] < facts["planned_bytes"] == facts["read_bytes"]
    errors = [tensor["error"] for tensor in facts["tensors"]]
    assert errors == sorted(errors, reverse=True)
    lines = mergegit.ok("replay", "merged", "--budget", "100%").lines
    assert (
        f"relative error of the merged delta {facts['error']:.3g}; its plan predicted" in lines[0]
    )
    assert lines[1].split() == ["tensor", "error", "of", "all", "error", "blocks"]
    assert lines[2].split()[0] == facts["tensors"][0]["name"]


def test_a_distance_from_nothing_is_no_number(mergegit: CommandLine) -> None:
    facts = mergegit.ok("replay", "merged", "--budget", "0", "--json").json
    assert facts["error"] is None
    assert "all of it" in mergegit.ok("replay", "merged", "--budget", "0").out


def test_a_bad_budget(mergegit: CommandLine) -> None:
    message, _ = mergegit("replay", "merged", "--budget", "much").failed()
    assert message == "'much' is not a budget"


def test_layers_that_are_no_more(mergegit: CommandLine, family_place: Path) -> None:
    there = CommandLine(family_place)
    there.ok("merge", "math", "code", "--budget", "10%", "-b", "tenth")
    there.ok("repack", "--encoding", "raw")
    message, hint = there("replay", "tenth").failed()
    assert message.startswith("the layers that tenth was merged from can't be read any more")
    assert "`mergegit repack math code`" in hint
    assert "0." in there.ok("replay", "tenth", "--budget", "100%").out
    there.ok("repack", "math", "code")
    there.ok("replay", "tenth")


# -- verify ----------------------------------------------------------------------------------------


def test_a_line_for_each_commit(mergegit: CommandLine, commit_of: Callable[[str], str]) -> None:
    lines = mergegit.ok("verify", "merged").lines
    assert [line.split()[:3] for line in lines] == [
        ["sound", commit_of("merged")[:10], "(merged,"],
        *(["sound", commit_of(ref)[:10], f"({ref})"] for ref in ("code", "math", "base")),
    ]
    assert lines[-1].endswith("(base) add base: 3 tensors, 8 blocks, 1.47 KiB")
    replayed = mergegit.ok("verify", "merged", "--replay").lines
    assert replayed == [f"{lines[0]}; replayed: the same", *lines[1:]]


def test_json(mergegit: CommandLine, commit_of: Callable[[str], str]) -> None:
    facts = mergegit.ok("verify", "merged", "--replay", "--json").json
    assert facts["sound"] is True
    merged, base = facts["commits"][0], facts["commits"][-1]
    assert list(merged) == [
        "commit", "refs", "title", "sound", "merge", "tensors", "blocks", "bytes",
        "checked_bytes", "problems", "replay",
    ]  # fmt: skip
    assert (merged["commit"], merged["merge"]) == (commit_of("merged"), True)
    assert list(merged["replay"]) == REPLAY_KEYS
    assert (base["merge"], base["replay"], base["problems"]) == (False, None, [])


def test_what_is_not_as_it_should_be(mergegit: CommandLine, place: Path, forged: str) -> None:
    mergegit.ok("verify", forged)
    result = mergegit("verify", forged, "--replay")
    assert (result.code, result.err) == (1, "")
    assert result.lines[0].startswith("damaged ")
    assert result.lines[1] == f"        replayed it comes out otherwise: {NAME}"
    with Repository.open(place) as repository:
        record = max(records_of(repository, "raw"), key=lambda r: r.header.length)
    flip(record.pack, record.offset)
    result = mergegit("verify", "merged")
    assert result.code == 1
    assert record.header.key.hex()[:12] in result.out
    facts = mergegit("verify", "merged", "--json")
    assert (facts.code, facts.json["sound"]) == (1, False)
