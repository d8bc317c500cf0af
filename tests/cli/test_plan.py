"""`mergegit plan`."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from tests.cli.conftest import CommandLine
from tests.families import tiny_checkpoint
from tests.trees import fingerprint

KEYS = [
    "plan", "method", "base", "budget", "raw_bytes", "budget_bytes", "planned_bytes",
    "remembered_bytes", "aligned_bytes", "base_bytes", "write_bytes", "merged_norm",
    "predicted_error", "prediction", "error_bound", "experts", "kept", "recipe",
]  # fmt: skip
EXPERT_KEYS = [
    "ref", "commit", "raw_bytes", "planned_bytes", "predicted_error", "layers",
    "blocks_read", "blocks_free", "blocks_skipped",
]  # fmt: skip


def test_a_line_for_each_expert_then_what_it_comes_to(mergegit: CommandLine) -> None:
    result = mergegit.ok("plan", "math", "code", "--budget", "40%")
    head, columns, math, code, total, words, *_ = result.lines
    assert re.fullmatch(
        r"plan [0-9a-f]{10}: task_arithmetic of math, code on base base, budget 40% \(\d+ B\)", head
    )
    assert re.split(r"\s{2,}", columns.strip()) == [
        "expert", "full read", "planned", "share", "blocks read", "free", "skipped", "error",
    ]  # fmt: skip
    assert math.split()[0] == "math"
    assert code.split()[0] == "code"
    assert total.split()[0] == "all"
    assert "predicted error of the merged delta 0." in words


def test_the_sum_is_the_sum(mergegit: CommandLine) -> None:
    report = mergegit.ok("plan", "math", "code", "prose", "--budget", "50%", "--json").json
    experts = report["experts"]
    assert [expert["ref"] for expert in experts] == ["math", "code", "prose"]
    assert sum(expert["raw_bytes"] for expert in experts) == report["raw_bytes"]
    assert sum(expert["planned_bytes"] for expert in experts) == report["planned_bytes"]
    for expert in experts:
        assert sum(expert["layers"]) == expert["planned_bytes"]


def test_json(mergegit: CommandLine, commit_of: Callable[[str], str]) -> None:
    report = mergegit.ok("plan", "math", "code", "--budget", "40%", "--json").json
    assert list(report) == KEYS
    assert [list(expert) for expert in report["experts"]] == [EXPERT_KEYS] * 2
    assert report["base"] == commit_of("base")
    assert report["experts"][0]["commit"] == commit_of("math")
    assert report["method"] == report["recipe"]["method"] == "task_arithmetic"
    assert report["budget"] == "40%"
    assert report["planned_bytes"] <= report["budget_bytes"] == report["raw_bytes"] * 2 // 5
    assert report["prediction"] == "additive"
    assert 0 < report["predicted_error"] <= report["error_bound"]


def test_without_a_budget_everything_is_read_and_nothing_is_lost(mergegit: CommandLine) -> None:
    report = mergegit.ok("plan", "math", "code", "--json").json
    assert (report["budget"], report["budget_bytes"]) == (None, None)
    assert report["predicted_error"] == 0
    result = mergegit.ok("plan", "math", "code")
    assert result.lines[0].endswith("on base base, no budget")
    assert "predicted error of the merged delta 0" in result.out


def test_a_method_whose_error_is_estimated_says_so(mergegit: CommandLine) -> None:
    arguments = ("plan", "math", "code", "--method", "ties", "--budget", "40%")
    assert "(an estimate)" in mergegit.ok(*arguments).out
    report = mergegit.ok(*arguments, "--json").json
    assert (report["prediction"], report["error_bound"]) == ("estimate", None)


def test_parameters_for_all_and_for_one(mergegit: CommandLine) -> None:
    report = mergegit.ok(
        "plan", "math", "code", "--method", "ties", "-p", "density=0.5", "-p", "code.weight=0.25",
        "-p", "normalize=false", "--seed", "7", "--dtype", "float16", "--base", "base", "--json",
    ).json  # fmt: skip
    recipe = report["recipe"]
    math, code = (expert["parameters"] for expert in recipe["experts"])
    assert math == {"weight": 1.0, "density": 0.5}
    assert code == {"weight": 0.25, "density": 0.5}
    assert recipe["parameters"]["normalize"] is False
    assert (recipe["seed"], recipe["dtype"]) == (7, "F16")


def test_an_expert_with_a_dot_in_its_name(mergegit: CommandLine) -> None:
    mergegit.ok("branch", "v0.1", "math")
    report = mergegit.ok("plan", "v0.1", "code", "-p", "v0.1.weight=0.5", "--json").json
    assert report["recipe"]["experts"][0]["parameters"]["weight"] == 0.5


def test_planning_adds_the_plan_and_nothing_else(mergegit: CommandLine) -> None:
    objects = mergegit.ok("status", "--json").json["objects"]
    mergegit.ok("plan", "math", "code", "--budget", "10%")
    assert mergegit.ok("status", "--json").json["objects"] == objects + 1
    before = fingerprint(mergegit.directory)
    mergegit.ok("plan", "math", "code", "--budget", "10%")
    assert fingerprint(mergegit.directory) == before


def test_an_expert_added_with_another_base_is_measured_once(
    mergegit: CommandLine, tmp_path: Path
) -> None:
    mergegit.ok("add", tiny_checkpoint(tmp_path / "alone", moved=9), "--no-base")
    first = mergegit.ok("plan", "alone", "--base", "base", "--budget", "50%", "--json").json
    before = fingerprint(mergegit.directory)
    assert mergegit.ok(
        "plan", "alone", "--base", "base", "--budget", "50%", "--json"
    ).json == first  # fmt: skip
    assert fingerprint(mergegit.directory) == before


def test_a_curve(mergegit: CommandLine) -> None:
    lines = mergegit.ok("plan", "math", "code", "--curve").lines
    assert lines[0].split() == ["budget", "planned", "error"]
    budgets = [line.split()[0] for line in lines[1:]]
    assert budgets[0] == "1%"
    assert budgets[-1] == "100%"
    curve = mergegit.ok("plan", "math", "code", "--curve", "--json").json
    assert [report["budget"] for report in curve] == budgets
    assert [list(report) for report in curve] == [KEYS] * len(budgets)
    errors = [report["predicted_error"] for report in curve]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] == 0


def test_a_plan_is_saved_and_carried_out_later(mergegit: CommandLine) -> None:
    saved = mergegit.ok(
        "plan", "math", "code", "--budget", "50%", "--save", "plan.bin", "--json"
    ).json
    merged = mergegit.ok("merge", "--plan", "plan.bin", "-b", "later", "--json").json
    assert merged["plan"] == saved["plan"]
    assert merged["read_bytes"] == saved["planned_bytes"]


def test_a_file_that_can_not_be_written(mergegit: CommandLine) -> None:
    message, _ = mergegit("plan", "math", "--save", "nowhere/plan.bin").failed()
    assert "nowhere/plan.bin" in message
    assert "No such file or directory" in message


def test_a_curve_goes_alone(mergegit: CommandLine) -> None:
    mergegit("plan", "math", "--curve", "--budget", "10%").failed(2)
    mergegit("plan", "math", "--curve", "--save", "file").failed(2)


def test_no_expert(mergegit: CommandLine) -> None:
    message, hint = mergegit("plan").failed(2)
    assert message == "name experts, or a recipe with -c"
    assert hint == "`mergegit plan --help` shows how it is used"


def test_a_plan_can_be_carried_out_by_the_id_that_was_printed(mergegit: CommandLine) -> None:
    planned = mergegit.ok("plan", "math", "code", "--budget", "10%", "--json").json
    merged = mergegit.ok("merge", "--plan", planned["plan"][:10], "-b", "by-id", "--json").json
    assert merged["plan"] == planned["plan"]
    assert merged["read_bytes"] == planned["planned_bytes"]
