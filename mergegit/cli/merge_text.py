"""A merge that was made, as people and programs are shown it."""

from __future__ import annotations

from typing import Any

import click

from mergegit.cli.plan_text import plan_json, print_plan
from mergegit.cli.text import human_bytes, human_seconds
from mergegit.repository.naming import short
from mergegit.repository.reports import MergeReport


def merge_json(report: MergeReport) -> dict[str, Any]:
    """The stable keys of a merge: those of its plan, and what came of it."""
    return {
        **plan_json(report.plan),
        "commit": report.commit.hex(),
        "branch": report.branch,
        "is_new": report.is_new,
        "read_bytes": report.read_bytes,
        "base_read_bytes": report.base_read_bytes,
        "written_bytes": report.written_bytes,
        "seconds": round(report.seconds, 3),
    }


def print_merge(report: MergeReport) -> None:
    """A merge for people: its plan, and what came of it."""
    branch = click.style(report.branch, bold=True)
    commit = click.style(short(report.commit), fg="yellow")
    if not report.is_new:
        click.echo(f"{branch} holds this merge already, at {commit}; nothing to do")
        return
    print_plan(report.plan)
    click.echo(f"merged into {branch}: {commit}")
    click.echo(
        f"  read {human_bytes(report.read_bytes)} of experts and "
        f"{human_bytes(report.base_read_bytes)} of the base; "
        f"wrote {human_bytes(report.written_bytes)}; {human_seconds(report.seconds)}"
    )
