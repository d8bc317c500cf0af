"""The group of all commands, and where errors become exit codes."""

from __future__ import annotations

import difflib
import errno
import importlib
import os
import sys
from pathlib import Path
from typing import Final

import click

from mergegit._version import VERSION
from mergegit.errors import MergegitError

_GROUPS: Final = {
    "Begin": {"init": "make a repository"},
    "Store": {
        "add": "store a checkpoint as a commit",
        "checkout": "write a commit's files to a directory",
    },
    "Merge": {
        "plan": "show what a merge would read, and what that costs in fidelity",
        "merge": "merge experts into a new commit",
        "methods": "list the methods and their parameters",
    },
    "Look": {
        "log": "show the history",
        "show": "show a commit, plan, manifest or tensor",
        "status": "show what the repository holds and takes",
    },
    "Name": {"branch": "list, create, rename or delete branches", "tag": "the same for tags"},
    "Keep": {
        "fsck": "check every byte of the repository",
        "completion": "print the shell's completion script",
    },
}
"""Commands by what a person wants to do. A command's module loads when it is called."""

_SUMMARIES: Final = {name: text for group in _GROUPS.values() for name, text in group.items()}
_ERRNO_HINTS: Final = {
    errno.ENOSPC: "free some space and run the command again; nothing was changed",
    errno.EDQUOT: "your quota is used up; free some space and run the command again",
    errno.EACCES: "check the permissions, or work as a user who has them",
    errno.EPERM: "check the permissions, or work as a user who has them",
    errno.EROFS: "the file system is read-only; copy the repository elsewhere",
    errno.EMFILE: "raise the limit on open files (`ulimit -n`)",
    errno.EIO: "the disk reports errors; check it, then run `mergegit fsck`",
}


class _Commands(click.Group):
    """Loads commands when they are called, and lists them in groups without loading any."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_SUMMARIES)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in _SUMMARIES:
            return None
        command: click.Command = importlib.import_module(f"mergegit.cli.{name}_command").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, _SUMMARIES))
        for title, commands in _GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), text) for name, text in commands.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            close = difflib.get_close_matches(args[0], _SUMMARIES, n=1)
            if close:
                raise click.UsageError(f"{error.message} Did you mean {close[0]!r}?", ctx) from None
            raise


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(VERSION, prog_name="mergegit")
@click.option(
    "-C",
    "directory",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path(),
    help="Run as if started in DIRECTORY.",
)
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.pass_context
def cli(ctx: click.Context, directory: Path, debug: bool) -> None:  # noqa: ARG001 (see main)
    """A Git-like repository for model checkpoints.

    Store many fine-tunes once, merge them under a budget on the bytes that are read, and keep the
    lineage of every model. Begin with `mergegit init` and `mergegit add CHECKPOINT`.
    """
    ctx.obj = directory


def main() -> None:
    """Run the command line. Exits 0, 1 with what failed and what to do, or 2 for wrong usage."""
    debug = "--debug" in sys.argv
    try:
        cli.main(prog_name="mergegit", standalone_mode=False)
    except click.exceptions.Exit as exit_request:
        sys.exit(exit_request.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        click.echo("interrupted; the repository is as it was", err=True)
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except MergegitError as error:
        if debug:
            raise
        _fail(error.message, error.hint, error.exit_code)
    except OSError as error:
        if debug or error.errno not in _ERRNO_HINTS:
            raise
        where = f": {error.filename}" if error.filename else ""
        _fail(f"{os.strerror(error.errno or 0)}{where}", _ERRNO_HINTS[error.errno], 1)


def _fail(message: str, hint: str, code: int) -> None:
    click.echo(f"{click.style('error:', fg='red', bold=True)} {message}", err=True)
    click.echo(f"{click.style(' hint:', fg='yellow')} {hint}", err=True)
    sys.exit(code)
