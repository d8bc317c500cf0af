"""`mergegit show`."""

from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path

import pytest

from mergegit._version import VERSION
from mergegit.cli.text import error_number, human_bytes
from tests.cli.conftest import CommandLine
from tests.cli.test_log import COMMIT_KEYS
from tests.cli.test_plan import KEYS
from tests.handmade import Raw, write_safetensors


def test_a_commit(mergegit: CommandLine) -> None:
    lines = mergegit.ok("show", "math").lines
    assert lines[:-2] == mergegit.ok("log", "math", "-n", "1").lines
    assert lines[-1].startswith("manifest ")
    assert lines[-1].endswith("3 tensors, 1.02 KiB, in 1 safetensors file, beside 4 other files")


def test_a_merge_shows_its_plan(mergegit: CommandLine) -> None:
    commit = mergegit.ok("show", "merged", "--json").json
    shown = mergegit.ok("show", "merged").out
    plan = mergegit.ok("show", commit["plan"][:12]).out
    assert shown.endswith(plan)
    head = plan.splitlines()[0]
    assert head.startswith(
        f"plan {commit['plan'][:10]}: task_arithmetic of math, code on base base"
    )
    assert "budget 1" in head


def test_a_manifest_lists_tensors_and_files(mergegit: CommandLine) -> None:
    manifest = mergegit.ok("show", "math", "--json").json["manifest"]
    lines = mergegit.ok("show", manifest).lines
    assert lines[0] == f"manifest {manifest}"
    assert lines[1].split() == ["tensor", "dtype", "shape", "bytes", "id"]
    assert lines[2].split()[:5] == ["model.embed_tokens.weight", "BF16", "24x8", "384", "B"]
    assert "  model.safetensors: 3 tensors" in lines
    assert any(line.startswith("  original/params.json: ") for line in lines)


def test_a_tensor_lists_blocks(mergegit: CommandLine) -> None:
    manifest = mergegit.ok("show", "math", "--json").json["manifest"]
    facts = mergegit.ok("show", manifest, "--json").json["tensors"]["model.norm.weight"]
    lines = mergegit.ok("show", facts["tensor"]).lines
    assert lines[0] == f"tensor {facts['tensor']}"
    assert lines[1] == "  BF16 [8], 16 B"
    assert lines[3].split()[:3] == ["0", "16", "B"]


def test_json(mergegit: CommandLine, commit_of: Callable[[str], str]) -> None:
    commit = mergegit.ok("show", "merged", "--json").json
    assert list(commit) == COMMIT_KEYS
    assert commit["commit"] == commit_of("merged")
    assert list(mergegit.ok("show", commit["plan"], "--json").json) == KEYS
    manifest = mergegit.ok("show", commit["manifest"], "--json").json
    assert list(manifest) == ["manifest", "tensors", "shards", "files"]
    assert [list(shard) for shard in manifest["shards"]] == [["path", "tensors"]]
    facts = manifest["tensors"]["model.norm.weight"]
    assert list(facts) == ["tensor", "dtype", "shape", "bytes"]
    assert (facts["dtype"], facts["shape"], facts["bytes"]) == ("BF16", [8], 16)
    tensor = mergegit.ok("show", facts["tensor"], "--json").json
    assert list(tensor) == ["tensor", "dtype", "shape", "bytes", "blocks"]
    assert len(tensor["blocks"]) == 1


def test_long_lists_are_cut_unless_all_is_asked_for(mergegit: CommandLine, tmp_path: Path) -> None:
    tensors = {f"t{number:03}": Raw.random("F32", 2, seed=number) for number in range(50)}
    mergegit.ok("add", write_safetensors(tmp_path / "many.safetensors", tensors))
    manifest = mergegit.ok("show", "many", "--json").json["manifest"]
    short, long = mergegit.ok("show", manifest), mergegit.ok("show", manifest, "--all")
    assert sum(line.startswith("  t") for line in short.lines) == 41  # with the head
    assert "  ... and 10 more; see --all" in short.lines
    assert sum(line.startswith("  t") for line in long.lines) == 51


def test_a_name_can_not_write_on_the_terminal(mergegit: CommandLine, tmp_path: Path) -> None:
    tensors = {"\x1b]0;title\x07": Raw.random("F32", 2)}
    mergegit.ok("add", write_safetensors(tmp_path / "odd.safetensors", tensors))
    manifest = mergegit.ok("show", "odd", "--json").json["manifest"]
    out = mergegit.ok("show", manifest).out
    assert "\x1b" not in out
    assert "\\x1b]0;title\\x07" in out


@pytest.mark.parametrize("text", ["nothing", "ab", "merged~9", "merged^7", "0123456789"])
def test_what_is_not_there(text: str, mergegit: CommandLine) -> None:
    message, hint = mergegit("show", text).failed()
    assert text in message
    assert hint


def test_a_merge_tells_how_it_came_about(mergegit: CommandLine) -> None:
    facts = mergegit.ok("show", "merged", "--json").json
    plan = mergegit.ok("show", facts["plan"], "--json").json
    lines = mergegit.ok("show", "merged").lines
    start = next(n for n, line in enumerate(lines) if line.startswith("budget "))
    story = {line.split()[0]: " ".join(line.split()[1:]) for line in lines[start : start + 7]}
    assert list(story) == ["budget", "planned", "error", "read", "wrote", "with", "on"]
    assert story["budget"].startswith(human_bytes(plan["budget_bytes"]) + ", 60.0% of ")
    planned = plan["planned_bytes"] + plan["remembered_bytes"]
    assert story["planned"].startswith(f"{human_bytes(planned)} of experts, ")
    error = error_number(plan["predicted_error"])
    assert story["error"].startswith(f"predicted {error} of the merged delta, at most ")
    assert story["read"].startswith(human_bytes(facts["execution"]["read_bytes"]))
    assert story["with"].startswith(
        f"mergegit {VERSION}, python {platform.python_version()}, numpy"
    )
    assert story["on"].endswith(" threads") or story["on"].endswith(" thread")
    assert lines[start + 7].startswith("plan ")


def test_what_was_known_from_earlier_merges_is_told(mergegit: CommandLine) -> None:
    mergegit.ok("merge", "math", "code", "-p", "math.weight=0.5", "--budget", "60%", "-b", "again")
    mergegit.ok("merge", "math", "code", "-p", "math.weight=0.5", "-b", "whole", "-m", "so")
    out = mergegit.ok("show", "whole").out
    assert "no budget, of " in out
    execution = mergegit.ok("show", "whole", "--json").json["execution"]
    known = execution["spared_bytes"]
    assert (f"and {human_bytes(known)} known from earlier merges" in out) == (known > 0)
