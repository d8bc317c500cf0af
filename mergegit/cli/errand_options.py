"""What `cherry-pick`, `revert` and `rebase` share: their options, and how they report."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from mergegit.cli.common import (
    encoding_option,
    json_option,
    message_option,
    print_json,
    print_notes,
    threads_option,
)
from mergegit.cli.merge_text import merge_json, print_merge
from mergegit.cli.plan_text import plan_json, print_plan

if TYPE_CHECKING:
    from mergegit.repository.picking import ErrandReport

_F = TypeVar("_F", bound=Callable[..., Any])


def errand_options(budget_help: str, branch_help: str) -> Callable[[_F], _F]:
    """The options of a merge that has its recipe from the verb."""
    decorators = (
        click.option("--budget", metavar="BUDGET", help=budget_help),
        click.option("-b", "--branch", metavar="BRANCH", help=branch_help),
        message_option,
        click.option("--dry-run", is_flag=True, help="Show the plan and stop."),
        click.option("--ignore-extra", is_flag=True, help="Leave out tensors that the base lacks."),
        click.option(
            "--allow-nonfinite", is_flag=True, help="Go on with NaN or infinity in the weights."
        ),
        encoding_option("delta"),
        threads_option,
        json_option,
    )

    def decorate(function: _F) -> _F:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return decorate


def check_scale(_ctx: click.Context, param: click.Parameter, value: float) -> float:
    if not math.isfinite(value):
        raise click.BadParameter("it must be finite", param=param)
    return value


def print_errand(report: ErrandReport, as_json: bool) -> None:
    """What one of the verbs did, or with a dry run would do."""
    if as_json:
        facts = plan_json(report.plan) if report.merge is None else merge_json(report.merge)
        print_json({**facts, "exact": report.is_exact, "notes": list(report.notes)})
        return
    print_notes(report.notes)
    if report.merge is None:
        print_plan(report.plan)
    else:
        print_merge(report.merge)
