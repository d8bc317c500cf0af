"""`mergegit blame`."""

from __future__ import annotations

import click

from mergegit.cli.common import complete_ref, json_option, open_repository, print_json
from mergegit.cli.progress import progress_bar


@click.command("blame")
@click.argument("ref", metavar="REF", shell_complete=complete_ref)
@click.argument("tensor", metavar="[TENSOR]", required=False)
@click.option("--map", "with_map", is_flag=True, help="Draw a heat map of each expert's shares.")
@json_option
@click.pass_context
def command(
    ctx: click.Context, ref: str, tensor: str | None, with_map: bool, as_json: bool
) -> None:
    """Show what the tensors of the commit REF were made of.

    An expert that is a merge itself is followed back to the commits that were added, its weight
    multiplied by theirs. An expert's share is what it has of the sum of all energies, its weight
    squared times that of its delta as far as it was read. Everything is in the history and the
    statistics: no weights are read.

    With TENSOR, of tensors alone whose names hold it, or match it where it has * or ?; a single one
    is shown in detail.

    \b
    Examples:
      mergegit blame both
      mergegit blame both layers.7.mlp.down_proj
      mergegit blame both mlp --map
    """
    repository = open_repository(ctx)
    with progress_bar() as progress:
        report = repository.blame(
            ref, patterns=[tensor] if tensor is not None else [], progress=progress
        )
    from mergegit.cli.blame_text import blame_json, print_blame

    if as_json:
        print_json(blame_json(report))
    else:
        print_blame(report, with_map=with_map)
