"""`mergegit completion`."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def command(ctx: click.Context, shell: str) -> None:
    """Print the completion script of SHELL.

    For bash, write it to a file and source that from ~/.bashrc; for zsh likewise from ~/.zshrc;
    for fish, write it to ~/.config/fish/completions/mergegit.fish.
    """
    completion = get_completion_class(shell)
    assert completion is not None
    root = ctx.find_root().command
    click.echo(completion(root, {}, "mergegit", "_MERGEGIT_COMPLETE").source())
