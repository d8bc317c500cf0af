"""What commands share: opening the repository, who the author is, options."""

from __future__ import annotations

import getpass
import json
import os
import shutil
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from mergegit.repository import Repository

_F = TypeVar("_F", bound=Callable[..., Any])


def open_repository(
    ctx: click.Context, *, writes: bool = False, threads: int | None = None
) -> Repository:
    """The repository of the working directory or of -C. Commits need an author, others don't."""
    directory: Path = ctx.find_root().obj
    author = author_of_environment() if writes else "unknown"
    repository = Repository.open(directory, author=author, threads=threads)
    ctx.call_on_close(repository.close)
    return repository


def author_of_environment() -> str:
    """``Name <email>`` from MERGEGIT_AUTHOR, Git's variables, Git's configuration, or the user."""
    if author := os.environ.get("MERGEGIT_AUTHOR"):
        return author
    name = os.environ.get("GIT_AUTHOR_NAME") or _git_config("user.name")
    email = os.environ.get("GIT_AUTHOR_EMAIL") or _git_config("user.email")
    if not name:
        try:
            name = getpass.getuser()
        except (KeyError, OSError):
            name = f"uid {os.getuid()}"
    return f"{name} <{email or f'{name}@{socket.gethostname()}'}>"


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


json_option = click.option("--json", "as_json", is_flag=True, help="Print the facts as JSON.")

threads_option = click.option(
    "--threads",
    type=click.IntRange(min=1),
    default=None,
    help="Threads that work; by default one per core. They change no result.",
)
