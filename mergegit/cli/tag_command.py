"""`mergegit tag`."""

from __future__ import annotations

import click

from mergegit.cli.common import complete_ref, json_option, open_repository
from mergegit.cli.ref_text import print_ref, print_refs


@click.command("tag")
@click.argument("name", required=False, shell_complete=complete_ref)
@click.argument("ref", required=False, shell_complete=complete_ref)
@click.option("-d", "--delete", is_flag=True, help="Delete tag NAME.")
@json_option
@click.pass_context
def command(
    ctx: click.Context, name: str | None, ref: str | None, delete: bool, as_json: bool
) -> None:
    """List tags, or make tag NAME at REF. A tag does not move.

    \b
    Examples:
      mergegit tag
      mergegit tag v1 llama-math+llama-code
      mergegit tag -d v1
    """
    if name is None:
        if delete:
            raise click.UsageError("Name the tag.")
        repository = open_repository(ctx)
        print_refs(repository, repository.tags(), as_json)
    elif delete:
        if ref is not None:
            raise click.UsageError("-d takes one name.")
        commit = open_repository(ctx, writes=True).delete_tag(name)
        print_ref("tag", name, commit, "deleted; it was at", as_json)
    elif ref is None:
        raise click.UsageError("Name the commit that the tag should point to, too.")
    else:
        commit = open_repository(ctx, writes=True).create_tag(name, ref)
        print_ref("tag", name, commit, "made at", as_json)
