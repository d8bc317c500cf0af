"""`mergegit rebase`."""

from __future__ import annotations

from typing import Any

import click

from mergegit.cli.common import complete_ref, open_repository
from mergegit.cli.errand_options import errand_options, print_errand
from mergegit.cli.progress import progress_bar


@click.command("rebase")
@click.argument("expert", shell_complete=complete_ref)
@click.option(
    "--onto",
    metavar="NEWBASE",
    required=True,
    shell_complete=complete_ref,
    help="The base that it is carried to.",
)
@errand_options(
    "The most bytes of EXPERT to read: 10%, 2GiB, 500MB, 0. By default everything.",
    "The branch that moves to the result; by default EXPERT, if it is one.",
)
@click.pass_context
def command(
    ctx: click.Context,
    /,
    expert: str,
    onto: str,
    threads: int | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Carry EXPERT to another base: NEWBASE, and what EXPERT changed of its first parent.

    The commit's first parent is NEWBASE, so that later merges take it for the base; the second is
    EXPERT as it was. Blocks that EXPERT did not change are NEWBASE's own.

    \b
    Example:
      mergegit rebase llama-math --onto llama-3.1 -b llama-3.1-math
    """
    repository = open_repository(ctx, writes=True, threads=threads)
    with progress_bar() as progress:
        report = repository.rebase(expert, onto=onto, progress=progress, **options)
    print_errand(report, as_json)
