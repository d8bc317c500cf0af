"""`mergegit diff`."""

from __future__ import annotations

import click

from mergegit.cli.common import (
    complete_ref,
    json_option,
    open_repository,
    print_json,
    print_notes,
    threads_option,
)
from mergegit.cli.progress import progress_bar


@click.command("diff")
@click.argument("old", metavar="A", shell_complete=complete_ref)
@click.argument("new", metavar="B", shell_complete=complete_ref)
@click.argument("patterns", metavar="[NAME]...", nargs=-1)
@click.option(
    "--against",
    metavar="REF",
    shell_complete=complete_ref,
    help="Compare the direction of the change with that of the change from A to REF.",
)
@click.option("--exact", is_flag=True, help="Read the blocks that differ, for exact numbers.")
@click.option("--stat", is_flag=True, help="List every tensor, in place of the heat map.")
@click.option("--weights", is_flag=True, help="Compare weights alone.")
@click.option("--files", is_flag=True, help="Compare the files around the weights alone.")
@threads_option
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    old: str,
    new: str,
    patterns: tuple[str, ...],
    against: str | None,
    exact: bool,
    stat: bool,
    weights: bool,
    files: bool,
    threads: int | None,
    as_json: bool,
) -> None:
    """Show what differs between the commits A and B, in weights and in files.

    With NAMEs, of tensors and files alone whose names hold one of them, or match it where it has *
    or ?. The heat map has a row for each kind of module and a column for each layer; it shows the
    norm of the change beside that of A's weights.

    Nothing is read that is the same, and without --exact no weights at all: numbers come from what
    was measured when models were added, and those that are estimated from it are marked ~.

    \b
    Examples:
      mergegit diff llama llama-math
      mergegit diff llama llama-math mlp --stat --against llama-code
      mergegit diff llama-math llama-math~1 --exact --json
    """
    if weights and files:
        raise click.UsageError("--weights and --files exclude one another; both are the default.")
    for option, given in (("--against", against), ("--exact", exact), ("--stat", stat)):
        if files and given:
            raise click.UsageError(f"{option} is about weights, and goes without --files.")
    repository = open_repository(ctx, threads=threads)
    with progress_bar() as progress:
        report = repository.diff(
            old,
            new,
            against=against,
            patterns=patterns,
            weights=not files,
            files=not weights,
            exact=exact,
            progress=progress,
        )
    from mergegit.cli.diff_text import diff_json, print_diff

    print_notes(report.notes)
    if as_json:
        print_json(diff_json(report))
    else:
        print_diff(report, stat=stat)
