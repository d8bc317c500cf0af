"""`mergegit methods`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from mergegit.cli.common import json_option, print_json

if TYPE_CHECKING:
    from mergegit.merge.method import Method, Parameter


@click.command("methods")
@json_option
def command(as_json: bool) -> None:
    """List the methods by which experts are merged, with their parameters."""
    from mergegit.merge.methods import METHODS

    if as_json:
        print_json([_facts(method) for method in METHODS.values()])
        return
    for method in METHODS.values():
        click.echo(f"{click.style(method.name, bold=True)}: {method.summary}")
        click.echo(click.style(f"  {method.paper}", dim=True))
        click.echo(f"  merges {_count(method)}: {method.merges.value}")
        click.echo(f"  needs {method.needs.value}")
        for parameter in method.parameters:
            click.echo(f"  {_parameter(parameter)}")


def _facts(method: Method) -> dict[str, Any]:
    return {
        "name": method.name,
        "summary": method.summary,
        "paper": method.paper,
        "additive": method.additive,
        "needs": method.needs.name.lower(),
        "merges": method.merges.name.lower(),
        "models": list(method.models),
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


def _count(method: Method) -> str:
    low, high = method.models
    if high is None:
        return f"{low} or more"
    return f"{low}" if low == high else f"{low} to {high}"


def _parameter(parameter: Parameter) -> str:
    given = parameter.default is not None
    default = str(parameter.default).lower() if given else "..."
    notes = "" if given else "; required"
    notes += "; each expert may have its own" if parameter.per_expert else ""
    return f"-p {parameter.name}={default}  {parameter.help}{notes}"
