"""`mergegit merge`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from mergegit.cli.merge_options import (
    RECIPE_OPTIONS,
    last_recipe,
    make_recipe,
    merge_options,
    own_texts,
    read_recipe_file,
    refuse_given,
)
from mergegit.cli.merge_text import merge_json, print_merge
from mergegit.cli.plan_text import plan_json, print_plan
from mergegit.cli.progress import progress_bar
from mergegit.errors import UnknownRef
from mergegit.objects import CommitId
from mergegit.repository import Repository
from mergegit.repository.naming import short
from mergegit.repository.reports import PlanReport
from mergegit.repository.repository import BlockEncoding, Progress

if TYPE_CHECKING:
    from mergegit.merge.mergekit_yaml import Document
    from mergegit.merge.recipe import Recipe


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
    anew: bool,
    branch: str | None,
    message: str | None,
    plan_text: str | None,
    recipe_file: str | None,
    dry_run: bool,
    encoding: BlockEncoding,
    threads: int | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Merge each EXPERT into a new commit.

    The commit's parents are the base, then the experts; it goes on branch -b, by default a new
    one named after the experts. With --budget no more expert bytes are read than it allows.

    A recipe file of several documents makes a merge of each, on a branch of its name; the budget
    holds for each of them. Models in it are refs, or directories, which are added.

    \b
    Examples:
      mergegit merge llama-math llama-code --budget 10%
      mergegit merge llama-math llama-code --method ties -p density=0.5 -p llama-math.weight=0.7
      mergegit merge -c recipe.yml --budget 10%
      mergegit merge --plan plan.bin -b release
    """
    if [bool(experts), bool(plan_text), bool(recipe_file)].count(True) != 1:
        raise click.UsageError("Name experts, a plan with --plan or a recipe with -c: one of them.")
    repository = open_repository(ctx, writes=True, threads=threads)
    with progress_bar() as progress:
        if plan_text:
            refuse_given(ctx, (*RECIPE_OPTIONS, "budget", "anew"), "--plan")
            plan = _load_plan(repository, plan_text)
        else:
            if recipe_file:
                refuse_given(ctx, RECIPE_OPTIONS, "-c")
                documents, text = read_recipe_file(recipe_file)
                branch = branch or documents[-1].name
                if dry_run:
                    recipe = last_recipe(repository, documents, text, progress)
                else:
                    recipe = _merge_others(
                        repository, documents, text, budget, anew, encoding, progress
                    )
            else:
                recipe = make_recipe(repository, experts, **options)
            plan = repository.plan(recipe, budget=budget, anew=anew, progress=progress)
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
        print_json(merge_json(report))
    else:
        print_merge(report)


def _merge_others(
    repository: Repository,
    documents: Sequence[Document],
    text: str,
    budget: str | None,
    anew: bool,
    encoding: BlockEncoding,
    progress: Progress,
) -> Recipe:
    """The last recipe of a file; those before it are merged, each on a branch of its name.

    They are remembered by their own texts: another last recipe leaves them as they are.
    """
    texts = own_texts(text)
    merged: dict[str, CommitId] = {}
    for document in documents[:-1]:
        assert document.name is not None
        given = texts.get(document.name, text)
        recipe = repository.recipe_of(document, merged=merged, given=given, progress=progress)
        plan = repository.plan(recipe, budget=budget, anew=anew, progress=progress)
        report = repository.merge(plan, branch=document.name, encoding=encoding, progress=progress)
        merged[document.name] = report.commit
        click.echo(f"merged {document.name}: {short(report.commit)}", err=True)
    return repository.recipe_of(documents[-1], merged=merged, given=text, progress=progress)


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
