"""`mergegit plan`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from mergegit.cli.chart import error_chart
from mergegit.cli.common import json_option, open_repository, print_json, threads_option
from mergegit.cli.merge_options import (
    RECIPE_OPTIONS,
    last_recipe,
    make_recipe,
    merge_options,
    read_recipe_file,
    refuse_given,
)
from mergegit.cli.plan_text import plan_json, print_curve, print_plan
from mergegit.cli.progress import progress_bar
from mergegit.encoding import encode
from mergegit.repository.reports import PlanReport


@click.command("plan")
@merge_options
@click.option("--curve", is_flag=True, help="Predicted error at budgets from 1% to 100%.")
@click.option(
    "--plot",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE.svg",
    help="Draw the curve into FILE.svg.",
)
@click.option(
    "--save",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write the plan to FILE, for `merge --plan FILE`.",
)
@threads_option
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    /,
    experts: tuple[str, ...],
    budget: str | None,
    anew: bool,
    recipe_file: str | None,
    curve: bool,
    plot: Path | None,
    save: Path | None,
    threads: int | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Show what a merge of each EXPERT would read, and what that costs in fidelity.

    Everything comes from what was measured when the experts were added, and no weights are read;
    only an expert that was added with another base is measured now, and embeddings of another
    vocabulary are aligned, once. Of an expert's blocks, those are free that are the base's own, and
    those skipped that the budget does not reach.

    \b
    Examples:
      mergegit plan llama-math llama-code --budget 10%
      mergegit plan llama-math llama-code --curve --plot curve.svg
      mergegit plan llama-math llama-code --budget 2GiB --save plan.bin
      mergegit plan -c recipe.yml --budget 10%
    """
    if bool(experts) == bool(recipe_file):
        raise click.UsageError("Name experts, or a recipe with -c.")
    if curve and (budget or save):
        raise click.UsageError("--curve goes without --budget and --save.")
    if plot and not curve:
        raise click.UsageError("--plot draws a --curve.")
    if plot and plot.suffix != ".svg":
        raise click.UsageError(f"--plot writes SVG; call the file {plot.with_suffix('.svg').name}.")
    repository = open_repository(ctx, threads=threads)
    with progress_bar() as progress:
        if recipe_file:
            refuse_given(ctx, RECIPE_OPTIONS, "-c")
            recipe = last_recipe(repository, *read_recipe_file(recipe_file), progress)
        else:
            recipe = make_recipe(repository, experts, **options)
        if curve:
            reports = repository.plan_curve(recipe, progress=progress)
        else:
            report = repository.plan(
                recipe,
                budget=budget,
                keep=repository.is_writable,
                anew=anew,
                progress=progress,
            )
    if curve:
        if plot:
            _write(plot, _chart(reports).encode())
        if as_json:
            print_json([plan_json(report) for report in reports])
        else:
            print_curve(reports)
        return
    if save:
        _write(save, encode(report.plan))
    if as_json:
        print_json(plan_json(report))
    else:
        print_plan(report)


def _chart(reports: Sequence[PlanReport]) -> str:
    """The curve as a picture: one point per budget, at what is really read."""
    recipe = reports[0].plan.recipe
    names = [expert["ref"] for expert in recipe["experts"]]
    title = f"{recipe['method']} of {', '.join(names[:4])}{' ...' if len(names) > 4 else ''}"
    points = [
        (100 * report.plan.planned_bytes / report.plan.raw_bytes, report.plan.predicted_error)
        for report in reports
        if report.plan.raw_bytes
    ]
    return error_chart(title, {"predicted error": points})


def _write(path: Path, data: bytes) -> None:
    try:
        path.write_bytes(data)
    except OSError as error:
        raise click.FileError(str(path), error.strerror) from error
