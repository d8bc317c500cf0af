"""`mergegit branch`."""

from __future__ import annotations

import click

from mergegit.cli.common import complete_ref, json_option, open_repository
from mergegit.cli.ref_text import print_ref, print_refs


@click.command("branch")
@click.argument("name", required=False, shell_complete=complete_ref)
@click.argument("ref", required=False, shell_complete=complete_ref)
@click.option("-d", "--delete", is_flag=True, help="Delete branch NAME.")
@click.option("-m", "--move", is_flag=True, help="Rename branch NAME to REF.")
@json_option
@click.pass_context
def command(
    ctx: click.Context, name: str | None, ref: str | None, delete: bool, move: bool, as_json: bool
) -> None:
    """List branches, or make branch NAME at REF.

    A deleted branch's commits stay until its log expires and `mergegit gc` collects them, 30 days
    later by default; until then, its last commit is NAME@{1}.

    \b
    Examples:
      mergegit branch
      mergegit branch best llama-math+llama-code
      mergegit branch -m best release
      mergegit branch -d release
      mergegit branch release 'release@{1}'     bring a deleted branch back
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
        print_ref("branch", name, commit, "deleted; it was at", as_json)
    elif ref is None:
        raise click.UsageError(
            "Name the branch's new name, too."
            if move
            else "Name the commit that the branch should point to, too."
        )
    elif move:
        commit = open_repository(ctx, writes=True).rename_branch(name, ref)
        print_ref("branch", ref, commit, f"was {name}; it is at", as_json)
    else:
        commit = open_repository(ctx, writes=True).create_branch(name, ref)
        print_ref("branch", name, commit, "made at", as_json)
