"""`mergegit diff`."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from mergegit import Repository
from tests.cli.conftest import CommandLine
from tests.cli.test_terminal import ESCAPE, on_terminal
from tests.handmade import Raw, write_safetensors

KEYS = [
    "old", "new", "against", "exact", "read_bytes", "summary", "tensors", "groups", "shards",
    "files",
]  # fmt: skip
SUMMARY = [
    "tensors", "same", "changed", "added", "removed", "reshaped", "blocks", "blocks_changed",
    "elements", "elements_changed", "norm", "norm_error", "relative", "relative_error", "cosine",
    "cosine_error",
]  # fmt: skip
TENSOR = [
    "name", "kind", "layer", "status", "old", "new", "blocks", "blocks_changed", "elements",
    "elements_changed", "norm", "norm_error", "relative", "relative_error", "cosine",
    "cosine_error",
]  # fmt: skip
GROUP = [
    "kind", "layer", "tensors", "changed", "norm", "norm_error", "relative", "relative_error",
    "cosine", "cosine_error",
]  # fmt: skip


def test_it_says_what_changed_and_by_how_much(mergegit: CommandLine) -> None:
    lines = mergegit.ok("diff", "base", "math").lines
    facts = mergegit.ok("diff", "base", "math", "--json").json["summary"]
    share = facts["elements_changed"] / facts["elements"]
    assert lines[0] == (
        f"base..math: 2 of 3 tensors changed (2 of 3 blocks, {100 * share:.1f}% of 520 elements)"
    )
    assert lines[1].startswith(
        f"  relative norm of the change {facts['relative']:.3g}, largest in "
    )


def test_the_heat_map_has_rows_for_kinds_and_columns_for_layers(layers: CommandLine) -> None:
    lines = layers.ok("diff", "base", "code", "--weights").lines
    at = lines.index("  model.layers.N, by layer:")
    assert lines[at + 1] == "                    0 1 2 3"
    rows = [line.rsplit(None, 1) for line in lines[at + 2 : at + 5]]
    # All moved by the same step, and weights grow with the layer.
    assert rows == [
        ["  input_layernorm", "████▓▓▓▓"],
        ["  mlp.up_proj", "████▓▓▓▓"],
        ["  self_attn.q_proj", "████▓▓▓▓"],
    ]
    assert lines[at + 5] == "  outside of the layers:"
    assert [line.split()[0] for line in lines[at + 6 : -1]] == [
        "lm_head", "model.embed_tokens", "model.norm",
    ]  # fmt: skip
    assert lines[-1].startswith("  relative norm: · none  ░ to ")


def test_no_line_is_wider_than_the_terminal(
    layers: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "24")
    lines = layers.ok("diff", "base", "math", "--weights").lines
    at = lines.index("  model.layers.N, by layer:")
    assert all(len(line) <= 24 for line in lines[at + 1 : at + 5])


def test_a_line_for_each_tensor(mergegit: CommandLine) -> None:
    lines = mergegit.ok("diff", "base", "math", "--stat", "--weights", "--against", "code").lines
    head = ["tensor", "form", "relative", "norm", "blocks", "elements", "cosine"]
    assert lines[3].split() == head
    names = [line.split()[0] for line in lines[4:]]
    assert len(names) == 2
    assert lines[4].split()[1:3] == ["BF16", "24x8"] or "40x8" in lines[4]
    assert not any("░" in line for line in lines)


def test_estimates_are_marked_and_exact_numbers_are_not(mergegit: CommandLine) -> None:
    told = mergegit.ok("diff", "math", "code", "--weights").out
    read = mergegit.ok("diff", "math", "code", "--weights", "--exact").out
    assert "relative norm of the change ~0." in told
    assert " ± " in told
    assert "relative norm of the change 0." in read


def test_what_statistics_do_not_tell_is_said_with_what_to_do(mergegit: CommandLine) -> None:
    mergegit.ok("merge", "math", "code", "--method", "ties", "-p", "density=0.5", "-b", "voted")
    lines = mergegit.ok("diff", "base", "voted", "--weights").lines
    assert "relative norm of the change ?" in lines[1]
    assert any("--exact reads what differs" in line for line in lines)
    assert "relative norm of the change 0." in mergegit.ok("diff", "base", "voted", "--exact").out


def test_files_are_shown_as_unified_diffs(mergegit: CommandLine) -> None:
    lines = mergegit.ok("diff", "base", "math", "--files").lines
    assert lines[:2] == ["--- a/README.md", "+++ b/README.md"]
    assert "-# base" in lines
    assert "+# math" in lines


def test_files_that_are_no_text_are_told_by_their_size(
    mergegit: CommandLine, place: Path, tmp_path: Path
) -> None:
    mergegit.ok("checkout", "math", tmp_path / "odd")
    (tmp_path / "odd" / "tokenizer.model").write_bytes(b"\0" * 2048)
    (tmp_path / "odd" / "README.md").write_bytes(b"\xff\xfe")
    (tmp_path / "odd" / "config.json").unlink()
    mergegit.ok("add", tmp_path / "odd", "--base", "base")
    lines = mergegit.ok("diff", "math", "odd", "--files").lines
    assert lines[0].startswith("README.md: binary, ")
    assert re.fullmatch(r"config\.json: removed, \d+ B", lines[1])
    assert lines[2] == "tokenizer.model: added, 2.00 KiB"


def test_lines_of_files_can_not_write_on_the_terminal(
    mergegit: CommandLine, tmp_path: Path
) -> None:
    mergegit.ok("checkout", "math", tmp_path / "odd")
    (tmp_path / "odd" / "README.md").write_text("\x1b]0;title\x07\ta tab\n" + "x" * 2000 + "\n")
    mergegit.ok("add", tmp_path / "odd", "--base", "base")
    result = mergegit.ok("diff", "math", "odd", "--files")
    assert "\x1b" not in result.out
    assert "+\\x1b]0;title\\x07\ta tab" in result.lines
    assert any(line.endswith(" characters more") and len(line) < 600 for line in result.lines)


def test_commits_that_are_the_same_do_not_differ(mergegit: CommandLine) -> None:
    assert mergegit.ok("diff", "merged", "v1").lines == ["merged and v1 do not differ"]


def test_names_restrict_it_to_tensors_and_files(mergegit: CommandLine) -> None:
    facts = mergegit.ok("diff", "base", "code", "norm", "README", "--json").json
    assert {tensor["name"] for tensor in facts["tensors"]} <= {"model.norm.weight"}
    assert facts["summary"]["tensors"] == 1
    assert [file["path"] for file in facts["files"]] == ["README.md"]


def test_json(mergegit: CommandLine, commit_of: Callable[[str], str]) -> None:
    facts = mergegit.ok("diff", "base", "math", "--against", "code", "--json").json
    assert list(facts) == KEYS
    assert facts["old"] == {"ref": "base", "commit": commit_of("base")}
    assert facts["against"]["commit"] == commit_of("code")
    assert list(facts["summary"]) == SUMMARY
    assert all(list(tensor) == TENSOR for tensor in facts["tensors"])
    assert all(list(group) == GROUP for group in facts["groups"])
    for tensor in facts["tensors"]:
        assert tensor["relative_error"] is None  # statistics know it exactly
        assert 0 < tensor["relative"] < 1
        assert tensor["old"]["dtype"] == "BF16"
    assert facts["shards"] == {"old": ["model.safetensors"], "new": ["model.safetensors"]}
    (file,) = facts["files"]
    assert list(file) == ["path", "status", "old_bytes", "new_bytes", "binary", "diff"]
    assert "+# math" in file["diff"]


def test_json_groups_by_kind_and_layer(layers: CommandLine) -> None:
    groups = layers.ok("diff", "base", "math", "--json").json["groups"]
    kinds = [(g["kind"], g["layer"]) for g in groups if g["layer"] == 2]
    assert kinds == [
        ("model.layers.*.input_layernorm.weight", 2),
        ("model.layers.*.mlp.up_proj.weight", 2),
        ("model.layers.*.self_attn.q_proj.weight", 2),
    ]
    assert all(group["tensors"] == group["changed"] == 1 for group in groups)


def test_json_says_what_was_read(mergegit: CommandLine) -> None:
    assert mergegit.ok("diff", "math", "code", "--json").json["read_bytes"] == 0
    facts = mergegit.ok("diff", "math", "code", "--exact", "--json").json
    assert facts["exact"]
    assert facts["read_bytes"] > 0
    assert all(tensor["norm_error"] is None for tensor in facts["tensors"])


def test_other_shards_are_said(mergegit: CommandLine, tmp_path: Path) -> None:
    mergegit.ok("checkout", "base", tmp_path / "split", "--shard-size", "400B")
    mergegit.ok("add", tmp_path / "split", "--base", "base")
    result = mergegit.ok("diff", "base", "split")
    assert "0 of 3 tensors changed" in result.out
    assert "  the weights lie in other files: 1 before, 3 now" in result.lines


def test_an_adapter_is_said_to_be_one(mergegit: CommandLine, place: Path, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    lora = tmp_path / "lora"
    lora.mkdir()
    prefix = "base_model.model.model.layers.0.mlp.up_proj"
    save_file(
        {f"{prefix}.lora_A.weight": torch.ones(2, 8), f"{prefix}.lora_B.weight": torch.ones(40, 2)},
        lora / "adapter_model.safetensors",
    )
    (lora / "adapter_config.json").write_text(
        '{"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["up_proj"]}'
    )
    with Repository.open(place) as repository:
        repository.add(lora, base="base")
    result = mergegit("diff", "base", "lora", "--weights")
    assert result.code == 0
    assert result.err == "note: lora is an adapter, seen as its base with the adapter on it\n"
    assert "1 of 3 tensors changed" in result.out


def test_colours_only_repeat_what_the_marks_say(place: Path) -> None:
    coloured = on_terminal("diff", "base", "math", cwd=place)
    plain = on_terminal("diff", "base", "math", cwd=place, NO_COLOR="1")
    assert ESCAPE.search(coloured)
    assert not ESCAPE.search(plain)
    assert ESCAPE.sub("", coloured) == plain


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("base", "nothing"), "'nothing'"),
        (("base", "math", "--against", "nothing"), "'nothing'"),
        (("base", "math", "zzz"), "no tensor or file is called like 'zzz'"),
        (("base", "math", "mlp", "--files"), "no file is called like 'mlp'"),
    ],
)
def test_what_is_not_there(arguments: tuple[str, ...], words: str, mergegit: CommandLine) -> None:
    message, hint = mergegit("diff", *arguments).failed()
    assert words in message
    assert hint


@pytest.mark.parametrize(
    "arguments",
    [("--weights", "--files"), ("--files", "--exact"), ("--files", "--stat"),
     ("--files", "--against", "code")],
)  # fmt: skip
def test_options_that_exclude_one_another(
    arguments: tuple[str, ...], mergegit: CommandLine
) -> None:
    mergegit("diff", "base", "math", *arguments).failed(2)


def test_what_was_zero_is_said_to_have_been(mergegit: CommandLine, tmp_path: Path) -> None:
    for name, value in (("a", 0.0), ("b", 0.5)):
        tensor = Raw("F32", (2,), struct.pack("<2f", value, value))
        mergegit("add", write_safetensors(tmp_path / f"{name}.safetensors", {"bias": tensor}))
    assert "  bias    F32 2    from 0" in mergegit.ok("diff", "a", "b", "--stat").out
    assert "  bias  █ from 0" in mergegit.ok("diff", "a", "b").lines
