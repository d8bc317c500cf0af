"""What commands share: opening the repository, who the author is, options, completion."""

from __future__ import annotations

import getpass
import json
import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click

from mergegit.cli.allocator import keep_freed_memory
from mergegit.cli.text import printable
from mergegit.errors import MergegitError
from mergegit.repository import Repository


def open_repository(
    ctx: click.Context, *, writes: bool = False, threads: int | None = None
) -> Repository:
    """The repository of the working directory. Commits and refs need an author, others don't."""
    keep_freed_memory()
    author = author_of_environment() if writes else "unknown"
    repository = Repository.open(author=author, threads=threads)
    ctx.call_on_close(repository.close)
    return repository


def author_of_environment() -> str:
    """``Name <email>`` from MERGEGIT_AUTHOR, Git's variables, Git's configuration, or the user."""
    if author := os.environ.get("MERGEGIT_AUTHOR"):
        return printable(author)
    name = os.environ.get("GIT_AUTHOR_NAME") or _git_config("user.name")
    email = os.environ.get("GIT_AUTHOR_EMAIL") or _git_config("user.email")
    if not name:
        try:
            name = getpass.getuser()
        except (KeyError, OSError):
            name = f"uid {os.getuid()}"
    return printable(f"{name} <{email or f'{name}@{socket.gethostname()}'}>")


def _git_config(key: str) -> str | None:
    if shutil.which("git") is None:
        return None
    done = subprocess.run(
        ["git", "config", "--get", key], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or None


def print_json(value: object) -> None:
    """Facts for programs: one JSON value on standard output."""
    click.echo(json.dumps(value, indent=2))


def print_notes(notes: Iterable[str]) -> None:
    """What a careful user should know, on standard error."""
    for note in notes:
        click.echo(f"{click.style('note:', fg='yellow')} {printable(note)}", err=True)


def complete_ref(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    """Branches and tags that begin as typed, for the shell's completion."""
    from mergegit.storage.location import discover
    from mergegit.storage.refs import Refs

    try:
        refs = Refs(discover(Path()))
        names = {*refs.all("heads"), *refs.all("tags")}
    except (MergegitError, OSError):
        return []
    return sorted(name for name in names if name.startswith(incomplete))


def _is_text(_ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Bytes of the command line that are not UTF-8 can't go into a commit."""
    if value is not None and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise click.BadParameter("it is not UTF-8", param=param) from None
    return value


json_option = click.option("--json", "as_json", is_flag=True, help="Print the facts as JSON.")

message_option = click.option(
    "-m",
    "--message",
    metavar="TEXT",
    callback=_is_text,
    help="The commit's message; by default what was done.",
)


def encoding_option(default: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """How blocks that have a base are stored; the default is the command's."""
    return click.option(
        "--encoding",
        type=click.Choice(["delta", "raw"]),
        default=default,
        show_default=True,
        help="Store blocks as progressive deltas from the base's, or as their plain bytes.",
    )


threads_option = click.option(
    "--threads",
    type=click.IntRange(min=1),
    metavar="N",
    default=None,
    help="Threads that work; by default one per core. They change no result.",
)
