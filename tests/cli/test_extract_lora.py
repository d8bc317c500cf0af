"""`mergegit extract-lora`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

from tests.adapters import CONFIG, WEIGHTS
from tests.cli.conftest import CommandLine


def test_it_says_how_far_the_factors_are_off(mergegit: CommandLine, tmp_path: Path) -> None:
    result = mergegit.ok("extract-lora", "math", tmp_path / "lora", "--rank", "3")
    first, error, head, kind = result.lines
    assert re.fullmatch(
        rf"what math changed of base written to {re.escape(str(tmp_path))}/lora: "
        r"1 matrix of rank 3, 1 tensor whole; [\d.]+ KiB, [\d.]+ s",
        first,
    )
    assert re.fullmatch(r"relative error of the whole change: 0\.\d{3}", error)
    assert head.split() == ["matrices", "count", "median", "worst"]
    assert re.fullmatch(r"  mlp\.up_proj +1 +(0\.\d{3}) +\1", kind)
    assert {path.name for path in (tmp_path / "lora").iterdir()} == {WEIGHTS, CONFIG}


def test_json(mergegit: CommandLine, tmp_path: Path, commit_of: Callable[[str], str]) -> None:
    report = mergegit.ok(
        "extract-lora", "math", tmp_path / "lora", "--rank", "8", "--dtype", "float32", "--json"
    ).json
    assert list(report) == [
        "commit", "base", "base_ref", "directory", "rank", "matrices", "whole", "bytes", "error",
        "kinds", "seconds",
    ]  # fmt: skip
    assert (report["commit"], report["base"]) == (commit_of("math"), commit_of("base"))
    assert (report["base_ref"], report["rank"]) == ("base", 8)
    assert (report["matrices"], report["whole"]) == (1, 1)
    # Of a matrix with eight columns nothing is left out.
    assert 0 <= report["error"] < 1e-5
    (kind,) = report["kinds"]
    assert list(kind) == ["kind", "count", "median", "worst"]
    assert (kind["kind"], kind["count"]) == ("mlp.up_proj", 1)
    files = list((tmp_path / "lora").iterdir())
    assert report["bytes"] == sum(file.stat().st_size for file in files)


def test_what_is_written_can_be_added_and_merged(mergegit: CommandLine, tmp_path: Path) -> None:
    mergegit.ok("extract-lora", "math", tmp_path / "lora", "--rank", "8", "--base", "base")
    assert json.loads((tmp_path / "lora" / CONFIG).read_text())["peft_type"] == "LORA"
    added = mergegit("add", tmp_path / "lora", "--json")
    assert added.json["is_adapter"] is True
    assert added.json["base_ref"] == "base"
    mergegit.ok("merge", "code", "lora", "-b", "both")


def test_the_rank_must_be_given(mergegit: CommandLine) -> None:
    message, _ = mergegit("extract-lora", "math", "out").failed(code=2)
    assert "--rank" in message
    message, _ = mergegit("extract-lora", "math", "out", "--rank", "0").failed(code=2)
    assert "0" in message


def test_what_can_not_be_extracted(mergegit: CommandLine, tmp_path: Path) -> None:
    message, hint = mergegit("extract-lora", "base", "out", "--rank", "4").failed()
    assert message == "base was added without a base"
    assert "--base REF" in hint
    message, _ = mergegit("extract-lora", "math", "out", "--rank", "4", "--base", "math").failed()
    assert message == "math does not differ from math"
    message, _ = mergegit("extract-lora", "math", "out", "--rank", "4", "--dtype", "int4").failed()
    assert message == "'int4' is no dtype for factors"
    mergegit.ok("extract-lora", "math", tmp_path / "lora", "--rank", "4")
    mergegit("add", tmp_path / "lora")
    message, hint = mergegit("extract-lora", "lora", "out", "--rank", "4").failed()
    assert message == "lora is an adapter already"
    assert not (mergegit.directory / "out").exists()
    message, _ = mergegit("extract-lora", "math", tmp_path / "lora", "--rank", "4").failed()
    assert "is not empty" in message
