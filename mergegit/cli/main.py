"""The group of all commands, and where errors become exit codes."""

from __future__ import annotations

import difflib
import errno
import importlib
import os
import sys
from pathlib import Path
from typing import Final, NoReturn

import click

from mergegit._version import VERSION
from mergegit.cli.text import printable
from mergegit.errors import MergegitError, NotARepository

_GROUPS: Final = {
    "Begin": {"init": "make a repository"},
    "Store": {
        "add": "store a checkpoint as a commit",
        "checkout": "write a commit's files to a directory",
        "extract-lora": "write what an expert changed as a low-rank adapter",
    },
    "Merge": {
        "plan": "show what a merge would read, and what that costs in fidelity",
        "merge": "merge experts into a new commit",
        "methods": "list the methods and their parameters",
        "cherry-pick": "add what an expert changed to another commit",
        "revert": "take out of a commit what an expert changed",
        "rebase": "carry an expert to another base",
    },
    "Look": {
        "log": "show the history",
        "show": "show a commit, plan, manifest or tensor",
        "diff": "show what differs between two commits, in weights and files",
        "similarity": "show how alike experts' changes are",
        "blame": "show what each tensor of a merge was made of",
        "reflog": "show where branches and tags stood",
        "status": "show what the repository holds and takes",
        "bisect": "find the commit or expert that breaks a test",
    },
    "Name": {
        "branch": "list, make, rename or delete branches",
        "tag": "list, make or delete tags",
        "reset": "move a branch to any commit",
    },
    "Keep": {
        "fsck": "check every byte of the repository",
        "verify": "check a commit with all that it descends from",
        "replay": "merge a merge again, and compare",
        "gc": "reclaim the space of what nothing needs",
        "repack": "store blocks in another encoding",
        "completion": "print the shell's completion script",
    },
}
"""Commands by what a person wants to do. A command's module loads when it is called."""

_SUMMARIES: Final = {name: text for group in _GROUPS.values() for name, text in group.items()}
_ERRNO_HINTS: Final = {
    errno.ENOSPC: "free some space and run the command again; nothing was lost",
    errno.EDQUOT: "your quota is used up; free some space and run the command again",
    errno.EFBIG: "raise the limit on the size of files (`ulimit -f`), or use another disk",
    errno.EACCES: "check the permissions, or work as a user who has them",
    errno.EPERM: "check the permissions, or work as a user who has them",
    errno.EROFS: "the file system is read-only; copy the repository elsewhere",
    errno.EMFILE: "raise the limit on open files (`ulimit -n`)",
    errno.ENAMETOOLONG: "use shorter names",
    errno.ELOOP: "remove the symbolic link that leads back to itself",
    errno.EIO: "the disk reports errors; check it, then run `mergegit fsck`",
}


class _Commands(click.Group):
    """Loads commands when they are called, and lists them in groups without loading any."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_SUMMARIES)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in _SUMMARIES:
            return None
        module = f"mergegit.cli.{name.replace('-', '_')}_command"
        command: click.Command = importlib.import_module(module).command
        parts = command.commands.values() if isinstance(command, click.Group) else ()
        for one in (command, *parts):
            if not any(option.name == "directory_to_enter" for option in one.params):
                one.params += [_directory_option(hidden=True), _debug_option(hidden=True)]
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, _SUMMARIES))
        for title, commands in _GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), text) for name, text in commands.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in _SUMMARIES and not args[0].startswith("-"):
            raise _UnknownCommand(args[0], ctx)
        return super().resolve_command(ctx, args)


class _UnknownCommand(click.UsageError):
    def __init__(self, name: str, ctx: click.Context) -> None:
        super().__init__(f"there is no command {name!r}", ctx)
        close = difflib.get_close_matches(name, _SUMMARIES, n=1)
        self.hint = f"did you mean `mergegit {close[0]}`?" if close else "see `mergegit --help`"


def _enter(_ctx: click.Context, _option: click.Parameter, directory: Path | None) -> None:
    if directory is None:
        return
    try:
        os.chdir(directory)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise click.UsageError(f"there is no directory {directory}") from error


def _directory_option(*, hidden: bool = False) -> click.Option:
    """-C, as Git has it; commands take it behind their name, too."""
    return click.Option(
        ["-C", "directory_to_enter"],
        type=click.Path(path_type=Path, file_okay=False),
        metavar="DIRECTORY",
        help="Run as if started in DIRECTORY.",
        callback=_enter,
        expose_value=False,
        is_eager=True,
        hidden=hidden,
    )


def _debug_option(*, hidden: bool = False) -> click.Option:
    """Looked for by ``main``, which must know it before anything is parsed."""
    return click.Option(
        ["--debug"],
        is_flag=True,
        help="Show the traceback of an error.",
        expose_value=False,
        hidden=hidden,
    )


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    invoke_without_command=True,
    subcommand_metavar="COMMAND ...",
    options_metavar="",
    params=[_directory_option(), _debug_option()],
)
@click.version_option(VERSION, prog_name="mergegit", message="%(prog)s %(version)s")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """A Git-like repository for model checkpoints.

    Store many fine-tunes once, merge them under a budget on the bytes that are read, and keep the
    lineage of every model. Begin with `mergegit init` and `mergegit add CHECKPOINT`;
    `mergegit COMMAND --help` tells more.
    """
    if os.environ.get("NO_COLOR"):
        ctx.color = False
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise NotARepository(
            "the working directory is not there any more", hint="go to one that is"
        ) from error
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help(), err=True)
        ctx.exit(2)


def main() -> None:
    """Run the command line. Exits 0, 1 with what failed and what to do, or 2 for wrong usage."""
    debug = "--debug" in sys.argv
    try:
        sys.exit(cli.main(prog_name="mergegit", standalone_mode=False) or 0)
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx else "mergegit"
        hint = getattr(error, "hint", f"`{path} --help` shows how it is used")
        _fail(_calm(error.format_message()), hint, error.exit_code)
    except click.ClickException as error:
        _fail(_calm(error.format_message()), "check the name and the permissions", error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        click.echo("interrupted; nothing is left half done", err=True)
        sys.exit(130)
    except MergegitError as error:
        if debug:
            raise
        _fail(error.message, error.hint, error.exit_code)
    except OSError as error:
        if debug or error.errno not in _ERRNO_HINTS:
            raise
        where = f": {error.filename}" if error.filename else ""
        _fail(f"{os.strerror(error.errno or 0)}{where}", _ERRNO_HINTS[error.errno], 1)


def _calm(message: str) -> str:
    """click's words in the form of ours: no capital, no full stop."""
    return message[:1].lower() + message[1:].rstrip(".")


def _fail(message: str, hint: str, code: int) -> NoReturn:
    color = False if os.environ.get("NO_COLOR") else None
    for word, style, text in (("error", "red", message), (" hint", "yellow", hint)):
        label = click.style(f"{word}:", fg=style, bold=word == "error")
        click.echo(f"{label} {printable(text)}", err=True, color=color)
    sys.exit(code)
