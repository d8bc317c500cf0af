"""`mergegit add`."""

from __future__ import annotations

from pathlib import Path

import click

from mergegit.cli.common import (
    complete_ref,
    encoding_option,
    json_option,
    message_option,
    open_repository,
    print_json,
    print_notes,
    threads_option,
)
from mergegit.cli.progress import progress_bar
from mergegit.cli.text import human_bytes, human_seconds, percent, plural
from mergegit.errors import InvalidName
from mergegit.repository.naming import short
from mergegit.repository.repository import BlockEncoding


@click.command("add")
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option("--name", metavar="NAME", help="The branch; by default called as the checkpoint.")
@click.option(
    "--base",
    metavar="REF",
    shell_complete=complete_ref,
    help="The commit that the checkpoint was trained from.",
)
@click.option("--no-base", is_flag=True, help="Add it as a base of its own.")
@message_option
@encoding_option("delta")
@threads_option
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    checkpoint: Path,
    name: str | None,
    base: str | None,
    no_base: bool,
    message: str | None,
    encoding: BlockEncoding,
    threads: int | None,
    as_json: bool,
) -> None:
    """Store CHECKPOINT as a commit.

    CHECKPOINT is a directory as Hugging Face tools write it, or one safetensors file. The commit
    goes on a branch of its name, with its base as parent: by default the one in the repository
    that has the same tensor names and shapes. Blocks that are there already are not stored again.

    PyTorch files (pytorch_model.bin) are read without running what they hold, where there are no
    safetensors, and kept as safetensors.

    A LoRA adapter, as PEFT saves it, is stored as it is, on the base that its config names or
    --base. It is merged like any other expert: as its base with the adapter on it.

    \b
    Examples:
      mergegit add ./llama-3-8b
      mergegit add ./llama-3-8b-math --base llama-3-8b
      mergegit add ./llama-3-8b-chat-lora
    """
    if base is not None and no_base:
        raise click.UsageError("--base and --no-base exclude each other.")
    repository = open_repository(ctx, writes=True, threads=threads)
    with progress_bar() as progress:
        try:
            report = repository.add(
                checkpoint,
                name=name,
                base=base,
                no_base=no_base,
                message=message,
                encoding=encoding,
                progress=progress,
            )
        except InvalidName as error:
            if name is None:
                raise InvalidName(error.message, hint="name it yourself with --name") from error
            raise
    if as_json:
        print_json(
            {
                "commit": report.commit.hex(),
                "branch": report.branch,
                "is_new": report.is_new,
                "is_adapter": report.is_adapter,
                "base": report.base.hex() if report.base else None,
                "base_ref": report.base_ref,
                "tensors": report.tensors,
                "total_bytes": report.total_bytes,
                "new_bytes": report.new_bytes,
                "blocks": report.blocks,
                "new_blocks": report.new_blocks,
                "seconds": round(report.seconds, 3),
                "notes": list(report.notes),
            }
        )
        return
    print_notes(report.notes)
    branch = click.style(report.branch, bold=True)
    commit = click.style(short(report.commit), fg="yellow")
    if not report.is_new:
        rest = "nothing to do"
        if report.new_blocks:
            rest = f"{plural(report.new_blocks, 'block')} that were missing are stored again"
        click.echo(f"{branch} holds this checkpoint already, at {commit}; {rest}")
        return
    on = f"on base {report.base_ref}" if report.base_ref else "as a base"
    on = f"as an adapter {on}" if report.is_adapter else on
    click.echo(f"added {branch} {on}: {commit}")
    click.echo(
        f"  {plural(report.tensors, 'tensor')}, {human_bytes(report.total_bytes)}; "
        f"new {human_bytes(report.new_bytes)} "
        f"({percent(report.new_bytes, report.total_bytes)}) "
        f"in {report.new_blocks:,} of {plural(report.blocks, 'block')}; "
        f"{human_seconds(report.seconds)}"
    )
