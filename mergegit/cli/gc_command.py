"""`mergegit gc`."""

from __future__ import annotations

from dataclasses import asdict

import click

from mergegit.cli.common import json_option, open_repository, print_json
from mergegit.cli.duration import duration_option
from mergegit.cli.progress import progress_bar
from mergegit.cli.text import human_bytes, plural
from mergegit.repository.collecting import EXPIRE, GRACE
from mergegit.repository.reports import CollectReport


@click.command("gc")
@duration_option("--expire", EXPIRE, "Let the logs of refs forget moves older than this.")
@duration_option("--grace", GRACE, "Keep packs in the trash for this long.")
@click.option("--dry-run", is_flag=True, help="Say what would be done, and change nothing.")
@click.option("--wait", is_flag=True, help="Wait for other commands that write, and then begin.")
@json_option
@click.pass_context
def command(
    ctx: click.Context, expire: float, grace: float, dry_run: bool, wait: bool, as_json: bool
) -> None:
    """Reclaim the space of what nothing needs any more.

    Needed is what branches and tags reach, and where they stood as far as their logs tell
    (`mergegit reflog`). The rest goes to the trash, and leaves it with a later `gc`, when the grace
    period is over.

    \b
    Examples:
      mergegit gc --dry-run
      mergegit gc
      mergegit gc --expire 0 --grace 0   everything that is not needed now, at once
    """
    repository = open_repository(ctx, writes=not dry_run)
    with progress_bar() as progress:
        report = repository.gc(
            expire=expire, grace=grace, dry_run=dry_run, wait=wait, progress=progress
        )
    if as_json:
        print_json(asdict(report) | {"seconds": round(report.seconds, 3)})
        return
    lines = _lines(report)
    if not lines:
        click.echo(f"there is nothing to collect{_rest(report)}")
        return
    for line in lines:
        click.echo(line)
    would = "would be " if dry_run else ""
    freed = human_bytes(max(report.freed_bytes, 0))
    click.echo(f"{freed} {would}reclaimed on disk{_rest(report)}")


def _rest(report: CollectReport) -> str:
    if not report.trash_bytes:
        return ""
    would = "would stay" if report.dry_run else "stay"
    return f"; {human_bytes(report.trash_bytes)} {would} in the trash until their grace period ends"


def _lines(report: CollectReport) -> list[str]:
    would = "would be " if report.dry_run else ""
    lines = []
    if report.forgotten_moves:
        lines.append(f"{plural(report.forgotten_moves, 'move')} of refs {would}forgotten")
    if report.trashed:
        line = f"{plural(report.trashed, 'pack')} {would}moved to the trash"
        line += f": {human_bytes(report.trashed_bytes)}"
        if report.rewritten:
            line += (
                f"; {human_bytes(report.written_bytes)} of {report.rewritten:,} of them "
                f"{would}written anew"
            )
        lines.append(line)
    if report.removed:
        lines.append(
            f"{plural(report.removed, 'pack')} {would}removed for good: "
            f"{human_bytes(report.removed_bytes)}"
        )
    return lines
