"""`python -m benchmarks.page NUMBERS.json`: docs/benchmarks.md and its pictures, from numbers."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mergegit.cli.chart import error_chart

DOCS = Path(__file__).parents[1] / "docs"
PLANNERS = {
    "hash": "whole blocks, by a hash",
    "energy": "whole blocks, by energy",
    "equal": "equal planes for all",
    "ours": "mergegit",
}


def main() -> None:
    numbers = json.loads(Path(sys.argv[1]).read_text())
    parts = ["# Benchmarks", "", "Measured by `make bench` on: " + _machine(numbers["machine"])]
    if "fidelity" in numbers:
        parts += _fidelity(numbers["fidelity"])
    if "speed" in numbers:
        parts += _speed(numbers["speed"])
    if "peers" in numbers:
        parts += _peers(numbers["peers"])
    (DOCS / "benchmarks.md").write_text("\n".join(parts) + "\n")


def _machine(facts: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in facts.items()) + "."


def _peers(rows: list[dict[str, Any]]) -> list[str]:
    parts = [
        "",
        "## Beside other tools",
        "",
        "Each row is the median of three runs, taken in turn with the others of its table, from "
        "the shell to the prompt. Reads are those of system calls: what is read through mapped "
        "files (by the plain script, and in part by mergekit) is not among them.",
    ]
    for what in dict.fromkeys(row["what"] for row in rows):
        mine = [row for row in rows if row["what"] == what]
        state = "cold" if mine[0]["cold"] else "warm"
        parts += ["", f"### {what[0].upper()}{what[1:]} ({state})", ""]
        parts += _table(
            ["", "s", "CPU s", "peak MB", "read MB", "written MB"],
            (
                [
                    row["way"],
                    f"{row['seconds']:.2f}",
                    f"{row['cpu_seconds']:.2f}",
                    f"{row['peak_mb']:.0f}",
                    f"{row['read_mb']:.0f}",
                    f"{row['written_mb']:.0f}",
                ]
                for row in mine
            ),
        )
    return parts


def _fidelity(numbers: dict[str, Any]) -> list[str]:
    rows = numbers["errors"]
    recipes = list(dict.fromkeys(row["recipe"] for row in rows))
    parts = [
        "",
        "## What budgets keep of a merge",
        "",
        "Relative error of the merged delta against the full-read merge, on the family of "
        "`examples/make_family.py` (bf16, three experts), both results in float32.",
    ]
    for recipe in recipes:
        mine = [row for row in rows if row["recipe"] == recipe]
        budgets = sorted({row["budget_percent"] for row in mine})
        file = f"fidelity-{recipe.replace(' ', '-')}.svg"
        series = {
            title: [(r["budget_percent"], r["error"]) for r in mine if r["planner"] == name]
            for name, title in PLANNERS.items()
        }
        (DOCS / file).write_text(error_chart(recipe, series))
        parts += ["", f"### {recipe}", "", f"![error against budget]({file})", ""]
        parts += _table(
            ["planner", *(f"{budget}%" for budget in budgets)],
            (
                [title, *(f"{_at(mine, name, budget):.3f}" for budget in budgets)]
                for name, title in PLANNERS.items()
            ),
        )
        predicted = [f"{row['predicted_error']:.3f}" for row in mine if row["planner"] == "ours"]
        parts.append("| *predicted by mergegit* | " + " | ".join(predicted) + " |")
    if numbers["losses"]:
        parts += _losses(numbers["losses"])
    return parts


def _at(rows: list[dict[str, Any]], planner: str, budget: int) -> float:
    return next(
        float(row["error"])
        for row in rows
        if row["planner"] == planner and row["budget_percent"] == budget
    )


def _losses(rows: list[dict[str, Any]]) -> list[str]:
    kinds = [key for key in rows[0] if key not in ("planner", "budget_percent")]
    titles = {"base": "base", **PLANNERS}
    parts = [
        "",
        "### Loss of the merged models",
        "",
        "Task arithmetic, weight 0.4; nats per token on text that no training saw, by kind.",
        "",
    ]
    return parts + _table(
        ["planner", "budget", *kinds],
        (
            [
                titles[row["planner"]],
                f"{row['budget_percent']}%" if row["planner"] != "base" else "",
                *(f"{row[kind]:.3f}" for kind in kinds),
            ]
            for row in rows
        ),
    )


def _speed(numbers: dict[str, Any]) -> list[str]:
    copy = numbers["encoder"]["memory copy"]
    parts = ["", "## Speed", "", "Encoder and decoder, all cores, bf16, update 1e-3.", ""]
    parts += _table(
        ["", "MB of raw blocks a second", "of a memory copy"],
        (
            [name, f"{rate / 1e6:.0f}", f"{rate / copy:.3f}"]
            for name, rate in numbers["encoder"].items()
        ),
    )
    parts += ["", "From the shell to the prompt, ms.", ""]
    parts += _table(["", "ms"], ([k, f"{v:.0f}"] for k, v in numbers["startup"].items()))
    parts += ["", "Commands, beside `cp` of the bytes that they must move.", ""]
    parts += _table(
        ["", "seconds", "times `cp`"],
        ([k, f"{v['seconds']:.2f}", f"{v['ratio']:.1f}"] for k, v in numbers["commands"].items()),
    )
    return parts


def _table(head: list[str], rows: Iterable[list[str]]) -> list[str]:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


if __name__ == "__main__":
    main()
