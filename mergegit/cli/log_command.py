"""`mergegit log`."""

from __future__ import annotations

import itertools
import sys

import click

from mergegit.cli.commit_text import commit_json, full_lines, names_by_commit, oneline
from mergegit.cli.common import complete_ref, json_option, open_repository, print_json, print_notes
from mergegit.cli.graph import Graph, as_ascii
from mergegit.objects import CommitId


@click.command("log")
@click.argument("ref", required=False, shell_complete=complete_ref)
@click.option("--graph", "with_graph", is_flag=True, help="Draw the commit graph at the side.")
@click.option("--oneline", "short_form", is_flag=True, help="One line for each commit.")
@click.option(
    "-n", "count", type=click.IntRange(min=0), metavar="N", help="Show at most N commits."
)
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    ref: str | None,
    with_graph: bool,
    short_form: bool,
    count: int | None,
    as_json: bool,
) -> None:
    """Show the history of REF, or of all branches and tags.

    \b
    Examples:
      mergegit log --graph --oneline
      mergegit log llama-math+llama-code -n 3
    """
    repository = open_repository(ctx)
    names = names_by_commit(repository)
    commits = itertools.islice(repository.log(ref), count)
    if as_json:
        print_json([commit_json(i, commit, names.get(i, ())) for i, commit in commits])
        return
    if not names:
        print_notes(["there are no commits yet; begin with `mergegit add CHECKPOINT`"])
    graph: Graph[CommitId] = Graph()
    plain = not _can_draw()
    for number, (commit_id, commit) in enumerate(commits):
        lines = (
            [oneline(commit_id, commit, names.get(commit_id, ()))]
            if short_form
            else full_lines(commit_id, commit, names)
        )
        if number and not short_form:
            click.echo(_art(graph.margin, graph.margin, plain) if with_graph else "")
        if not with_graph:
            click.echo("\n".join(lines))
            continue
        width = 0
        for art, is_commit in graph.draw(commit_id, commit.parents):
            width = len(art) if is_commit else width
            text = f"{art}  {lines[0]}" if is_commit else art
            click.echo(_art(text, art, plain))
        margin = graph.margin.ljust(width)
        for line in lines[1:]:
            click.echo(f"{_art(margin, margin, plain)}  {line}".rstrip())


def _art(text: str, art: str, plain: bool) -> str:
    return as_ascii(art) + text[len(art) :] if plain else text


def _can_draw() -> bool:
    """Whether standard output can show box drawing."""
    try:
        "●│╮".encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
