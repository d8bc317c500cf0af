"""`mergegit add`."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.cli.conftest import AUTHOR, CommandLine
from tests.families import Family, tiny_checkpoint

KEYS = [
    "commit", "branch", "is_new", "is_adapter", "base", "base_ref", "tensors", "total_bytes",
    "new_bytes", "blocks", "new_blocks", "seconds", "notes",
]  # fmt: skip


def test_a_base_and_an_expert(nowhere: CommandLine, tiny_family: Family) -> None:
    nowhere.ok("init")
    base, numbers = nowhere.ok("add", tiny_family.base).lines
    assert re.fullmatch(r"added base as a base: [0-9a-f]{10}", base)
    assert re.fullmatch(
        r"  3 tensors, 1\.\d\d KiB; new [\d.]+ K?i?B \(\d+\.\d%\) in 8 of 8 blocks; \d\.\d\d s",
        numbers,
    )
    expert, _ = nowhere.ok("add", tiny_family.experts[0]).lines
    assert re.fullmatch(r"added math on base base: [0-9a-f]{10}", expert)


def test_json(mergegit: CommandLine, tmp_path: Path, commit_of: Callable[[str], str]) -> None:
    path = tiny_checkpoint(tmp_path / "new", moved=9)
    report = mergegit.ok("add", path, "--json").json
    assert list(report) == KEYS
    assert report["commit"] == commit_of("new")
    assert (report["branch"], report["is_new"]) == ("new", True)
    assert (report["base"], report["base_ref"]) == (commit_of("base"), "base")
    assert report["tensors"] == 3
    assert 0 < report["new_bytes"] < report["total_bytes"]
    assert 0 < report["new_blocks"] < report["blocks"]
    assert report["notes"] == []


def test_again(mergegit: CommandLine, tiny_family: Family, commit_of: Callable[[str], str]) -> None:
    result = mergegit.ok("add", tiny_family.experts[0])
    commit = commit_of("math")
    assert result.out == (f"math holds this checkpoint already, at {commit[:10]}; nothing to do\n")
    report = mergegit.ok("add", tiny_family.experts[0], "--json").json
    assert list(report) == KEYS
    assert (report["is_new"], report["commit"], report["new_bytes"]) == (False, commit, 0)


def test_under_another_name(
    mergegit: CommandLine, tiny_family: Family, commit_of: Callable[[str], str]
) -> None:
    result = mergegit.ok("add", tiny_family.experts[0], "--name", "other/math")
    assert result.lines[0] == f"added other/math on base base: {commit_of('math')[:10]}"
    assert "new 0 B (0.0%) in 0 of 8 blocks" in result.lines[1]


def test_what_the_commit_says(mergegit: CommandLine, tmp_path: Path) -> None:
    mergegit.ok("add", tiny_checkpoint(tmp_path / "new", moved=9), "-m", "first\n\nwith care")
    commit = mergegit.ok("show", "new", "--json").json
    assert (commit["author"], commit["message"]) == (AUTHOR, "first\n\nwith care")


def test_notes_go_to_standard_error(mergegit: CommandLine, tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path / "odd", moved=9)
    (path / "config.json").write_text('{"num_hidden_layers": 30, "vocab_size": 24}')
    result = mergegit("add", path)
    assert result.code == 0
    assert result.err == "note: config.json promises 30 layers; the weights have 1\n"
    assert result.lines[0].startswith("added odd on base base: ")


def test_with_json_notes_are_in_it_alone(mergegit: CommandLine, tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path / "odd", moved=9)
    (path / "config.json").write_text('{"num_hidden_layers": 30, "vocab_size": 24}')
    notes = mergegit.ok("add", path, "--json").json["notes"]
    assert notes == ["config.json promises 30 layers; the weights have 1"]


def test_a_chosen_base_and_none(mergegit: CommandLine, tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path / "new", moved=9)
    on_math = mergegit.ok("add", path, "--base", "math", "--name", "a", "--json").json
    assert on_math["base_ref"] == "math"
    tiny_checkpoint(tmp_path / "newer", moved=10)
    result = mergegit.ok("add", tmp_path / "newer", "--no-base")
    assert result.lines[0].startswith("added newer as a base: ")


def test_a_base_that_comes_too_late_is_noted(mergegit: CommandLine, tiny_family: Family) -> None:
    result = mergegit("add", tiny_family.experts[0], "--base", "code")
    assert result.code == 0
    assert "holds this checkpoint already, on base base; it stays so" in result.err


def test_a_base_and_none_at_once_is_wrong_usage(mergegit: CommandLine, tiny_family: Family) -> None:
    message, _ = mergegit("add", tiny_family.base, "--base", "math", "--no-base").failed(2)
    assert message == "--base and --no-base exclude each other"


def test_a_name_that_can_not_be_a_branch_can_be_given(
    mergegit: CommandLine, tmp_path: Path
) -> None:
    path = tiny_checkpoint(tmp_path / "20240501", moved=9)
    message, hint = mergegit("add", path).failed()
    assert "'20240501'" in message
    assert "--name" in hint
    mergegit.ok("add", path, "--name", "may")


def test_plain_bytes_take_more(mergegit: CommandLine, family: Family) -> None:
    mergegit.ok("add", family.base, "--no-base", "--name", "big")
    as_delta = mergegit.ok("add", family.experts[0], "--base", "big", "--json").json
    plainly = mergegit.ok(
        "add", family.experts[1], "--base", "big", "--encoding", "raw", "--json"
    ).json
    assert as_delta["new_bytes"] < 0.8 * plainly["new_bytes"]


def test_a_directory_is_found_from_where_the_command_runs(
    mergegit: CommandLine, tmp_path: Path, tiny_family: Family
) -> None:
    shutil.copytree(tiny_family.experts[0], mergegit.directory / "here")
    (mergegit.directory / "below").mkdir()
    inner = CommandLine(mergegit.directory / "below")
    assert inner.ok("add", "../here").lines[0].startswith("added here on base base")
    outer = CommandLine(tmp_path)
    assert "nothing to do" in outer.ok("-C", mergegit.directory, "add", "here").out
    assert "nothing to do" in outer.ok("add", "-C", mergegit.directory, "here").out


def test_pytorch_files(mergegit: CommandLine, tmp_path: Path, tiny_family: Family) -> None:
    path = tmp_path / "legacy"
    shutil.copytree(tiny_family.experts[0], path)
    weights = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    torch.save(weights, path / "pytorch_model.bin")
    result = mergegit("add", path)
    assert result.code == 0
    assert result.lines[0].startswith("added legacy on base base: ")
    assert result.err == "note: read from PyTorch files; it comes back as safetensors\n"
    torch.save({"w": object}, path / "pytorch_model.bin")
    message, hint = mergegit("add", path).failed()
    assert message.endswith(".bin holds what could run code, or is damaged: torch refuses it")
    assert hint == "save the model's state_dict as safetensors where it was made"
