"""`mergegit checkout`."""

from __future__ import annotations

from pathlib import Path

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
from mergegit.cli.text import human_bytes, human_seconds, plural, printable


@click.command("checkout")
@click.argument("ref", shell_complete=complete_ref)
@click.argument("directory", type=click.Path(path_type=Path))
@click.option(
    "--merged", is_flag=True, help="Of an adapter: write its base with the adapter merged in."
)
@click.option(
    "--update",
    is_flag=True,
    help="DIRECTORY holds another checkout: rewrite the files that differ, each as a whole.",
)
@click.option(
    "--dtype",
    metavar="DTYPE",
    help="Convert floating tensors, to float16 for example; by default they stay as they are.",
)
@click.option(
    "--shard-size",
    metavar="SIZE",
    help="Lay the tensors out anew, with at most this much in a file: 5GB, 500MiB.",
)
@threads_option
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    ref: str,
    directory: Path,
    merged: bool,
    update: bool,
    dtype: str | None,
    shard_size: str | None,
    threads: int | None,
    as_json: bool,
) -> None:
    """Write the files of REF into DIRECTORY, which must not exist or be empty.

    The directory appears whole or not at all. A checkpoint that was added comes back byte for
    byte; a merged one can be loaded or uploaded as it stands. With another dtype or shard size the
    config and the index follow, and weights in other files beside the model are left out.

    With --update only files that differ are rewritten. Weights in DIRECTORY that the commit has not
    are removed where the repository has them; if it has not, nothing is changed.

    An adapter comes back as an adapter or, with --merged, as a model: its base's files, with the
    adapter merged into the weights, which are rounded once to the base's dtypes.

    \b
    Examples:
      mergegit checkout llama-math+llama-code ./merged
      mergegit checkout llama-math ./math-half --dtype float16 --shard-size 2GB
      mergegit checkout llama-chat-lora ./llama-chat --merged
    """
    repository = open_repository(ctx, threads=threads)
    with progress_bar() as progress:
        report = repository.checkout(
            ref,
            directory,
            merged=merged,
            update=update,
            dtype=dtype,
            shard_size=shard_size,
            progress=progress,
        )
    if as_json:
        print_json(
            {
                "commit": report.commit.hex(),
                "directory": str(directory),
                "files": report.files,
                "unchanged": report.unchanged,
                "bytes": report.nbytes,
                "seconds": round(report.seconds, 3),
                "notes": list(report.notes),
            }
        )
        return
    print_notes(report.notes)
    click.echo(
        f"{ref} written to {printable(str(directory))}: {plural(report.files, 'file')}, "
        f"{human_bytes(report.nbytes)}, {human_seconds(report.seconds)}"
        + (f"; {report.unchanged} unchanged" if update else "")
    )
