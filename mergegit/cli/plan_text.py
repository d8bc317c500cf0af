"""A plan as people and programs are shown it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from mergegit.cli.text import error_number, human_bytes, percent, printable
from mergegit.objects import Plan
from mergegit.repository.naming import short
from mergegit.repository.reports import PlanReport


def plan_json(report: PlanReport) -> dict[str, Any]:
    """The stable keys of a plan. What earlier merges made already is not counted as planned, but
    by itself as remembered."""
    plan = report.plan
    return {
        "plan": report.id.hex(),
        "method": plan.recipe["method"],
        "base": plan.base.hex(),
        "budget": report.budget,
        "raw_bytes": plan.raw_bytes,
        "budget_bytes": plan.budget_bytes,
        "planned_bytes": report.read_bytes,
        "remembered_bytes": report.spared_bytes,
        "aligned_bytes": report.aligned_bytes,
        "base_bytes": report.base_read_bytes,
        "write_bytes": plan.write_bytes,
        "merged_norm": plan.merged_norm,
        "predicted_error": plan.predicted_error,
        "prediction": "additive" if plan.error_bound is not None else "estimate",
        "error_bound": plan.error_bound,
        "experts": [
            {
                "ref": expert.ref,
                "commit": expert.commit.hex(),
                "raw_bytes": expert.raw_bytes,
                "planned_bytes": sum(report.layer_bytes(place)),
                "predicted_error": expert.predicted_error,
                "layers": list(report.layer_bytes(place)),
                "blocks_read": expert.blocks_read,
                "blocks_free": expert.blocks_free,
                "blocks_skipped": expert.blocks_skipped,
            }
            for place, expert in enumerate(plan.experts)
        ],
        "kept": dict(plan.kept),
        "recipe": plan.recipe,
    }


def print_plan(report: PlanReport) -> None:
    """A plan for people: a line per expert, then what it comes to."""
    plan = report.plan
    recipe = plan.recipe
    experts = [expert.ref for expert in plan.experts]
    click.echo(
        f"plan {click.style(short(report.id), fg='yellow')}: {recipe['method']} of "
        f"{', '.join(experts)} on base {recipe['base']['ref']}, {_budget(report)}"
    )
    rows = [
        [
            expert.ref,
            human_bytes(expert.raw_bytes),
            human_bytes(expert.planned_bytes),
            percent(expert.planned_bytes, expert.raw_bytes),
            f"{expert.blocks_read:,}",
            f"{expert.blocks_free:,}",
            f"{expert.blocks_skipped:,}",
            error_number(expert.predicted_error),
        ]
        for expert in plan.experts
    ]
    if len(rows) > 1:
        rows.append(_sum_row(plan))
    head = ["expert", "full read", "planned", "share", "blocks read", "free", "skipped", "error"]
    print_table(head, rows)
    if report.spared_bytes:
        click.echo(
            f"  {human_bytes(report.spared_bytes)} of that is remembered from earlier merges; "
            f"{human_bytes(report.read_bytes)} will be read"
        )
    if report.aligned_bytes:
        click.echo(
            f"  aligned the vocabularies first, once: read {human_bytes(report.aligned_bytes)} of "
            "the experts' embeddings, which no budget counts"
        )
    word = "" if plan.error_bound is not None else " (an estimate)"
    click.echo(
        f"  reads {human_bytes(report.base_read_bytes)} of the base, "
        f"writes at most {human_bytes(plan.write_bytes)}; "
        f"predicted error of the merged delta {error_number(plan.predicted_error)}{word}"
    )
    for name, why in list(plan.kept.items())[:5]:
        click.echo(f"  tensor {printable(name)}: {why}")
    if len(plan.kept) > 5:
        click.echo(f"  ... and {len(plan.kept) - 5} more tensors; see --json")


def print_curve(reports: Sequence[PlanReport]) -> None:
    """Predicted error against budget, a line each."""
    rows = [
        [
            report.budget or "",
            human_bytes(report.plan.planned_bytes),
            error_number(report.plan.predicted_error),
            "█" * round(40 * min(report.plan.predicted_error, 1.0)),
        ]
        for report in reports
    ]
    print_table(["budget", "planned", "error", ""], rows, left=(3,))


def print_table(
    head: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)
) -> None:
    """Columns under a head; numbers to the right, the columns ``left`` to the left."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]

    def line(row: Sequence[str]) -> str:
        cells = [
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return "  " + "  ".join(cells).rstrip()

    click.echo(click.style(line(head), dim=True))
    for row in rows:
        click.echo(line(row))


def _budget(report: PlanReport) -> str:
    """The budget as it was given, and in bytes."""
    if report.plan.budget_bytes is None:
        return "no budget"
    nbytes = human_bytes(report.plan.budget_bytes)
    return f"budget {report.budget} ({nbytes})" if report.budget else f"budget {nbytes}"


def _sum_row(plan: Plan) -> list[str]:
    return [
        "all",
        human_bytes(plan.raw_bytes),
        human_bytes(plan.planned_bytes),
        percent(plan.planned_bytes, plan.raw_bytes),
        f"{sum(expert.blocks_read for expert in plan.experts):,}",
        f"{sum(expert.blocks_free for expert in plan.experts):,}",
        f"{sum(expert.blocks_skipped for expert in plan.experts):,}",
        error_number(plan.predicted_error),
    ]
