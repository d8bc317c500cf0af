"""`mergegit log`."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import click

from mergegit.cli.commit_format import PLACEHOLDERS, check_format, formatted
from mergegit.cli.commit_text import commit_json, full_lines, names_by_commit, oneline
from mergegit.cli.common import complete_ref, json_option, open_repository, print_json, print_notes
from mergegit.cli.graph import Graph, as_ascii
from mergegit.cli.merge_options import complete_method
from mergegit.cli.moment import since_option
from mergegit.cli.pager import paged
from mergegit.cli.text import plural
from mergegit.objects import Commit, CommitId
from mergegit.repository import Repository
from mergegit.repository.selecting import (
    ChangeCount,
    Selection,
    count_changes,
    nearest_shown,
    selected,
)

_NAMES: Final = "names"
_Found = tuple[CommitId, Commit]


class _Log(click.Command):
    """What stands behind ``--`` are parts of tensors' names."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--" in args:
            at = args.index("--")
            ctx.meta[_NAMES] = tuple(args[at + 1 :])
            args = args[:at]
        return super().parse_args(ctx, args)

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write_usage(ctx.command_path, "[OPTIONS] [REF] [-- NAME...]")

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Placeholders of --format"):
            formatter.write_dl([(f"%{key}", text) for key, (text, _) in PLACEHOLDERS.items()])


@click.command("log", cls=_Log)
@click.argument("ref", required=False, shell_complete=complete_ref)
@click.option("--graph", "with_graph", is_flag=True, help="Draw the commit graph at the side.")
@click.option("--oneline", "short_form", is_flag=True, help="One line for each commit.")
@click.option(
    "--format", "form", metavar="FORMAT", callback=check_format,
    help="A line of your own for each commit, with placeholders like %h and %s.",
)  # fmt: skip
@click.option(
    "--stat", "with_stat", is_flag=True, help="How much each changed of its first parent."
)
@click.option(
    "-n", "count", type=click.IntRange(min=0), metavar="N", help="Show at most N commits."
)
@click.option(
    "--method", metavar="METHOD", shell_complete=complete_method,
    help="Merges that were made by this method.",
)  # fmt: skip
@click.option("--expert", metavar="REF", shell_complete=complete_ref, help="Merges of this expert.")
@click.option(
    "--since", metavar="DATE", callback=since_option,
    help="Commits that are not older: 2025-06-01, '2 weeks', yesterday.",
)  # fmt: skip
@click.option("--author", metavar="NAME", help="Commits by an author whose name has this in it.")
@click.option("--no-pager", is_flag=True, help="Print to the terminal as it is.")
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    ref: str | None,
    with_graph: bool,
    short_form: bool,
    form: str | None,
    with_stat: bool,
    count: int | None,
    method: str | None,
    expert: str | None,
    since: float | None,
    author: str | None,
    no_pager: bool,
    as_json: bool,
) -> None:
    """Show the history of REF, or of all branches and tags.

    Behind -- stand parts of tensors' names: commits that changed one of these are shown. Several
    conditions must hold together.

    On a terminal it is shown in MERGEGIT_PAGER, PAGER or less.

    \b
    Examples:
      mergegit log --graph --oneline
      mergegit log llama-math+llama-code -n 3
      mergegit log --method ties --since '2 weeks' --stat
      mergegit log --expert llama-math --format '%h %m %e %E'
      mergegit log release -- layers.3. lm_head
    """
    if form is not None and (short_form or as_json):
        raise click.UsageError("--format goes without --oneline and --json.")
    repository = open_repository(ctx)
    names = names_by_commit(repository)
    selection = Selection(
        method,
        repository.resolve(expert) if expert is not None else None,
        since,
        author,
        ctx.meta.get(_NAMES, ()),
    )
    history: Iterable[_Found] = repository.log(ref)
    parents: Mapping[CommitId, Sequence[CommitId]] | None = None
    if with_graph and not selection.is_all:
        history = list(history)
        shown = {i for i, _ in selected(iter(history), repository.store, selection)}
        parents = nearest_shown(history, shown.__contains__)
        history = [(i, commit) for i, commit in history if i in shown]
    elif not selection.is_all:
        history = selected(iter(history), repository.store, selection)
    commits = itertools.islice(history, count)
    if as_json:
        print_json([_json(repository, i, c, names.get(i, ()), with_stat) for i, c in commits])
        return
    look = _Look(repository, names, short_form, form, with_stat)
    number = 1  # where the pager is left early, there was something to see
    with paged(ctx, wanted=not no_pager):
        number = _print_graph(look, commits, parents) if with_graph else _print(look, commits)
    if not names:
        print_notes(["there are no commits yet; begin with `mergegit add CHECKPOINT`"])
    elif not number and not selection.is_all and count != 0:
        print_notes(["no commit is like that"])


@dataclass(frozen=True, slots=True)
class _Look:
    """How a commit is shown."""

    repository: Repository
    names: Mapping[CommitId, Sequence[str]]
    short_form: bool
    form: str | None
    with_stat: bool

    @property
    def is_spaced(self) -> bool:
        """Whether there is a line between commits."""
        return not self.short_form and self.form is None

    def lines(self, commit_id: CommitId, commit: Commit) -> list[str]:
        own = self.names.get(commit_id, ())
        if self.form is not None:
            lines = formatted(self.form, self.repository, commit_id, commit, own).split("\n")
        elif self.short_form:
            lines = [oneline(commit_id, commit, own)]
        else:
            lines = full_lines(commit_id, commit, self.names)
        if self.with_stat:
            stat = stat_line(count_changes(self.repository.store, commit))
            lines += ["", f"    {stat}"] if self.is_spaced else [f"  {stat}"]
        return lines


def _print(look: _Look, commits: Iterator[_Found]) -> int:
    number = 0
    for commit_id, commit in commits:
        if number and look.is_spaced:
            click.echo("")
        click.echo("\n".join(look.lines(commit_id, commit)))
        number += 1
    return number


def _print_graph(
    look: _Look,
    commits: Iterator[_Found],
    parents: Mapping[CommitId, Sequence[CommitId]] | None,
) -> int:
    graph: Graph[CommitId] = Graph()
    plain = not _can_draw()
    number = 0
    for commit_id, commit in commits:
        lines = look.lines(commit_id, commit)
        if number and (look.is_spaced or not graph.margin):
            # Where no line leads on, one commit below another would look like its parent.
            click.echo(_art(graph.margin, graph.margin, plain))
        number += 1
        width = 0
        above = commit.parents if parents is None else parents[commit_id]
        for art, is_commit in graph.draw(commit_id, above):
            width = len(art) if is_commit else width
            text = f"{art}  {lines[0]}".rstrip() if is_commit else art
            click.echo(_art(text, art, plain))
        margin = graph.margin.ljust(width)
        for line in lines[1:]:
            click.echo(f"{_art(margin, margin, plain)}  {line}".rstrip())
    return number


def stat_line(count: ChangeCount) -> str:
    """What a commit changed, in a line."""
    if not count.has_parent:
        return f"{plural(count.tensors, 'tensor')}, {plural(count.blocks, 'block')}"
    parts = [f"{count.changed:,} of {plural(count.tensors, 'tensor')} changed"]
    parts += [f"{count.added:,} added"] if count.added else []
    parts += [f"{count.removed:,} removed"] if count.removed else []
    return f"{', '.join(parts)}; {count.shared:,} of {plural(count.blocks, 'block')} shared"


def _json(
    repository: Repository,
    commit_id: CommitId,
    commit: Commit,
    names: Sequence[str],
    with_stat: bool,
) -> dict[str, Any]:
    facts = commit_json(commit_id, commit, names)
    if with_stat:
        count = count_changes(repository.store, commit)
        facts["stat"] = {
            "tensors": count.tensors,
            "changed": count.changed,
            "added": count.added,
            "removed": count.removed,
            "blocks": count.blocks,
            "shared": count.shared,
        }
    return facts


def _art(text: str, art: str, plain: bool) -> str:
    return as_ascii(art) + text[len(art) :] if plain else text


def _can_draw() -> bool:
    """Whether standard output can show box drawing."""
    try:
        "●│╮".encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
