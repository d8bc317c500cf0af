"""`mergegit verify`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from mergegit.cli.commit_text import decoration, names_by_commit
from mergegit.cli.common import (
    complete_ref,
    json_option,
    open_repository,
    print_json,
    threads_option,
)
from mergegit.cli.progress import progress_bar
from mergegit.cli.replay_command import replay_json
from mergegit.cli.text import human_bytes, plural, printable
from mergegit.repository.naming import short

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mergegit.repository.verifying import VerifiedCommit


@click.command("verify")
@click.argument("ref", metavar="COMMIT", shell_complete=complete_ref)
@click.option("--replay", is_flag=True, help="Merge every merge again as well, and compare.")
@threads_option
@json_option
@click.pass_context
def command(ctx: click.Context, ref: str, replay: bool, threads: int | None, as_json: bool) -> None:
    """Check COMMIT and everything that it descends from, a line for each commit.

    Every object and block must be there and be what its id says, and every merge must be what its
    recipe, its plan and its parents say. Exits 1 where anything is not. `mergegit fsck` checks the
    whole repository instead.

    \b
    Examples:
      mergegit verify llama-math+llama-code
      mergegit verify release --replay --json
    """
    repository = open_repository(ctx, threads=threads)
    names = names_by_commit(repository)
    with progress_bar() as progress:
        report = repository.verify(ref, replay=replay, progress=progress)
    if as_json:
        print_json(
            {
                "sound": report.is_sound,
                "commits": [_json(found, names.get(found.commit, ())) for found in report.commits],
            }
        )
    else:
        for found in report.commits:
            _print(found, names.get(found.commit, ()))
    sys.exit(0 if report.is_sound else 1)


def _json(found: VerifiedCommit, names: Sequence[str]) -> dict[str, Any]:
    return {
        "commit": found.commit.hex(),
        "refs": list(names),
        "title": found.title,
        "sound": found.is_sound,
        "merge": found.is_merge,
        "tensors": found.tensors,
        "blocks": found.blocks,
        "bytes": found.nbytes,
        "checked_bytes": found.checked_bytes,
        "problems": list(found.problems),
        "replay": replay_json(found.replay) if found.replay else None,
    }


def _print(found: VerifiedCommit, names: Sequence[str]) -> None:
    word = (
        click.style("sound  ", fg="green")
        if found.is_sound
        else click.style("damaged", fg="red", bold=True)
    )
    line = f"{word} {click.style(short(found.commit), fg='yellow')}{decoration(names)}"
    if found.title is not None:
        line += (
            f" {printable(found.title)}: {plural(found.tensors, 'tensor')}, "
            f"{plural(found.blocks, 'block')}, {human_bytes(found.nbytes)}"
        )
    if found.replay is not None and found.replay.is_same:
        line += "; replayed: the same"
    click.echo(line)
    for problem in found.problems:
        click.echo(f"        {printable(problem)}")
