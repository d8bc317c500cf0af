"""`mergegit reset`."""

from __future__ import annotations

import click

from mergegit.cli.common import complete_ref, json_option, open_repository, print_json
from mergegit.repository.naming import short


@click.command("reset")
@click.argument("branch", shell_complete=complete_ref)
@click.argument("ref", shell_complete=complete_ref)
@json_option
@click.pass_context
def command(ctx: click.Context, branch: str, ref: str, as_json: bool) -> None:
    """Move BRANCH to the commit REF, wherever that is.

    Every other command but `revert` moves branches forward alone. BRANCH@{1} names where it
    stood before.

    \b
    Examples:
      mergegit reset best best~1         back to the base of the last merge
      mergegit reset best 'best@{1}'     take the last move back
    """
    old, new = open_repository(ctx, writes=True).reset_branch(branch, ref)
    if as_json:
        print_json({"branch": branch, "commit": new.hex(), "was": old.hex()})
        return
    commit = click.style(short(new), fg="yellow")
    if old == new:
        click.echo(f"branch {branch} is at {commit} already")
    else:
        click.echo(f"branch {branch} moved to {commit}; it was at {short(old)}")
