"""`mergegit reflog`."""

from __future__ import annotations

from typing import Final

import click

from mergegit.cli.common import complete_ref, json_option, open_repository, print_json
from mergegit.cli.text import local_time, printable
from mergegit.errors import UnknownRef
from mergegit.repository.naming import SHORT_ID, short
from mergegit.repository.reports import RefMove

_WORDS: Final = {"heads": "branch", "tags": "tag"}


@click.command("reflog")
@click.argument("ref", required=False, shell_complete=complete_ref)
@json_option
@click.pass_context
def command(ctx: click.Context, ref: str | None, as_json: bool) -> None:
    """Show where branch or tag REF stood, or all of them: newest first, deleted ones, too.

    NAME@{N} names the commit at which NAME stood N moves ago, wherever a REF is asked for.

    \b
    Examples:
      mergegit reflog llama-math
      mergegit reset llama-math 'llama-math@{1}'    take its last move back
      mergegit branch old 'old@{1}'                 bring a deleted branch back
    """
    repository = open_repository(ctx)
    moves = repository.reflog(ref)
    if ref is not None and not moves:
        repository.resolve(ref)
        raise UnknownRef(
            f"{ref!r} has no log",
            hint="`mergegit reflog` shows the branches and tags that have one",
        )
    if as_json:
        print_json([_json(move) for move in moves])
        return
    width = max((len(move.selector) for move in moves), default=0)
    for move in moves:
        commit = short(move.new) if move.new else "-" * SHORT_ID
        click.echo(
            f"{click.style(commit, fg='yellow')} {move.selector.ljust(width)}  "
            f"{local_time(move.time)}  {printable(move.author)}  {printable(move.reason)}"
        )


def _json(move: RefMove) -> dict[str, object]:
    return {
        "ref": move.ref,
        "kind": _WORDS[move.space],
        "number": move.number,
        "selector": move.selector,
        "old": move.old.hex() if move.old else None,
        "new": move.new.hex() if move.new else None,
        "author": move.author,
        "time": move.time,
        "reason": move.reason,
    }
