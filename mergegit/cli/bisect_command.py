"""`mergegit bisect`."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from mergegit.cli.common import (
    complete_ref,
    json_option,
    open_repository,
    print_json,
    print_notes,
    threads_option,
)
from mergegit.cli.progress import progress_bar
from mergegit.cli.text import plural, printable
from mergegit.errors import BadCommand
from mergegit.repository.naming import short

if TYPE_CHECKING:
    from mergegit.objects import CommitId
    from mergegit.repository import Repository
    from mergegit.repository.bisecting import Answer, Bisection, BisectStatus
    from mergegit.repository.bisection import Verdict

_SKIP: Final = 125
_NOT_RUN: Final = (126, 127)
_SIGNALLED: Final = 128
_COLOURS: Final = {"good": "green", "bad": "red", "skip": "yellow"}


@click.group("bisect", subcommand_metavar="COMMAND ...", options_metavar="")
def command() -> None:
    """Find the commit, or the expert of a merge, that breaks a test.

    `start` names a commit that is bad. Then each step names one to test, which halves those that
    are left: write it out with `checkout`, test it, and say `good`, `bad` or `skip`; or let `run`
    do all of that with a command. `reset` ends it.

    Commits are looked for among the ancestors of the bad one. With `start MERGE --experts` the
    question is which expert of a merge breaks it: merges of fewer experts are made by the same
    recipe, on no branch, reading of each what MERGE read.

    Each takes --json but `reset`, which has nothing to tell.

    \b
    Examples:
      mergegit bisect start release --good release~8
      mergegit bisect run python test_model.py
      mergegit bisect start math+code+prose --experts
      mergegit bisect run 'python evaluate.py "$1" | grep -q passed'
    """


@command.command("start")
@click.argument("ref", shell_complete=complete_ref)
@click.option(
    "--good", "good", multiple=True, metavar="REF", shell_complete=complete_ref,
    help="A commit that is known to be good, with its ancestors. Repeatable.",
)  # fmt: skip
@click.option("--experts", is_flag=True, help="Look among the experts of the merge REF.")
@json_option
@click.pass_context
def start(
    ctx: click.Context, ref: str, good: tuple[str, ...], experts: bool, as_json: bool
) -> None:
    """Begin with REF, which is bad."""
    if good and experts:
        raise click.UsageError("--good goes with commits, and not with --experts.")
    repository, bisection = _open(ctx)
    begun = bisection.start(ref, good=good, experts=experts)
    _print(repository, begun, as_json)
    if not as_json and not begun.is_found:
        print_notes(
            [
                "write it out with `mergegit bisect checkout DIR` and say `good`, `bad` or `skip`, "
                "or test with `mergegit bisect run CMD`"
            ]
        )


def _verdict(verdict: Verdict, help: str) -> click.Command:
    @click.argument("ref", required=False, shell_complete=complete_ref)
    @json_option
    @click.pass_context
    def say(ctx: click.Context, ref: str | None, as_json: bool) -> None:
        repository, bisection = _open(ctx)
        _print(repository, bisection.answer(verdict, ref), as_json)

    return click.command(verdict, help=help)(say)


command.add_command(_verdict("good", "Say that what was to be tested is good, or that REF is."))
command.add_command(_verdict("bad", "Say that what was to be tested is bad, or that REF is."))
command.add_command(_verdict("skip", "Say that what was to be tested, or REF, can't be tested."))


@command.command("status")
@json_option
@click.pass_context
def status(ctx: click.Context, as_json: bool) -> None:
    """Show what is to be tested next, or what was found."""
    repository, bisection = _open(ctx)
    _print(repository, bisection.status(), as_json)


@command.command("checkout")
@click.argument("directory", type=click.Path(path_type=Path))
@threads_option
@json_option
@click.pass_context
def checkout(ctx: click.Context, directory: Path, threads: int | None, as_json: bool) -> None:
    """Write what is to be tested next into DIRECTORY."""
    repository, bisection = _open(ctx, threads)
    with progress_bar() as progress:
        where = bisection.checkout(directory, progress)
    if as_json:
        print_json({**_json(where), "directory": str(directory)})
    else:
        click.echo(f"{_question(repository, where)} written to {printable(str(directory))}")


@command.command("run", context_settings={"allow_interspersed_args": False})
@click.argument("command_line", metavar="CMD...", nargs=-1, type=click.UNPROCESSED, required=True)
@threads_option
@json_option
@click.pass_context
def run(
    ctx: click.Context, command_line: tuple[str, ...], threads: int | None, as_json: bool
) -> None:
    """Test with CMD until what breaks it is found.

    CMD gets the directory of a checkout as its last argument, or wherever {} stands in one. One
    argument with "$1" in it is run by the shell, for which that is the directory. As for Git, an
    exit code of 0 is good, 125 skips, up to 125 is bad, and anything else ends the run. Checkouts
    lie in a temporary directory (TMPDIR) while they are tested.
    """
    repository, bisection = _open(ctx, threads)
    tests: list[dict[str, Any]] = []

    def told(where: BisectStatus, answer: Answer | None) -> None:
        if answer is not None:
            tests.append(_answer_json(answer, where))
        if as_json:
            return
        if answer is None:
            click.echo(f"testing {_question(repository, where)} ...")
        else:
            click.echo(f"  {click.style(answer.verdict, fg=_COLOURS[answer.verdict])}")

    with progress_bar() as progress:
        found = bisection.run(_test_of(command_line, as_json), told=told, progress=progress)
    if as_json:
        print_json({**_json(found), "tests": tests})
    else:
        _print(repository, found, as_json=False)


@command.command("reset")
@click.pass_context
def reset(ctx: click.Context) -> None:
    """End the bisection and forget it."""
    _, bisection = _open(ctx)
    if not bisection.reset():
        print_notes(["no bisection was under way"])


def _open(ctx: click.Context, threads: int | None = None) -> tuple[Repository, Bisection]:
    repository = open_repository(ctx, writes=True, threads=threads)
    return repository, repository.bisection()


# -- the test ------------------------------------------------------------------------------------


def _test_of(command_line: Sequence[str], quiet: bool) -> Callable[[Path], Verdict]:
    """The test that a command line is; what it prints goes to standard error where it must be
    ``quiet``."""

    def test(directory: Path) -> Verdict:
        words = _words(command_line, str(directory))
        sys.stdout.flush()
        try:
            done = subprocess.run(words, stdout=_error_stream() if quiet else None, check=False)
        except OSError as error:
            raise BadCommand(
                f"{command_line[0]} can't be run: {error.strerror}",
                hint="give a command that is there, like `mergegit bisect run python test.py`",
            ) from error
        code = done.returncode
        if code in _NOT_RUN or not 0 <= code < _SIGNALLED:
            raise BadCommand(
                f"{shlex.join(command_line)} ended with {code}: it did not test anything",
                hint="mend it and run it again; what was tested before is kept",
            )
        return "good" if code == 0 else "skip" if code == _SKIP else "bad"

    return test


def _words(command_line: Sequence[str], directory: str) -> list[str]:
    if any("{}" in word for word in command_line):
        return [word.replace("{}", directory) for word in command_line]
    if len(command_line) == 1 and any(mark in command_line[0] for mark in ("$1", "${1}", "$@")):
        return ["sh", "-c", command_line[0], "mergegit", directory]
    return [*command_line, directory]


def _error_stream() -> int | None:
    """Standard error, where it is a file that a process can have."""
    try:
        return sys.stderr.fileno()
    except (OSError, ValueError):
        return subprocess.DEVNULL


# -- what is shown -------------------------------------------------------------------------------


def _print(repository: Repository, where: BisectStatus, as_json: bool) -> None:
    if as_json:
        print_json(_json(where))
    elif where.is_found:
        _print_found(repository, where)
    else:
        word = "commit" if where.mode == "commits" else "expert"
        click.echo(
            f"bisecting: {plural(where.left, word)} may be to blame, about "
            f"{plural(where.steps, 'test')} to go"
        )
        click.echo(f"next: {_question(repository, where)}")


def _print_found(repository: Repository, where: BisectStatus) -> None:
    if where.mode == "commits":
        if where.is_certain:
            click.echo(f"the first bad commit is {_commit(repository, where.found[0])}")
            return
        click.echo("the first bad commit is one of these, as the others can't be tested:")
        for commit in where.found:
            click.echo(f"  {_commit(repository, commit)}")
        return
    if where.experts is None:
        click.echo(f"{where.ref} passes the test: no expert is to blame")
    elif not where.experts:
        click.echo("the base fails the test by itself: no expert is to blame")
    else:
        names = click.style(printable(where.names_of(where.experts)), bold=True)
        if len(where.experts) == 1:
            click.echo(f"{names} breaks the test by itself")
        else:
            click.echo(f"{names} break the test together, and not with fewer of them")
    if not where.is_certain:
        print_notes(["some merges of fewer experts could not be tested"])


def _question(repository: Repository, where: BisectStatus) -> str:
    """What is to be tested, for people."""
    if where.commit is not None:
        return _commit(repository, where.commit)
    assert where.experts is not None
    if len(where.experts) == len(where.names):
        return f"{printable(where.ref)}, the whole merge"
    if not where.experts:
        return "the base alone"
    return f"the merge of {printable(where.names_of(where.experts))}"


def _commit(repository: Repository, commit: CommitId) -> str:
    title = printable(repository.store.commit(commit).title)
    return f"{click.style(short(commit), fg='yellow')} {title}"


def _json(where: BisectStatus) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "mode": where.mode,
        "ref": where.ref,
        "bad": where.bad.hex(),
        "answers": [_answer_json(answer, where) for answer in where.answers],
        "left": where.left,
        "steps": where.steps,
        "found": where.is_found,
        "certain": where.is_certain,
    }
    if where.mode == "commits":
        facts["commit"] = where.commit.hex() if where.commit is not None else None
        facts["commits"] = [commit.hex() for commit in where.found]
    else:
        facts["experts"] = _refs(where, where.experts)
        facts["groundless"] = where.is_groundless
    return facts


def _answer_json(answer: Answer, where: BisectStatus) -> dict[str, Any]:
    what = (
        {"commit": answer.commit.hex()}
        if answer.commit is not None
        else {"experts": _refs(where, answer.experts)}
    )
    return {**what, "verdict": answer.verdict}


def _refs(where: BisectStatus, experts: tuple[int, ...] | None) -> list[str] | None:
    return None if experts is None else [where.names[place] for place in experts]
