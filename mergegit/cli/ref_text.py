"""What `branch` and `tag` print alike: lists of refs, and one ref that was made or deleted."""

from __future__ import annotations

from collections.abc import Mapping

import click

from mergegit.cli.common import print_json
from mergegit.cli.text import printable
from mergegit.objects import CommitId
from mergegit.repository import Repository
from mergegit.repository.naming import short


def print_refs(repository: Repository, refs: Mapping[str, CommitId], as_json: bool) -> None:
    if as_json:
        print_json({name: commit.hex() for name, commit in refs.items()})
        return
    for line in ref_lines(repository, refs):
        click.echo(line)


def ref_lines(repository: Repository, refs: Mapping[str, CommitId]) -> list[str]:
    """Each ref with its commit and the first line of the commit's message."""
    width = max(map(len, refs), default=0)
    return [
        f"{name.ljust(width)}  {click.style(short(commit), fg='yellow')}  "
        f"{printable(repository.store.commit(commit).title)}"
        for name, commit in refs.items()
    ]


def print_ref(word: str, name: str, commit: CommitId, done: str, as_json: bool) -> None:
    """One ref and what was done with it: ``made at`` a commit, for example."""
    if as_json:
        print_json({word: name, "commit": commit.hex()})
    else:
        click.echo(f"{word} {name} {done} {click.style(short(commit), fg='yellow')}")
