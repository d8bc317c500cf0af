"""`mergegit similarity`."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import CommandLine

KEYS = [
    "base", "exact", "read_bytes", "tensors", "elements", "experts", "pairs", "left_out",
]  # fmt: skip
PAIR = [
    "experts", "cosine", "cosine_error", "sign_agreement", "sign_agreement_error", "overlap",
    "overlap_low", "overlap_high",
]  # fmt: skip


def test_a_line_for_each_expert_and_three_matrices(mergegit: CommandLine) -> None:
    lines = mergegit.ok("similarity", "math", "code", "prose").lines
    assert lines[0] == "3 experts on base base, 3 tensors, 520 elements, from statistics"
    assert [line.split()[0] for line in lines[2:5]] == ["math", "code", "prose"]
    titles = [n for n, line in enumerate(lines) if not line.startswith(" ")][1:]
    assert [lines[n].split(" (")[0].split(":")[0] for n in titles] == [
        "cosines",
        "signs that agree, of the elements that both changed",
        "elements that both changed, of all",
    ]
    assert "standard error at most" in lines[titles[0]]
    for at in titles:
        assert lines[at + 1].split() == ["1", "2", "3"]
        assert [line.split()[:2] for line in lines[at + 2 : at + 5]] == [
            ["1", "math"], ["2", "code"], ["3", "prose"],
        ]  # fmt: skip


def test_what_is_read_is_not_marked(mergegit: CommandLine) -> None:
    out = mergegit.ok("similarity", "math", "code", "--exact").out
    assert "~" not in out
    assert "standard error" not in out
    assert "520 elements, read" in out


def test_without_refs_all_experts_of_the_base(mergegit: CommandLine) -> None:
    facts = mergegit.ok("similarity", "--json").json
    assert [expert["ref"] for expert in facts["experts"]] == ["code", "math", "prose"]
    assert facts["base"]["ref"] == "base"


def test_json(mergegit: CommandLine, commit_of: Callable[[str], str]) -> None:
    facts = mergegit.ok("similarity", "math", "prose", "--json").json
    assert list(facts) == KEYS
    assert facts["base"] == {"ref": "base", "commit": commit_of("base")}
    assert [list(expert) for expert in facts["experts"]] == [
        ["ref", "commit", "relative", "relative_error", "changed"]
    ] * 2
    (pair,) = facts["pairs"]
    assert list(pair) == PAIR
    assert pair["experts"] == ["math", "prose"]
    assert pair["cosine_error"] > 0
    assert pair["overlap_low"] <= pair["overlap"] <= pair["overlap_high"]
    read = mergegit.ok("similarity", "math", "prose", "--json", "--exact").json
    assert read["read_bytes"] > 0
    assert read["pairs"][0]["cosine_error"] is None
    assert abs(read["pairs"][0]["cosine"] - pair["cosine"]) < 5 * pair["cosine_error"]


def test_names_restrict_the_tensors(mergegit: CommandLine) -> None:
    facts = mergegit.ok("similarity", "--tensors", "norm", "--tensors", "mlp", "--json").json
    assert facts["tensors"] == 2


def test_a_drawing(mergegit: CommandLine, tmp_path: Path) -> None:
    path = tmp_path / "alike.svg"
    mergegit.ok("similarity", "math", "code", "--plot", path)
    text = path.read_text()
    assert text.startswith("<svg ")
    assert "cosines of what was changed of base" in text
    assert "estimated from statistics" in text


def test_a_drawing_is_svg(mergegit: CommandLine, tmp_path: Path) -> None:
    message, _ = mergegit("similarity", "--plot", tmp_path / "alike.png").failed(2)
    assert "alike.svg" in message
    message, _ = mergegit("similarity", "--plot", tmp_path / "no" / "alike.svg").failed()
    assert "alike.svg" in message


def test_a_narrow_terminal_gets_marks_alone(
    mergegit: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    lines = mergegit.ok("similarity", "math", "code", "prose").lines
    at = next(n for n, line in enumerate(lines) if line.startswith("cosines"))
    assert re.fullmatch(r"  1 math ( +-?[·░▒▓█]){3}", lines[at + 2])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("math",), "alone"),
        (("math", "nothing"), "'nothing'"),
        (("--base", "math"), "no two branches on math"),
        (("--tensors", "zzz"), "no tensor is called like 'zzz'"),
    ],
)
def test_what_can_not_be_compared(
    arguments: tuple[str, ...], words: str, mergegit: CommandLine
) -> None:
    message, hint = mergegit("similarity", *arguments).failed()
    assert words in message
    assert hint
