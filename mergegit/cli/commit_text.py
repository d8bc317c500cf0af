"""A commit as people and programs are shown it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click

from mergegit.cli.text import (
    error_number,
    human_bytes,
    human_seconds,
    local_time,
    percent,
    plural,
    printable,
)
from mergegit.objects import Commit, CommitId, Plan
from mergegit.repository import Repository
from mergegit.repository.naming import short


def names_by_commit(repository: Repository) -> dict[CommitId, list[str]]:
    """The branches and tags of each commit; tags are marked as Git marks them."""
    names: dict[CommitId, list[str]] = {}
    for name, commit in repository.branches().items():
        names.setdefault(commit, []).append(name)
    for name, commit in repository.tags().items():
        names.setdefault(commit, []).append(f"tag: {name}")
    return names


def decoration(names: Sequence[str]) -> str:
    """`` (branch, tag: v1)``, or nothing."""
    if not names:
        return ""
    styled = [
        click.style(name, fg="bright_yellow" if name.startswith("tag: ") else "green", bold=True)
        for name in names
    ]
    return f" ({', '.join(styled)})"


def oneline(commit_id: CommitId, commit: Commit, names: Sequence[str]) -> str:
    return (
        f"{click.style(short(commit_id), fg='yellow')}{decoration(names)} {printable(commit.title)}"
    )


def full_lines(
    commit_id: CommitId, commit: Commit, names: Mapping[CommitId, Sequence[str]]
) -> list[str]:
    """A commit as `log` shows it: the head first, then the rest."""
    head = click.style(f"commit {commit_id.hex()}", fg="yellow")
    lines = [head + decoration(names.get(commit_id, ()))]
    parents = [_name(parent, names) for parent in commit.parents]
    if parents:
        lines.append(f"Base:     {parents[0]}")
    if len(parents) > 1:
        lines.append(f"{'Experts: ' if commit.recipe else 'Previous:'} {' '.join(parents[1:])}")
    lines.append(f"Author:   {printable(commit.author)}")
    lines.append(f"Date:     {local_time(commit.time)}")
    if commit.recipe:
        lines.append(f"Recipe:   {recipe_line(commit.recipe)}")
    if commit.execution:
        lines.append(f"Read:     {execution_line(commit.execution)}")
    lines.append("")
    lines += [f"    {printable(line)}" for line in commit.message.splitlines()]
    return lines


def _name(commit_id: CommitId, names: Mapping[CommitId, Sequence[str]]) -> str:
    """A branch or tag at a commit, else its short id."""
    named = names.get(commit_id)
    return named[0].removeprefix("tag: ") if named else short(commit_id)


def recipe_line(recipe: Mapping[str, Any]) -> str:
    """The method with its parameters, then what differs between experts; or the slices."""
    if recipe.get("slices"):
        return " ".join([recipe["method"], *(_slice(recipe, part) for part in recipe["slices"])])
    shared = [f"{key}={_value(value)}" for key, value in recipe["parameters"].items()]
    experts = []
    for expert in recipe["experts"]:
        own = [f"{key}={_value(value)}" for key, value in expert["parameters"].items()]
        if "base" in expert:
            own.append(f"base={expert['base']['ref']}")
        experts.append(f"{expert['ref']}({', '.join(own)})")
    return " ".join([recipe["method"], *shared, *experts])


def _slice(recipe: Mapping[str, Any], part: Mapping[str, Any]) -> str:
    """What is merged in a slice, like ``(math[0, 16] + code[0, 16])``."""
    sources = [
        f"{recipe['experts'][source['expert']]['ref']}{source['layers']}"
        for source in part["sources"]
    ]
    return sources[0] if len(sources) == 1 else f"({' + '.join(sources)})"


def execution_line(execution: Mapping[str, Any]) -> str:
    return (
        f"{human_bytes(execution['read_bytes'])} of experts, "
        f"{human_bytes(execution['base_read_bytes'])} of the base; "
        f"wrote {human_bytes(execution['written_bytes'])} "
        f"in {human_seconds(execution['seconds'])}"
    )


def merge_story(plan: Plan, execution: Mapping[str, Any]) -> list[str]:
    """How a merge came about: what it might read, planned and read, and what it was made with."""
    full = human_bytes(plan.raw_bytes)
    allowed = f"no budget, of {full}"
    if plan.budget_bytes is not None:
        share = percent(plan.budget_bytes, plan.raw_bytes)
        allowed = f"{human_bytes(plan.budget_bytes)}, {share} of {full}"
    error = f"predicted {error_number(plan.predicted_error)} of the merged delta"
    if plan.error_bound is not None:
        error += f", at most {error_number(plan.error_bound)}"
    else:
        error += " (an estimate)"
    read = f"{human_bytes(execution['read_bytes'])} of experts"
    if execution.get("spared_bytes"):
        read += f", and {human_bytes(execution['spared_bytes'])} known from earlier merges"
    lines = [
        f"budget   {allowed}",
        f"planned  {human_bytes(plan.planned_bytes)} of experts, "
        f"{human_bytes(plan.base_bytes)} of the base",
        f"error    {error}",
        f"read     {read}; {human_bytes(execution['base_read_bytes'])} of the base",
        f"wrote    {human_bytes(execution['written_bytes'])} in "
        f"{human_seconds(execution['seconds'])}",
    ]
    software = {"mergegit": execution.get("mergegit"), **execution.get("software", {})}
    order = ("mergegit", "python", "numpy", "numba", "blas")
    named = ", ".join(f"{name} {software[name]}" for name in order if software.get(name))
    lines += [f"with     {printable(named)}"] if named else []
    machine = execution.get("machine")
    if isinstance(machine, Mapping):
        where = f"{machine['system']}, {machine['processor']}"
        lines.append(f"on       {printable(where)}, {plural(machine['threads'], 'thread')}")
    return lines


def commit_json(commit_id: CommitId, commit: Commit, names: Sequence[str]) -> dict[str, Any]:
    return {
        "commit": commit_id.hex(),
        "refs": list(names),
        "manifest": commit.manifest.hex(),
        "parents": [parent.hex() for parent in commit.parents],
        "author": commit.author,
        "time": commit.time,
        "message": commit.message,
        "recipe": commit.recipe,
        "plan": commit.plan.hex() if commit.plan else None,
        "execution": commit.execution,
    }


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list):
        from mergegit.merge.settings import Setting

        return Setting.parse(value, "").text()
    return str(value).lower()
