"""`mergegit init`."""

from __future__ import annotations

from pathlib import Path

import click

from mergegit.cli.common import json_option, print_json
from mergegit.storage.location import create


@click.command("init")
@click.argument(
    "directory", type=click.Path(path_type=Path, file_okay=False), default=Path(), required=False
)
@json_option
def command(directory: Path, as_json: bool) -> None:
    """Make an empty repository in DIRECTORY, by default here.

    Everything lies in DIRECTORY/.mergegit; keep that on a local disk. Running it again changes
    nothing.
    """
    location, is_new = create(directory)
    root = str(location.root.resolve())
    if as_json:
        print_json({"root": root, "is_new": is_new})
        return
    click.echo(
        f"{'empty repository made in' if is_new else 'there is a repository already in'} {root}"
    )
