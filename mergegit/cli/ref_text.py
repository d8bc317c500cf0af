"""Lists of refs, which `branch` and `tag` print alike."""

from __future__ import annotations

from collections.abc import Mapping

import click

from mergegit.cli.common import print_json
from mergegit.objects import CommitId
from mergegit.repository import Repository
from mergegit.repository.naming import short


def print_refs(repository: Repository, refs: Mapping[str, CommitId], as_json: bool) -> None:
    if as_json:
        print_json({name: commit.hex() for name, commit in refs.items()})
        return
    width = max(map(len, refs), default=0)
    for name, commit in refs.items():
        title = repository.store.commit(commit).title
        click.echo(f"{name.ljust(width)}  {click.style(short(commit), fg='yellow')}  {title}")
