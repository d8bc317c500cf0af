"""`mergegit merge`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from mergegit.cli.common import (
    complete_ref,
    encoding_option,
    json_option,
    message_option,
    open_repository,
    print_json,
    threads_option,
)
from mergegit.cli.merge_options import make_recipe, merge_options
from mergegit.cli.plan_text import plan_json, print_plan
from mergegit.cli.progress import progress_bar
from mergegit.cli.text import human_bytes, human_seconds
from mergegit.errors import UnknownRef
from mergegit.repository import Repository
from mergegit.repository.naming import short
from mergegit.repository.reports import PlanReport
from mergegit.repository.repository import BlockEncoding


@click.command("merge")
@merge_options
@click.option(
    "-b",
    "--branch",
    metavar="BRANCH",
    help="The branch that the merge moves; by default a new one named after the experts.",
)
@message_option
@click.option(
    "--plan",
    "plan_text",
    metavar="FILE|ID",
    shell_complete=complete_ref,
    help="Carry out a plan: by the id that `plan` printed, from the file that `plan --save` "
    "wrote, or the plan of a merge.",
)
@click.option("--dry-run", is_flag=True, help="Show the plan and stop.")
@encoding_option("delta")
@threads_option
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    /,
    experts: tuple[str, ...],
    budget: str | None,
    branch: str | None,
    message: str | None,
    plan_text: str | None,
    dry_run: bool,
    encoding: BlockEncoding,
    threads: int | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Merge each EXPERT into a new commit.

    The commit's parents are the base, then the experts; it goes on branch -b, by default a new
    one named after the experts. With --budget no more expert bytes are read than it allows.

    \b
    Examples:
      mergegit merge llama-math llama-code --budget 10%
      mergegit merge llama-math llama-code --method ties -p density=0.5 -p llama-math.weight=0.7
      mergegit merge --plan plan.bin -b release
    """
    if bool(experts) == bool(plan_text):
        raise click.UsageError(
            "Name experts or a plan, not both."
            if experts
            else "Name experts, or a plan with --plan."
        )
    repository = open_repository(ctx, writes=True, threads=threads)
    with progress_bar() as progress:
        if plan_text:
            _refuse_other_options(ctx)
            plan = _load_plan(repository, plan_text)
        else:
            recipe = make_recipe(repository, experts, **options)
            plan = repository.plan(recipe, budget=budget, progress=progress)
        if not dry_run:
            report = repository.merge(
                plan, branch=branch, message=message, encoding=encoding, progress=progress
            )
    if dry_run:
        if as_json:
            print_json(plan_json(plan))
        else:
            print_plan(plan)
        return
    if as_json:
        print_json(
            {
                **plan_json(plan),
                "commit": report.commit.hex(),
                "branch": report.branch,
                "is_new": report.is_new,
                "read_bytes": report.read_bytes,
                "base_read_bytes": report.base_read_bytes,
                "written_bytes": report.written_bytes,
                "seconds": round(report.seconds, 3),
            }
        )
        return
    branch = click.style(report.branch, bold=True)
    commit = click.style(short(report.commit), fg="yellow")
    if not report.is_new:
        click.echo(f"{branch} holds this merge already, at {commit}; nothing to do")
        return
    print_plan(plan)
    click.echo(f"merged into {branch}: {commit}")
    click.echo(
        f"  read {human_bytes(report.read_bytes)} of experts and "
        f"{human_bytes(report.base_read_bytes)} of the base; "
        f"wrote {human_bytes(report.written_bytes)}; {human_seconds(report.seconds)}"
    )


def _refuse_other_options(ctx: click.Context) -> None:
    """A plan says all about a merge: options that would change it have no meaning beside it."""
    source = click.core.ParameterSource.COMMANDLINE
    meaningless = ("base", "method", "parameters", "budget", "seed", "dtype", "ignore_extra",
                   "allow_nonfinite")  # fmt: skip
    for param in ctx.command.params:
        if param.name in meaningless and ctx.get_parameter_source(param.name) == source:
            raise click.UsageError(f"--plan says it all; {param.opts[0]} can't change it.")


def _load_plan(repository: Repository, text: str) -> PlanReport:
    """A plan from a file that `plan --save` wrote, else from the store."""
    path = Path(text)
    if path.is_file():
        return repository.read_plan(path)
    try:
        return repository.saved_plan(text)
    except UnknownRef as error:
        raise UnknownRef(
            f"there is no file, plan or merge {text!r}",
            hint="give the id that `mergegit plan` printed, or the file of `plan --save`",
        ) from error
