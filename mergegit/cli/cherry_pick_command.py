"""`mergegit cherry-pick`."""

from __future__ import annotations

from typing import Any

import click

from mergegit.cli.common import complete_ref, open_repository
from mergegit.cli.errand_options import check_scale, errand_options, print_errand
from mergegit.cli.progress import progress_bar


@click.command("cherry-pick")
@click.argument("expert", shell_complete=complete_ref)
@click.option(
    "--onto",
    metavar="REF",
    required=True,
    shell_complete=complete_ref,
    help="The commit that it is added to.",
)
@click.option(
    "--scale", type=float, default=1.0, show_default=True, metavar="S", callback=check_scale,
    help="How many times it is added.",
)  # fmt: skip
@errand_options(
    "The most bytes of EXPERT to read: 10%, 2GiB, 500MB, 0. By default everything.",
    "The branch that moves to the result; by default REF, if it is one.",
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
    """Add to REF what EXPERT changed of its first parent, S times.

    That is task arithmetic on REF. Blocks that EXPERT did not change are REF's own, neither read
    nor written, and a budget is spent on EXPERT alone. The commit's parents are REF, then EXPERT.

    \b
    Examples:
      mergegit cherry-pick llama-math --onto main
      mergegit cherry-pick llama-math --onto release~1 --scale 0.5 --budget 10% -b trial
    """
    repository = open_repository(ctx, writes=True, threads=threads)
    with progress_bar() as progress:
        report = repository.cherry_pick(expert, onto=onto, progress=progress, **options)
    print_errand(report, as_json)
