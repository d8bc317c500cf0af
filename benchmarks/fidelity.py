"""What budgets keep of a merge, for four planners in one run.

    hash     whole blocks, chosen by a hash of their place
    energy   whole blocks, by energy per byte
    equal    the same number of planes of every block, then one more of the first ones
    ours     planes, by error removed per byte

The number is the relative error of the merged delta against the full-read merge, both in float32,
so that the rounding of the result does not hide it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import numpy as np
import torch
from blake3 import blake3

from benchmarks import families
from mergegit import Repository
from mergegit.merge.plan import Planner
from mergegit.objects import Plan
from mergegit.repository.repository import plan_report

BUDGETS: Final = (1, 2, 5, 10, 20, 25, 50)
RECIPES: Final[dict[str, tuple[str, Mapping[str, float | bool]]]] = {
    "linear": ("linear", {}),
    "task_arithmetic": ("task_arithmetic", {"weight": 0.4}),
    "ties 0.2": ("ties", {"density": 0.2}),
    "ties 0.5": ("ties", {"density": 0.5}),
    "dare_linear 0.5": ("dare_linear", {"density": 0.5, "weight": 0.4}),
    "dare_ties 0.5": ("dare_ties", {"density": 0.5}),
}

QUALITY: Final = "task_arithmetic"
"""The recipe whose merged models' loss is measured."""

Choose = Callable[[Planner, int], Plan]
State = dict[str, torch.Tensor]


def run(family: Path | None) -> dict[str, list[dict[str, object]]]:
    """Measure and print; returns a row per recipe, planner and budget.

    Where the family has held-out text beside it, as examples/make_family.py writes it, the loss of
    merged models is measured as well.
    """
    with tempfile.TemporaryDirectory() as scratch:
        root = family or families.make(Path(scratch) / "family")
        names = sorted(path.name for path in root.iterdir() if (path / "config.json").exists())
        experts = [name for name in names if name != "base"]
        with (
            _repository(Path(scratch) / "delta", root, experts, "delta") as delta,
            _repository(Path(scratch) / "raw", root, experts, "raw") as raw,
        ):
            rows = []
            for title in RECIPES:
                rows += _measure(title, delta, raw, experts)
            losses = []
            if (root / "heldout").is_dir():
                losses = _losses(Path(scratch), root, delta, raw, experts)
        return {"errors": rows, "losses": losses}


def _losses(
    scratch: Path, family: Path, delta: Repository, raw: Repository, experts: list[str]
) -> list[dict[str, object]]:
    """Mean held-out loss of merged models, by planner and budget."""
    folders = {("base", 0): family / "base"}
    for name, (repository, planner, choose) in _planners(QUALITY, delta, raw, experts).items():
        for percent in (*BUDGETS, 100) if name == "ours" else BUDGETS:
            plan = choose(planner, planner.problem.raw_bytes * percent // 100)
            report = repository.merge(plan_report(plan), encoding="raw")
            folders[name, percent] = scratch / f"{name}-{percent}"
            repository.checkout(report.branch, folders[name, percent])
            repository.delete_branch(report.branch)
    script = Path(__file__).parents[1] / "examples" / "evaluate.py"
    command = [sys.executable, str(script), *map(str, folders.values()), "--json"]
    command += ["--heldout", str(family / "heldout")]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    losses = json.loads(done.stdout)
    rows = []
    print(f"\n{QUALITY}: mean held-out loss by budget (nats per token)")
    for (name, percent), folder in folders.items():
        by_kind = losses[str(folder)]
        rows.append({"planner": name, "budget_percent": percent, **by_kind})
        print(f"  {name:8}{percent:>5}%{by_kind['mean']:9.3f}")
    return rows


def _repository(path: Path, family: Path, experts: list[str], encoding: str) -> Repository:
    repository = Repository.init(path)
    for name in ("base", *experts):
        repository.add(family / name, encoding="raw" if encoding == "raw" else "delta")
    return repository


def _planners(
    title: str, delta: Repository, raw: Repository, experts: list[str], dtype: str | None = None
) -> dict[str, tuple[Repository, Planner, Choose]]:
    """The four planners of a recipe, each with its repository and its way of choosing."""
    method, parameters = RECIPES[title]
    return {
        name: (
            repository,
            repository.planner(
                repository.recipe(experts, method=method, parameters=parameters, dtype=dtype)
            ),
            choose,
        )
        for name, repository, choose in (
            ("hash", raw, by_hash),
            ("energy", raw, Planner.plan),
            ("equal", delta, equal_layers),
            ("ours", delta, Planner.plan),
        )
    }


def _measure(
    title: str, delta: Repository, raw: Repository, experts: list[str]
) -> list[dict[str, object]]:
    planners = _planners(title, delta, raw, experts, "F32")
    base = {name: tensor.float() for name, tensor in delta.load("base").items()}
    full = _merge(delta, planners["ours"][1].plan(None))
    norm = _distance(full, base)
    print(f"\n{title}: error by budget")
    print("  planner " + "".join(f"{budget:>8}%" for budget in BUDGETS))
    rows: list[dict[str, object]] = []
    for name, (repository, planner, choose) in planners.items():
        errors = []
        for percent in BUDGETS:
            plan = choose(planner, planner.problem.raw_bytes * percent // 100)
            error = _distance(_merge(repository, plan), full) / norm
            errors.append(error)
            rows.append(
                {
                    "recipe": title,
                    "planner": name,
                    "budget_percent": percent,
                    "planned_bytes": plan.planned_bytes,
                    "error": error,
                    "predicted_error": plan.predicted_error,
                    "error_bound": plan.error_bound,
                }
            )
        print(f"  {name:8}" + "".join(f"{error:9.3f}" for error in errors))
    return rows


def by_hash(planner: Planner, budget: int) -> Plan:
    """Whole blocks in the order of a hash of expert and place, while they fit."""
    problem = planner.problem
    blocks = problem.tiny.size
    order = sorted(
        ((k, i) for k in range(len(problem.experts)) for i in range(blocks)),
        key=lambda place: blake3(repr(place).encode()).digest(),
    )
    choice = np.zeros((len(problem.experts), blocks), np.uint8)
    for k, i in order:
        expert = problem.experts[k]
        cost = int(expert.costs[i].sum())
        if expert.depths[i] and cost <= budget:
            choice[k, i] = expert.depths[i]
            budget -= cost
    return planner.state(choice, None)


def equal_layers(planner: Planner, budget: int) -> Plan:
    """Layer after layer of every block, in order, while they fit."""
    problem = planner.problem
    choice = np.zeros((len(problem.experts), problem.tiny.size), np.uint8)
    layers = problem.experts[0].costs.shape[1]
    for layer in range(layers):
        for k, expert in enumerate(problem.experts):
            for i in np.flatnonzero((expert.depths > layer) & (choice[k] == layer)):
                cost = int(expert.costs[i, layer])
                if cost <= budget:
                    choice[k, i] = layer + 1
                    budget -= cost
    return planner.state(choice, None)


def _merge(repository: Repository, plan: Plan) -> State:
    report = repository.merge(plan_report(plan), encoding="raw")
    state = repository.load(report.branch)
    repository.delete_branch(report.branch)
    return state


def _distance(state: State, other: State) -> float:
    squares = sum(
        float(((state[name].double() - other[name].double()) ** 2).sum()) for name in state
    )
    return float(np.sqrt(squares))
