"""`mergegit show`."""

from __future__ import annotations

from typing import Any

import click

from mergegit.cli.commit_text import commit_json, full_lines, merge_story, names_by_commit
from mergegit.cli.common import complete_ref, json_option, open_repository, print_json
from mergegit.cli.plan_text import plan_json, print_plan, print_table
from mergegit.cli.text import human_bytes, plural, printable
from mergegit.errors import BadRecipe
from mergegit.objects import Commit, CommitId, Manifest, Plan, PlanId, Tensor
from mergegit.repository import Repository
from mergegit.repository.naming import short
from mergegit.repository.reports import PlanReport

_ROWS = 40


@click.command("show")
@click.argument("text", metavar="OBJECT", shell_complete=complete_ref)
@json_option
@click.option(
    "--all", "everything", is_flag=True, help=f"List all rows, not the first {_ROWS} alone."
)
@click.option(
    "--recipe",
    "recipe",
    is_flag=True,
    help="Print the recipe of a merge or plan alone, as YAML for `merge -c`.",
)
@click.option(
    "--recipe-given", "given", is_flag=True, help="Print the recipe file as it was given."
)
@click.pass_context
def command(
    ctx: click.Context, text: str, as_json: bool, everything: bool, recipe: bool, given: bool
) -> None:
    """Show a commit, plan, manifest or tensor, by ref, id or the beginning of an id.

    A commit names its manifest and its plan, a manifest its tensors; show those by their ids.
    A merge's recipe is shown as it was understood, in mergekit's YAML, every model pinned to its
    commit and every parameter with its value.
    """
    repository = open_repository(ctx)
    object_id, value = repository.object(text)
    if recipe or given:
        click.echo(_recipe_text(text, value, given), nl=False)
        return
    limit = None if everything else _ROWS
    match value:
        case Commit():
            _show_commit(repository, CommitId(object_id), value, as_json)
        case Plan():
            report = PlanReport(PlanId(object_id), value, None)
            print_json(plan_json(report)) if as_json else print_plan(report)
        case Manifest():
            if as_json:
                print_json(_manifest_json(repository, object_id, value))
            else:
                _show_manifest(repository, object_id, value, limit)
        case Tensor():
            if as_json:
                print_json(_tensor_json(object_id, value))
            else:
                _show_tensor(object_id, value, limit)


def _show_commit(
    repository: Repository, commit_id: CommitId, commit: Commit, as_json: bool
) -> None:
    names = names_by_commit(repository)
    if as_json:
        print_json(commit_json(commit_id, commit, names.get(commit_id, ())))
        return
    click.echo("\n".join(full_lines(commit_id, commit, names)))
    click.echo()
    if commit.recipe is not None:
        click.echo("recipe:")
        for line in _recipe_yaml(commit).splitlines():
            click.echo(f"  {printable(line)}")
    manifest = repository.store.manifest(commit.manifest)
    total = sum(repository.tensor(tensor_id).nbytes for tensor_id in manifest.tensors.values())
    click.echo(
        f"manifest {click.style(short(commit.manifest), fg='yellow')}: "
        f"{plural(len(manifest.tensors), 'tensor')}, {human_bytes(total)}, "
        f"in {plural(len(manifest.shards), 'safetensors file')}, "
        f"beside {plural(len(manifest.files), 'other file')}"
    )
    if commit.plan is not None:
        plan = repository.store.plan(commit.plan)
        if commit.execution is not None:
            click.echo("\n".join(merge_story(plan, commit.execution)))
        print_plan(PlanReport(commit.plan, plan, None))


def _recipe_text(text: str, value: object, given: bool) -> str:
    """The recipe of a merge or a plan as YAML. Raises ``BadRecipe`` where there is none."""
    if not isinstance(value, Commit | Plan) or value.recipe is None:
        raise BadRecipe(f"{text} is no merge", hint="`mergegit log` shows which commits are merges")
    if not given:
        return _recipe_yaml(value)
    if "given" not in value.recipe:
        raise BadRecipe(
            f"{text} was not made from a recipe file",
            hint="print its recipe as it was understood with --recipe",
        )
    return str(value.recipe["given"])


def _recipe_yaml(value: Commit | Plan) -> str:
    """The recipe of a merge or a plan as it was understood, in mergekit's YAML."""
    if isinstance(value, Commit) and value.execution and "recipe" in value.execution:
        return str(value.execution["recipe"])
    from mergegit.merge.mergekit_yaml import write_documents
    from mergegit.merge.recipe import Recipe
    from mergegit.repository.recipes import document_of

    assert value.recipe is not None
    return write_documents([document_of(Recipe.from_json(value.recipe))])


def _show_manifest(
    repository: Repository, object_id: bytes, manifest: Manifest, limit: int | None
) -> None:
    click.echo(f"manifest {click.style(object_id.hex(), fg='yellow')}")
    rows = []
    for name, tensor_id in manifest.tensors.items():
        tensor = repository.tensor(tensor_id)
        shape = "x".join(map(str, tensor.shape)) or "scalar"
        size = human_bytes(tensor.nbytes)
        rows.append([printable(name), tensor.dtype, shape, size, short(tensor_id)])
    _print_rows(["tensor", "dtype", "shape", "bytes", "id"], rows, limit)
    for shard in manifest.shards:
        click.echo(f"  {printable(shard.path)}: {plural(len(shard.names), 'tensor')}")
    for path, tensor_id in manifest.files.items():
        click.echo(f"  {printable(path)}: {human_bytes(repository.tensor(tensor_id).nbytes)}")


def _show_tensor(object_id: bytes, tensor: Tensor, limit: int | None) -> None:
    click.echo(f"tensor {click.style(object_id.hex(), fg='yellow')}")
    click.echo(f"  {tensor.dtype} {list(tensor.shape)}, {human_bytes(tensor.nbytes)}")
    rows = [
        [str(index), human_bytes(tensor.block_nbytes(index)), block.hex()]
        for index, block in enumerate(tensor.blocks())
    ]
    _print_rows(["block", "bytes", "id"], rows, limit)


def _print_rows(head: list[str], rows: list[list[str]], limit: int | None) -> None:
    shown = rows[:limit]
    print_table(head, shown, left=(0, len(head) - 1))
    if len(shown) < len(rows):
        click.echo(f"  ... and {len(rows) - len(shown)} more; see --all")


def _manifest_json(repository: Repository, object_id: bytes, manifest: Manifest) -> dict[str, Any]:
    return {
        "manifest": object_id.hex(),
        "tensors": {
            name: _tensor_json(tensor_id, repository.tensor(tensor_id), blocks=False)
            for name, tensor_id in manifest.tensors.items()
        },
        "shards": [{"path": shard.path, "tensors": list(shard.names)} for shard in manifest.shards],
        "files": {
            path: repository.tensor(tensor_id).nbytes for path, tensor_id in manifest.files.items()
        },
    }


def _tensor_json(object_id: bytes, tensor: Tensor, *, blocks: bool = True) -> dict[str, Any]:
    value: dict[str, Any] = {
        "tensor": object_id.hex(),
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "bytes": tensor.nbytes,
    }
    if blocks:
        value["blocks"] = [block.hex() for block in tensor.blocks()]
    return value
