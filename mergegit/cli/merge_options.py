"""The options that `plan` and `merge` share, and the recipe that they make."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from mergegit.cli.common import complete_ref
from mergegit.dtypes import dtype_named
from mergegit.repository import Repository
from mergegit.repository.repository import Progress

if TYPE_CHECKING:
    from mergegit.merge.mergekit_yaml import Document
    from mergegit.merge.recipe import Recipe

_F = TypeVar("_F", bound=Callable[..., Any])


def _assignments(
    _ctx: click.Context, param: click.Parameter, values: Sequence[str]
) -> list[tuple[str, Any]]:
    """``KEY=VALUE`` or ``EXPERT.KEY=VALUE``, the value a number, true, false or a gradient."""
    assignments = [_assignment(value, param) for value in values]
    keys = [key for key, _ in assignments]
    for key in keys:
        if keys.count(key) > 1:
            raise click.BadParameter(f"{key} is given more than once", param=param)
    return assignments


def _assignment(value: str, param: click.Parameter) -> tuple[str, Any]:
    key, equals, text = value.partition("=")
    if not equals or not key:
        raise click.BadParameter(f"{value!r} is not of the form KEY=VALUE", param=param)
    if text.lower() in ("true", "false"):
        return key, text.lower() == "true"
    try:
        if text.startswith("[") and text.endswith("]"):
            return key, [float(point) for point in text[1:-1].split(",")]
        return key, float(text)
    except ValueError:
        raise click.BadParameter(
            f"{key} is {text!r}, not a number, true, false or a gradient like [0,0.5,1]",
            param=param,
        ) from None


def _dtype(_ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    if value is None:
        return None
    try:
        return dtype_named(value)
    except ValueError as error:
        raise click.BadParameter(str(error), param=param) from None


def complete_method(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    from mergegit.merge.methods import METHODS

    return [name for name in METHODS if name.startswith(incomplete)]


def _complete_source(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    words = [word for word in ("base", "union") if word.startswith(incomplete)]
    return list(dict.fromkeys([*words, *complete_ref(ctx, param, incomplete)]))


def _complete_template(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    from mergegit.checkpoint.chat_template import AUTO, TEMPLATES

    return [name for name in (AUTO, *TEMPLATES) if name.startswith(incomplete)]


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
            shell_complete=complete_method, help="How to merge; `mergegit methods` lists them.",
        ),
        click.option(
            "-p", "parameters", multiple=True, metavar="KEY=VALUE", callback=_assignments,
            help="A parameter for all experts, or EXPERT.KEY=VALUE for one; a list like [0,0.5,1] "
            "is a gradient over the layers. Repeatable.",
        ),
        click.option(
            "-c", "--config", "recipe_file", metavar="FILE.yml",
            type=click.Path(exists=True, dir_okay=False, allow_dash=True),
            help="A recipe in mergekit's YAML, in place of experts and their options; - reads it "
            "from standard input.",
        ),
        click.option(
            "--budget", metavar="BUDGET",
            help="The most expert bytes to read: 10%, 2GiB, 500MB, 0. By default everything.",
        ),
        click.option(
            "--anew", is_flag=True,
            help="Merge everything again, though earlier merges made the same.",
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
            "--tokenizer-source", metavar="base|union|EXPERT", shell_complete=_complete_source,
            help="The vocabulary of the merged model, where the experts' differ: the base's, the "
            "base's with all tokens of the others behind it, or an expert's.",
        ),
        click.option(
            "--chat-template", metavar="TEMPLATE", shell_complete=_complete_template,
            help="How it writes conversations: auto (as most of the models do), a name such as "
            "chatml or llama3, or a template in Jinja.",
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


RECIPE_OPTIONS: Final = (
    "base", "method", "parameters", "seed", "dtype", "ignore_extra", "allow_nonfinite",
    "tokenizer_source", "chat_template",
)  # fmt: skip
"""Options that a recipe file, or a plan, says in their place."""


def refuse_given(ctx: click.Context, options: Sequence[str], instead: str) -> None:
    """A usage error where one of ``options`` is given beside what says it all already."""
    source = click.core.ParameterSource.COMMANDLINE
    for param in ctx.command.params:
        if param.name in options and ctx.get_parameter_source(param.name) == source:
            raise click.UsageError(f"{instead} says it all; {param.opts[0]} can't change it.")


def read_recipe_file(path: str) -> tuple[list[Document], str]:
    """The recipes of a file, each after those that it needs, and the file's text.

    Raises ``BadRecipe``.
    """
    from mergegit.errors import BadRecipe
    from mergegit.merge.mergekit_yaml import read_documents
    from mergegit.repository.recipes import check_words, in_order

    with click.open_file(path, "rb") as file:
        data = file.read()
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise BadRecipe(f"{path} is not text", hint="give a recipe in YAML") from error
    documents = in_order(read_documents(text))
    for document in documents:
        check_words(document)
    return documents, text


_MARKER: Final = re.compile(r"^---(?=\s|$)", re.MULTILINE)


def own_texts(text: str) -> dict[str, str]:
    """The part of a recipe file that each recipe with a name was read from."""
    from mergegit.errors import BadRecipe
    from mergegit.merge.mergekit_yaml import read_documents

    cuts = [0, *(marker.start() for marker in _MARKER.finditer(text)), len(text)]
    texts = {}
    for start, end in itertools.pairwise(cuts):
        try:
            (document,) = read_documents(text[start:end])
        except BadRecipe:
            continue  # what stands before the first recipe
        if document.name is not None:
            texts[document.name] = text[start:end]
    return texts


def last_recipe(
    repository: Repository, documents: Sequence[Document], text: str, progress: Progress
) -> Recipe:
    """The last recipe of a file whose others are merged already. Raises ``BadRecipe``."""
    from mergegit.errors import BadRecipe, UnknownRef
    from mergegit.repository.recipes import models_of

    before = {document.name for document in documents[:-1]}
    for name in models_of(documents[-1]):
        if name in before:
            try:
                repository.resolve(name)
            except UnknownRef as error:
                raise BadRecipe(
                    f"the last recipe needs {name}, which is not merged yet",
                    hint=f"merge the recipe {name} by itself first, or the whole file",
                ) from error
    return repository.recipe_of(documents[-1], given=text, progress=progress)


def make_recipe(
    repository: Repository,
    experts: Sequence[str],
    base: str | None,
    method: str,
    parameters: Sequence[tuple[str, Any]],
    seed: int,
    dtype: str | None,
    ignore_extra: bool,
    allow_nonfinite: bool,
    tokenizer_source: str | None,
    chat_template: str | None,
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
        tokenizer_source=tokenizer_source,
        chat_template=chat_template,
    )
