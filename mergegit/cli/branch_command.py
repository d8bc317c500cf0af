"""`mergegit branch`."""

from __future__ import annotations

import click

from mergegit.cli.common import json_option, open_repository
from mergegit.cli.ref_text import print_refs
from mergegit.repository.naming import short


@click.command("branch")
@click.argument("name", required=False)
@click.argument("ref", required=False)
@click.option("-d", "--delete", is_flag=True, help="Delete branch NAME.")
@click.option("-m", "--move", is_flag=True, help="Rename branch NAME to REF.")
@json_option
@click.pass_context
def command(
    ctx: click.Context, name: str | None, ref: str | None, delete: bool, move: bool, as_json: bool
) -> None:
    """List branches, or make branch NAME at REF.

    A deleted branch's commits stay until they are collected; its log tells where it stood.
    """
    if delete and move:
        raise click.UsageError("-d and -m exclude each other.")
    if name is None:
        if delete or move:
            raise click.UsageError("Name the branch.")
        repository = open_repository(ctx)
        print_refs(repository, repository.branches(), as_json)
    elif delete:
        if ref is not None:
            raise click.UsageError("-d takes one name.")
        commit = open_repository(ctx, writes=True).delete_branch(name)
        click.echo(f"branch {name} deleted; it was at {short(commit)}")
    elif ref is None:
        raise click.UsageError("Name the commit that the branch should point to.")
    elif move:
        open_repository(ctx, writes=True).rename_branch(name, ref)
        click.echo(f"branch {name} is now {ref}")
    else:
        commit = open_repository(ctx, writes=True).create_branch(name, ref)
        click.echo(f"branch {name} made at {short(commit)}")
