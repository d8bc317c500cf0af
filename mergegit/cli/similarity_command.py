"""`mergegit similarity`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mergegit.cli.common import (
    complete_ref,
    json_option,
    open_repository,
    print_json,
    threads_option,
)
from mergegit.cli.progress import progress_bar

if TYPE_CHECKING:
    from mergegit.repository.similarity_report import SimilarityReport


@click.command("similarity")
@click.argument("refs", metavar="[REF]...", nargs=-1, shell_complete=complete_ref)
@click.option(
    "--base",
    metavar="REF",
    shell_complete=complete_ref,
    help="The commit that the experts changed; by default the base of all of them.",
)
@click.option(
    "--tensors",
    "patterns",
    metavar="NAME",
    multiple=True,
    help="Look at tensors alone whose names hold NAME, or match it where it has * or ?.",
)
@click.option("--exact", is_flag=True, help="Read the experts' blocks, for exact numbers.")
@click.option(
    "--plot",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE.svg",
    help="Draw the cosines into FILE.svg.",
)
@threads_option
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    refs: tuple[str, ...],
    base: str | None,
    patterns: tuple[str, ...],
    exact: bool,
    plot: Path | None,
    threads: int | None,
    as_json: bool,
) -> None:
    """Show how alike the changes are that the experts REF made to their common base.

    Without a REF, of all that were added on one base. Cosines near 0 are of experts that merge
    without a quarrel; near 1, of experts that learned the same; below 0, of experts that undo one
    another. Without --exact all is estimated from what was measured when they were added, and
    nothing is read.

    \b
    Examples:
      mergegit similarity
      mergegit similarity llama-math llama-code --exact
      mergegit similarity --base llama --tensors mlp --plot alike.svg
    """
    if plot and plot.suffix != ".svg":
        raise click.UsageError(f"--plot writes SVG; call the file {plot.with_suffix('.svg').name}.")
    repository = open_repository(ctx, threads=threads)
    with progress_bar() as progress:
        report = repository.similarity(
            refs, base=base, patterns=patterns, exact=exact, progress=progress
        )
    if plot:
        _plot(plot, report)
    from mergegit.cli.similarity_text import print_similarity, similarity_json

    if as_json:
        print_json(similarity_json(report))
    else:
        print_similarity(report)


def _plot(path: Path, report: SimilarityReport) -> None:
    from mergegit.cli.matrix_text import matrix_svg

    def cosine(row: int, column: int) -> float | None:
        figure = report.cosines[row][column]
        return None if figure is None else figure.value

    names: list[Any] = [expert.name for expert in report.experts]
    kind = "read" if report.exact else "estimated from statistics"
    svg = matrix_svg(f"cosines of what was changed of {report.base.name}", names, cosine, kind)
    try:
        path.write_text(svg)
    except OSError as error:
        raise click.FileError(str(path), error.strerror) from error
