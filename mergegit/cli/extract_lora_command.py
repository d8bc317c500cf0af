"""`mergegit extract-lora`."""

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
from mergegit.cli.text import error_number, human_bytes, human_seconds, plural, printable


@click.command("extract-lora")
@click.argument("expert", shell_complete=complete_ref)
@click.argument("directory", type=click.Path(path_type=Path))
@click.option(
    "--rank", type=click.IntRange(min=1), required=True, metavar="R",
    help="The rank of every matrix's change.",
)  # fmt: skip
@click.option(
    "--base",
    metavar="REF",
    shell_complete=complete_ref,
    help="What the expert was trained from; by default its first parent.",
)
@click.option(
    "--dtype", metavar="DTYPE", help="The dtype of the factors; by default the expert's own."
)
@threads_option
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    expert: str,
    directory: Path,
    rank: int,
    base: str | None,
    dtype: str | None,
    threads: int | None,
    as_json: bool,
) -> None:
    """Write what EXPERT changed of its base into DIRECTORY, as a LoRA adapter for PEFT.

    Every matrix that has changed becomes two factors of rank R, the best that there are by a
    truncated singular value decomposition. What is no matrix but has changed, as norms and
    embeddings, is saved whole. How far the factors are off is stated beside: |delta - adapter| /
    |delta|, 0 where nothing is lost.

    \b
    Examples:
      mergegit extract-lora llama-math ./math-lora --rank 32
      mergegit extract-lora merged ./merged-lora --rank 64 --base llama --dtype bfloat16
    """
    repository = open_repository(ctx, threads=threads)
    with progress_bar() as progress:
        report = repository.extract_lora(
            expert, directory, rank=rank, base=base, dtype=dtype, progress=progress
        )
    if as_json:
        print_json(
            {
                "commit": report.commit.hex(),
                "base": report.base.hex(),
                "base_ref": report.base_ref,
                "directory": str(directory),
                "rank": report.rank,
                "matrices": report.matrices,
                "whole": report.whole,
                "bytes": report.nbytes,
                "error": report.error,
                "kinds": [
                    {
                        "kind": kind.kind,
                        "count": kind.count,
                        "median": kind.median,
                        "worst": kind.worst,
                    }
                    for kind in report.kinds
                ],
                "seconds": round(report.seconds, 3),
            }
        )
        return
    matrices = "matrix" if report.matrices == 1 else "matrices"
    whole = f", {plural(report.whole, 'tensor')} whole" if report.whole else ""
    click.echo(
        f"what {expert} changed of {report.base_ref} written to {printable(str(directory))}: "
        f"{report.matrices:,} {matrices} of rank {report.rank}{whole}; "
        f"{human_bytes(report.nbytes)}, {human_seconds(report.seconds)}"
    )
    click.echo(f"relative error of the whole change: {error_number(report.error)}")
    width = max(len("matrices"), *(len(kind.kind) for kind in report.kinds))
    click.echo(f"  {'matrices':<{width}}  count   median    worst")
    for kind in report.kinds:
        click.echo(
            f"  {printable(kind.kind):<{width}}  {kind.count:>5}  {error_number(kind.median):>7}  "
            f"{error_number(kind.worst):>7}"
        )
