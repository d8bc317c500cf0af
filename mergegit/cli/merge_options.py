"""The options that `plan` and `merge` share, and the recipe that they make."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from mergegit.cli.common import complete_ref
from mergegit.repository import Repository

if TYPE_CHECKING:
    from mergegit.merge.recipe import Recipe

_F = TypeVar("_F", bound=Callable[..., Any])

_DTYPES: Final = {
    "float64": "F64", "fp64": "F64", "f64": "F64", "float32": "F32", "fp32": "F32", "f32": "F32",
    "float16": "F16", "fp16": "F16", "f16": "F16", "bfloat16": "BF16", "bf16": "BF16",
    "float8_e4m3fn": "F8_E4M3", "f8_e4m3": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "f8_e5m2": "F8_E5M2",
}  # fmt: skip
"""dtypes as torch, mergekit and safetensors call them."""


def _assignments(
    _ctx: click.Context, param: click.Parameter, values: Sequence[str]
) -> list[tuple[str, float | bool]]:
    """``KEY=VALUE`` or ``EXPERT.KEY=VALUE``, the value a number, true or false."""
    assignments = [_assignment(value, param) for value in values]
    keys = [key for key, _ in assignments]
    for key in keys:
        if keys.count(key) > 1:
            raise click.BadParameter(f"{key} is given more than once", param=param)
    return assignments


def _assignment(value: str, param: click.Parameter) -> tuple[str, float | bool]:
    key, equals, text = value.partition("=")
    if not equals or not key:
        raise click.BadParameter(f"{value!r} is not of the form KEY=VALUE", param=param)
    if text.lower() in ("true", "false"):
        return key, text.lower() == "true"
    try:
        return key, float(text)
    except ValueError:
        raise click.BadParameter(
            f"{key} is {text!r}, not a number, true or false", param=param
        ) from None


def _dtype(_ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    if value is None:
        return None
    try:
        return _DTYPES[value.lower()]
    except KeyError:
        raise click.BadParameter(
            f"{value!r} is not one of float32, bfloat16, float16, float64, float8_e4m3fn, "
            "float8_e5m2",
            param=param,
        ) from None


def _complete_method(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    from mergegit.merge.methods import METHODS

    return [name for name in METHODS if name.startswith(incomplete)]


def merge_options(function: _F) -> _F:
    """The experts and everything that makes a recipe."""
    decorators = (
        click.argument(
            "experts", nargs=-1, metavar="EXPERT...", shell_complete=complete_ref
        ),
        click.option(
            "--base", metavar="REF", shell_complete=complete_ref,
            help="The commit that deltas are taken against; by default the experts' merge base.",
        ),
        click.option(
            "--method", metavar="METHOD", default="task_arithmetic", show_default=True,
            shell_complete=_complete_method, help="How to merge; `mergegit methods` lists them.",
        ),
        click.option(
            "-p", "parameters", multiple=True, metavar="KEY=VALUE", callback=_assignments,
            help="A parameter for all experts, or EXPERT.KEY=VALUE for one. Repeatable.",
        ),
        click.option(
            "--budget", metavar="BUDGET",
            help="The most expert bytes to read: 10%, 2GiB, 500MB, 0. By default everything.",
        ),
        click.option(
            "--seed", type=int, metavar="N", default=0, show_default=True,
            help="For methods that draw at random.",
        ),
        click.option(
            "--dtype", metavar="DTYPE", callback=_dtype,
            help="The merged model's dtype, like float16; by default the base's.",
        ),
        click.option(
            "--ignore-extra", is_flag=True, help="Leave out tensors that the base lacks."
        ),
        click.option(
            "--allow-nonfinite", is_flag=True, help="Merge experts with NaN or infinity in them."
        ),
    )  # fmt: skip
    for decorator in reversed(decorators):
        function = decorator(function)
    return function


def make_recipe(
    repository: Repository,
    experts: Sequence[str],
    base: str | None,
    method: str,
    parameters: Sequence[tuple[str, float | bool]],
    seed: int,
    dtype: str | None,
    ignore_extra: bool,
    allow_nonfinite: bool,
) -> Recipe:
    return repository.recipe(
        experts,
        base=base,
        method=method,
        parameters=dict(parameters),
        seed=seed,
        dtype=dtype,
        ignore_extra=ignore_extra,
        allow_nonfinite=allow_nonfinite,
    )
