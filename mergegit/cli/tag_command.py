"""`mergegit tag`."""

from __future__ import annotations

import click

from mergegit.cli.common import json_option, open_repository
from mergegit.cli.ref_text import print_refs
from mergegit.repository.naming import short


@click.command("tag")
@click.argument("name", required=False)
@click.argument("ref", required=False)
@click.option("-d", "--delete", is_flag=True, help="Delete tag NAME.")
@json_option
@click.pass_context
def command(
    ctx: click.Context, name: str | None, ref: str | None, delete: bool, as_json: bool
) -> None:
    """List tags, or make tag NAME at REF. A tag does not move."""
    if name is None:
        if delete:
            raise click.UsageError("Name the tag.")
        repository = open_repository(ctx)
        print_refs(repository, repository.tags(), as_json)
    elif delete:
        if ref is not None:
            raise click.UsageError("-d takes one name.")
        commit = open_repository(ctx, writes=True).delete_tag(name)
        click.echo(f"tag {name} deleted; it was at {short(commit)}")
    elif ref is None:
        raise click.UsageError("Name the commit that the tag should point to.")
    else:
        commit = open_repository(ctx, writes=True).create_tag(name, ref)
        click.echo(f"tag {name} made at {short(commit)}")
