"""`mergegit revert`."""

from __future__ import annotations

from typing import Any

import click

from mergegit.cli.common import complete_ref, open_repository
from mergegit.cli.errand_options import check_scale, errand_options, print_errand
from mergegit.cli.progress import progress_bar


@click.command("revert")
@click.argument("expert", shell_complete=complete_ref)
@click.option(
    "--from",
    "out_of",
    metavar="REF",
    required=True,
    shell_complete=complete_ref,
    help="The commit that it is taken out of.",
)
@click.option(
    "--scale", type=float, default=1.0, show_default=True, metavar="S", callback=check_scale,
    help="How many times it is subtracted, where a merge can't be made again without it.",
)  # fmt: skip
@errand_options(
    "The most bytes of experts to read: 10%, 2GiB, 500MB, 0. By default what REF read of the "
    "others, or, where EXPERT is subtracted, all of it.",
    "The branch that moves to the result; by default REF, if it is one.",
)
@click.pass_context
def command(
    ctx: click.Context, /, expert: str, out_of: str, threads: int | None, as_json: bool,
    **options: Any,
) -> None:  # fmt: skip
    """Take out of REF what EXPERT changed.

    If REF is a merge of EXPERT by a method that adds experts up (linear, task_arithmetic,
    dare_linear), it is made again without EXPERT: nothing of it is left, nor in the lineage. The
    branch REF then leaves the old merge behind, where REF@{1} names it.

    Anything else has what EXPERT changed of its first parent subtracted: approximately, as rounding
    and the merge's method had their part in it. A note says which was done.

    \b
    Examples:
      mergegit revert llama-math --from release
      mergegit revert llama-math --from release --dry-run
    """
    repository = open_repository(ctx, writes=True, threads=threads)
    with progress_bar() as progress:
        report = repository.revert(expert, out_of=out_of, progress=progress, **options)
    print_errand(report, as_json)
