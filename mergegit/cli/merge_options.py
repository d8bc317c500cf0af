"""The options that `plan` and `merge` share, and the recipe that they make."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from mergegit.repository import Repository

if TYPE_CHECKING:
    from mergegit.merge.recipe import Recipe

_F = TypeVar("_F", bound=Callable[..., Any])

_DTYPES = {
    "float64": "F64", "fp64": "F64", "f64": "F64", "float32": "F32", "fp32": "F32", "f32": "F32",
    "float16": "F16", "fp16": "F16", "f16": "F16", "bfloat16": "BF16", "bf16": "BF16",
    "float8_e4m3fn": "F8_E4M3", "f8_e4m3": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "f8_e5m2": "F8_E5M2",
}  # fmt: skip


class _Assignment(click.ParamType[Any]):
    """``KEY=VALUE`` or ``EXPERT.KEY=VALUE``, the value a number, true or false."""

    name = "KEY=VALUE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        key, equals, text = str(value).partition("=")
        if not equals or not key:
            self.fail(f"{value!r} is not of the form KEY=VALUE", param, ctx)
        if text.lower() in ("true", "false"):
            return key, text.lower() == "true"
        try:
            return key, float(text)
        except ValueError:
            self.fail(f"{text!r} is not a number, true or false", param, ctx)


class _DType(click.ParamType[Any]):
    """A dtype as torch or safetensors calls it."""

    name = "DTYPE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        text = str(value)
        found = _DTYPES.get(text.lower(), text if text in _DTYPES.values() else None)
        if found is None:
            self.fail(f"{text!r} is not one of {', '.join(_DTYPES)}", param, ctx)
        return found


def merge_options(function: _F) -> _F:
    """The experts and everything that makes a recipe."""
    decorators = (
        click.argument("experts", nargs=-1),
        click.option("--base", metavar="REF", help="By default the experts' merge base."),
        click.option(
            "--method", default="task_arithmetic", show_default=True,
            help="How to merge; `mergegit methods` lists them.",
        ),
        click.option(
            "-p", "parameters", multiple=True, type=_Assignment(),
            help="A parameter for all, or EXPERT.KEY=VALUE for one expert. Repeatable.",
        ),
        click.option(
            "--budget", metavar="BUDGET",
            help="The most expert bytes to read: 10%, 2GiB, 500MB, 0. By default everything.",
        ),
        click.option("--seed", type=int, default=0, show_default=True, help="For random methods."),
        click.option("--dtype", type=_DType(), help="Output dtype; by default the base's."),
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
