"""docs/reliability.md names the tests that hold what it promises, and they are there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "reliability.md").read_text()
NAMED = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)


def functions_in(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_the_tests_that_are_named_are_there() -> None:
    missing = [f"{path}::{name}" for path, name in NAMED if name not in functions_in(path)]
    assert missing == []


def test_every_invariant_names_a_test() -> None:
    part = PAGE.partition("## Invariants")[2].partition("## After a crash")[0]
    invariants = re.findall(r"^(\d+)\. \*\*(.*?)(?=^\d+\. \*\*|^#|^\||\Z)", part, re.M | re.S)
    assert [int(number) for number, _ in invariants] == list(range(1, len(invariants) + 1))
    assert len(invariants) >= 20
    for number, text in invariants:
        assert re.search(r"`tests/[\w/]+\.py::test_\w+`", text), f"invariant {number} names no test"


def test_the_switches_that_are_named_are_those_of_the_tests() -> None:
    for name, path in re.findall(r"(MERGEGIT_\w+)=\S+\s+pytest (\S+)", PAGE):
        assert f'"{name}"' in (ROOT / path).read_text(), name
