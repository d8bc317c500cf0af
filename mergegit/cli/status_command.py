"""`mergegit status`."""

from __future__ import annotations

import click

from mergegit.cli.common import json_option, open_repository, print_json
from mergegit.cli.text import human_bytes, plural


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
    click.echo(
        f"  {plural(status.commits, 'commit')}, {plural(status.branches, 'branch')}, "
        f"{plural(status.tags, 'tag')}"
    )
    click.echo(
        f"  {plural(status.blocks, 'block')} and {plural(status.objects, 'object')} "
        f"in {plural(status.packs, 'pack')}"
    )
    ratio = f", {status.ratio:.2f} to 1" if status.ratio else ""
    click.echo(
        f"  {human_bytes(status.disk_bytes)} on disk for {human_bytes(status.checkpoint_bytes)} "
        f"of checkpoints{ratio}"
    )
    for name, commit in repository.branches().items():
        title = repository.store.commit(commit).title
        click.echo(f"  {click.style(commit.hex()[:10], fg='yellow')} {name}: {title}")
