"""`mergegit fsck`."""

from __future__ import annotations

import sys
from typing import Final

import click

from mergegit.cli.common import (
    json_option,
    open_repository,
    print_json,
    print_notes,
    threads_option,
)
from mergegit.cli.progress import progress_bar
from mergegit.cli.text import human_bytes, plural, printable
from mergegit.repository import Repository

_WHAT_TO_DO: Final = (
    "put the packs named above back from a copy of the repository; or move them away, run "
    "`mergegit fsck --rebuild-catalog`, and add the checkpoints again"
)


@click.command("fsck")
@click.option(
    "--rebuild-catalog",
    is_flag=True,
    help="Make the catalog anew from the packs first, while no other command runs.",
)
@threads_option
@json_option
@click.pass_context
def command(ctx: click.Context, rebuild_catalog: bool, threads: int | None, as_json: bool) -> None:
    """Check every object, the bytes of every block, and every ref.

    Exits 1 where anything is damaged or missing, and names the commits that need it.
    """
    if rebuild_catalog:
        count = Repository.rebuild_catalog()
        click.echo(f"catalog made anew from {plural(count, 'pack')}", err=True)
    repository = open_repository(ctx, threads=threads)
    with progress_bar() as progress:
        report = repository.fsck(progress)
    if as_json:
        print_json(
            {
                "clean": report.is_clean,
                "packs": report.packs,
                "blocks": report.blocks,
                "objects": report.objects,
                "commits": report.commits,
                "checked_bytes": report.checked_bytes,
                "notes": report.notes,
                "problems": [
                    {"what": problem.what, "commits": list(problem.commits)}
                    for problem in report.problems
                ],
            }
        )
        sys.exit(0 if report.is_clean else 1)
    print_notes(report.notes)
    for problem in report.problems:
        needed = f"; needed by {', '.join(problem.commits)}" if problem.commits else ""
        what = f"{problem.what}{needed}"
        click.echo(f"{click.style('damage:', fg='red', bold=True)} {printable(what)}")
    click.echo(
        f"{plural(report.commits, 'commit')}, {plural(report.objects, 'object')}, "
        f"{plural(report.blocks, 'block')}, {human_bytes(report.checked_bytes)} checked: "
        + ("clean" if report.is_clean else plural(len(report.problems), "problem"))
    )
    if not report.is_clean:
        click.echo(f"{click.style(' hint:', fg='yellow')} {_WHAT_TO_DO}", err=True)
    sys.exit(0 if report.is_clean else 1)
