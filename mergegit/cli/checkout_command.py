"""`mergegit checkout`."""

from __future__ import annotations

from pathlib import Path

import click

from mergegit.cli.common import (
    complete_ref,
    json_option,
    open_repository,
    print_json,
    threads_option,
)
from mergegit.cli.progress import progress_bar
from mergegit.cli.text import human_bytes, human_seconds, plural, printable


@click.command("checkout")
@click.argument("ref", shell_complete=complete_ref)
@click.argument("directory", type=click.Path(path_type=Path))
@threads_option
@json_option
@click.pass_context
def command(
    ctx: click.Context, ref: str, directory: Path, threads: int | None, as_json: bool
) -> None:
    """Write the files of REF into DIRECTORY, which must not exist or be empty.

    The directory appears whole or not at all. A checkpoint that was added comes back byte for
    byte; a merged one can be loaded or uploaded as it stands.

    \b
    Example:
      mergegit checkout llama-math+llama-code ./merged
    """
    repository = open_repository(ctx, threads=threads)
    with progress_bar() as progress:
        report = repository.checkout(ref, directory, progress=progress)
    if as_json:
        print_json(
            {
                "commit": report.commit.hex(),
                "directory": str(directory),
                "files": report.files,
                "bytes": report.nbytes,
                "seconds": round(report.seconds, 3),
            }
        )
        return
    click.echo(
        f"{ref} written to {printable(str(directory))}: {plural(report.files, 'file')}, "
        f"{human_bytes(report.nbytes)}, {human_seconds(report.seconds)}"
    )
