"""`mergegit status`."""

from __future__ import annotations

from typing import Final

import click

from mergegit.cli.common import json_option, open_repository, print_json
from mergegit.cli.ref_text import ref_lines
from mergegit.cli.text import human_bytes, plural

_ROWS: Final = 20


@click.command("status")
@json_option
@click.pass_context
def command(ctx: click.Context, as_json: bool) -> None:
    """Show what the repository holds, and what it takes on disk."""
    repository = open_repository(ctx)
    status = repository.status()
    if as_json:
        print_json(
            {
                "root": status.root,
                "format": status.format,
                "branches": status.branches,
                "tags": status.tags,
                "commits": status.commits,
                "blocks": status.blocks,
                "objects": status.objects,
                "packs": status.packs,
                "checkpoint_bytes": status.checkpoint_bytes,
                "disk_bytes": status.disk_bytes,
                "deduplication_ratio": status.ratio,
            }
        )
        return
    click.echo(f"repository {status.root} (format {status.format})")
    if not status.commits:
        click.echo("  empty; begin with `mergegit add CHECKPOINT`")
        return
    click.echo(
        f"  {plural(status.commits, 'commit')}, {plural(status.branches, 'branch')}, "
        f"{plural(status.tags, 'tag')}"
    )
    click.echo(
        f"  {plural(status.blocks, 'block')} and {plural(status.objects, 'object')} "
        f"in {plural(status.packs, 'pack')}"
    )
    ratio = f" (ratio {status.ratio:.2f})" if status.ratio else ""
    click.echo(
        f"  {human_bytes(status.checkpoint_bytes)} of checkpoints "
        f"in {human_bytes(status.disk_bytes)} on disk{ratio}"
    )
    lines = ref_lines(repository, repository.branches())
    if len(lines) > _ROWS:
        lines[_ROWS:] = [f"... and {len(lines) - _ROWS} more; `mergegit branch` lists them"]
    click.echo()
    for line in lines:
        click.echo(f"  {line}")
