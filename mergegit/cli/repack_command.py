"""`mergegit repack`."""

from __future__ import annotations

import click

from mergegit.cli.common import (
    complete_ref,
    encoding_option,
    json_option,
    open_repository,
    print_json,
    threads_option,
)
from mergegit.cli.progress import progress_bar
from mergegit.cli.text import human_bytes, human_seconds, plural
from mergegit.repository.repository import BlockEncoding


@click.command("repack")
@click.argument("refs", metavar="[REF]...", nargs=-1, shell_complete=complete_ref)
@click.option(
    "--base", metavar="REF", shell_complete=complete_ref,
    help="Take deltas from REF; by default from each commit's first parent.",
)  # fmt: skip
@encoding_option("delta")
@threads_option
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    refs: tuple[str, ...],
    base: str | None,
    encoding: BlockEncoding,
    threads: int | None,
    as_json: bool,
) -> None:
    """Store the blocks of REFs, or of all commits, in another encoding.

    Commits and their contents stay as they are; only what they take on disk, and what a merge
    can read of them in part, changes. An interrupted run is taken up where it ended.

    \b
    Examples:
      mergegit repack                          deltas wherever a commit has a base
      mergegit repack old-expert --base base   the base was added after the expert
      mergegit repack merged --encoding raw    plain bytes, fastest to check out
    """
    if base is not None and (not refs or encoding == "raw"):
        raise click.UsageError("--base goes with named REFs and with --encoding delta.")
    repository = open_repository(ctx, writes=True, threads=threads)
    with progress_bar() as progress:
        report = repository.repack(refs, base=base, encoding=encoding, progress=progress)
    if as_json:
        print_json(
            {
                "commits": report.commits,
                "blocks": report.blocks,
                "before_bytes": report.before_bytes,
                "after_bytes": report.after_bytes,
                "seconds": round(report.seconds, 3),
            }
        )
    elif not report.blocks:
        click.echo("everything is stored so already")
    else:
        click.echo(
            f"repacked {plural(report.blocks, 'block')}: {human_bytes(report.before_bytes)} "
            f"became {human_bytes(report.after_bytes)}; {human_seconds(report.seconds)}"
        )
