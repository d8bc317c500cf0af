"""`mergegit init`."""

from __future__ import annotations

from pathlib import Path

import click

from mergegit.storage.location import create


@click.command("init")
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False), required=False)
@click.pass_context
def command(ctx: click.Context, directory: Path | None) -> None:
    """Make an empty repository in DIRECTORY, by default here.

    Running it again changes nothing.
    """
    where = ctx.find_root().obj / (directory or Path())
    location, is_new = create(where)
    word = "empty repository made in" if is_new else "there is a repository already in"
    click.echo(f"{word} {location.root.resolve()}")
