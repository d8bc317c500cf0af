"""`mergegit methods`."""

from __future__ import annotations

import click

from mergegit.cli.common import json_option, print_json


@click.command("methods")
@json_option
def command(as_json: bool) -> None:
    """List the methods by which experts are merged, with their parameters."""
    from mergegit.merge.methods import METHODS

    if as_json:
        print_json(
            [
                {
                    "name": method.name,
                    "summary": method.summary,
                    "paper": method.paper,
                    "additive": method.additive,
                    "parameters": [
                        {
                            "name": parameter.name,
                            "default": parameter.default,
                            "per_expert": parameter.per_expert,
                            "help": parameter.help,
                        }
                        for parameter in method.parameters
                    ],
                }
                for method in METHODS.values()
            ]
        )
        return
    for method in METHODS.values():
        click.echo(f"{click.style(method.name, bold=True)}: {method.summary}")
        click.echo(click.style(f"  {method.paper}", dim=True))
        for parameter in method.parameters:
            default = str(parameter.default).lower()
            scope = "; each expert may have its own" if parameter.per_expert else ""
            click.echo(f"  -p {parameter.name}={default}  {parameter.help}{scope}")
