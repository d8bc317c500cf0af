"""`mergegit checkout`."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file

from mergegit import Repository
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
    keys = ["commit", "directory", "files", "unchanged", "bytes", "seconds", "notes"]
    assert list(report) == keys
    files = [file for file in (mergegit.directory / "out").rglob("*") if file.is_file()]
    assert report["commit"] == commit_of("merged")
    assert report["directory"] == "out"
    assert report["files"] == len(files)
    assert report["bytes"] == sum(file.stat().st_size for file in files)


def test_update(mergegit: CommandLine) -> None:
    mergegit.ok("checkout", "math", "out")
    mergegit.ok("checkout", "code", "fresh")
    report = mergegit.ok("checkout", "code", "out", "--update", "--json").json
    fresh = tree_of(mergegit.directory / "fresh")
    assert tree_of(mergegit.directory / "out") == fresh
    files = [data for data in fresh.values() if data is not None]
    assert report["files"] + report["unchanged"] == len(files)
    assert "0 files, 0 B" in mergegit.ok("checkout", "code", "out", "--update").lines[-1]


def test_a_target_in_the_way(mergegit: CommandLine) -> None:
    mergegit.ok("checkout", "math", "out")
    message, hint = mergegit("checkout", "math", "out").failed()
    assert message == "directory out is not empty"
    assert hint == "choose a directory that does not exist"


def test_a_directory_whose_name_is_not_utf8(mergegit: CommandLine) -> None:
    result = mergegit.ok("checkout", "math", "caf\udce9")
    assert "math written to caf\\udce9" in result.out
    assert (mergegit.directory / "caf\udce9" / "config.json").is_file()


def test_another_dtype_and_shard_size(mergegit: CommandLine) -> None:
    result = mergegit.ok("checkout", "math", "out", "--dtype", "float32", "--shard-size", "2kB")
    assert "math written to out: " in result.out
    out = mergegit.directory / "out"
    files = sorted(out.glob("*.safetensors"))
    assert [file.name for file in files] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    assert {t.dtype for file in files for t in load_file(file).values()} == {torch.float32}
    assert json.loads((out / "config.json").read_text())["torch_dtype"] == "float32"


def test_what_is_left_out_is_said(mergegit: CommandLine, tiny_family: Family) -> None:
    path = mergegit.directory / "both"
    shutil.copytree(tiny_family.base, path)
    (path / "pytorch_model.bin").write_bytes(b"weights")
    with Repository.open(mergegit.directory) as repository:
        repository.add(path)
    result = mergegit("checkout", "both", "out", "--shard-size", "5GB")
    assert (result.code, result.err) == (0, "note: left out: pytorch_model.bin\n")
    result = mergegit("checkout", "both", "half", "--dtype", "float16", "--json")
    assert result.json["notes"] == ["left out: pytorch_model.bin"]


def test_wrong_forms(mergegit: CommandLine) -> None:
    message, hint = mergegit("checkout", "math", "out", "--dtype", "int8").failed()
    assert message == "'int8' is no dtype to check out in"
    assert hint.startswith("choose one of float32, bfloat16, float16")
    message, hint = mergegit("checkout", "math", "out", "--shard-size", "10%").failed()
    assert message == "'10%' is not a shard size"
    assert hint == "write it like 5GB or 500MiB"
    assert not (mergegit.directory / "out").exists()
