"""`mergegit replay`."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any

import click

from mergegit.cli.common import (
    complete_ref,
    json_option,
    open_repository,
    print_json,
    threads_option,
)
from mergegit.cli.plan_text import print_table
from mergegit.cli.progress import progress_bar
from mergegit.cli.text import error_number, human_bytes, human_seconds, plural, printable
from mergegit.repository.naming import short

if TYPE_CHECKING:
    from mergegit.repository.replaying import DistanceReport, ReplayReport

_ROWS = 20


@click.command("replay")
@click.argument("ref", metavar="COMMIT", shell_complete=complete_ref)
@click.option(
    "--budget",
    metavar="BUDGET",
    help="Tell how far the merge is from the same one at this budget; 100% reads everything.",
)
@click.option(
    "--all", "everything", is_flag=True, help=f"List all tensors, not the first {_ROWS} alone."
)
@threads_option
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    ref: str,
    budget: str | None,
    everything: bool,
    threads: int | None,
    as_json: bool,
) -> None:
    """Merge COMMIT again from its parents, and compare. Nothing is written.

    The plan of the merge is carried out again, and what earlier merges made is not taken for it.
    Exits 1 where the contents are not the same, bit for bit, and tells which tensors differ.

    With --budget the plan is made again at that budget, and the relative error of what was merged
    is told, of the whole and of each tensor, the worst first: |merged - that| / |that - base|.

    \b
    Examples:
      mergegit replay llama-math+llama-code
      mergegit replay llama-math+llama-code --budget 100%
    """
    repository = open_repository(ctx, threads=threads)
    limit = None if everything else _ROWS
    with progress_bar() as progress:
        if budget is None:
            replayed = repository.replay(ref, progress=progress)
        else:
            distance = repository.distance(ref, budget=budget, progress=progress)
    if budget is not None:
        print_json(_distance_json(distance)) if as_json else _print_distance(ref, distance, limit)
        return
    print_json(replay_json(replayed)) if as_json else _print_replay(ref, replayed, limit)
    sys.exit(0 if replayed.is_same else 1)


def replay_json(report: ReplayReport) -> dict[str, Any]:
    return {
        "commit": report.commit.hex(),
        "plan": report.plan.hex(),
        "method": report.method,
        "same": report.is_same,
        "manifest": report.manifest.hex(),
        "replayed": report.replayed.hex(),
        "tensors": [
            {"name": tensor.name, "blocks": tensor.blocks, "error": _finite(tensor.error)}
            for tensor in report.tensors
        ],
        "files": list(report.files),
        "stored_otherwise": report.is_refitted,
        "portable": report.is_portable,
        "elsewhere": list(report.elsewhere),
        "read_bytes": report.read_bytes,
        "base_read_bytes": report.base_read_bytes,
        "seconds": round(report.seconds, 3),
    }


def _distance_json(report: DistanceReport) -> dict[str, Any]:
    return {
        "commit": report.commit.hex(),
        "plan": report.plan.hex(),
        "budget": report.budget,
        "budget_bytes": report.budget_bytes,
        "planned_bytes": report.planned_bytes,
        "own_planned_bytes": report.own_planned_bytes,
        "predicted_error": report.predicted_error,
        "error": _finite(report.error),
        "tensors": [
            {
                "name": tensor.name,
                "error": _finite(tensor.error),
                "difference": tensor.difference,
                "norm": tensor.norm,
                "blocks": tensor.blocks,
            }
            for tensor in report.tensors
        ],
        "read_bytes": report.read_bytes,
        "base_read_bytes": report.base_read_bytes,
        "seconds": round(report.seconds, 3),
    }


def _finite(value: float | None) -> float | None:
    """JSON has no infinity."""
    return None if value is None or math.isinf(value) else value


def _error(value: float | None) -> str:
    if value is None:
        return ""
    return "all of it" if math.isinf(value) else f"{value:.3g}"


def _print_replay(ref: str, report: ReplayReport, limit: int | None) -> None:
    commit = click.style(short(report.commit), fg="yellow")
    if report.is_same:
        click.echo(
            f"{ref} {commit}: the same, bit for bit "
            f"(manifest {short(report.manifest)}, {report.method})"
        )
    else:
        what = [plural(len(report.tensors), "tensor")] if report.tensors else []
        what += [plural(len(report.files), "file")] if report.files else []
        differ = "differs" if len(report.tensors) + len(report.files) == 1 else "differ"
        click.echo(
            f"{ref} {commit}: {click.style('not the same', fg='red')}: "
            f"{' and '.join(what)} {differ}"
        )
        rows = [
            [printable(tensor.name), f"{tensor.blocks:,}", _error(tensor.error)]
            for tensor in report.tensors[:limit]
        ]
        if rows:
            print_table(["tensor", "blocks", "error"], rows)
        _print_more(len(report.tensors), len(rows))
        for path in report.files[:limit]:
            click.echo(f"  file {printable(path)}")
        if not report.is_portable:
            click.echo(
                f"  {report.method} works on whole matrices: it has the same bits only on the same "
                "machine, with the same libraries"
            )
        for fact in report.elsewhere:
            click.echo(f"  it was merged with {printable(fact)}")
    if report.is_refitted:
        click.echo("  its experts are stored in another form by now; the same was read of them")
    click.echo(
        f"  read {human_bytes(report.read_bytes)} of experts and "
        f"{human_bytes(report.base_read_bytes)} of the base; {human_seconds(report.seconds)}"
    )


def _print_distance(ref: str, report: DistanceReport, limit: int | None) -> None:
    commit = click.style(short(report.commit), fg="yellow")
    click.echo(
        f"{ref} {commit} beside the same merge at {report.budget}: relative error of the merged "
        f"delta {_error(report.error)}; its plan predicted {error_number(report.predicted_error)} "
        "against a full read"
    )
    total = sum(tensor.difference**2 for tensor in report.tensors)
    rows = [
        [
            printable(tensor.name),
            _error(tensor.error),
            f"{tensor.difference**2 / total:.1%}" if total else "",
            f"{tensor.blocks:,}",
        ]
        for tensor in report.tensors[:limit]
        if tensor.blocks
    ]
    if rows:
        print_table(["tensor", "error", "of all error", "blocks"], rows)
    _print_more(sum(tensor.blocks > 0 for tensor in report.tensors), len(rows))
    click.echo(
        f"  it knows {human_bytes(report.own_planned_bytes)} of its experts, the other "
        f"{human_bytes(report.planned_bytes)}; {human_seconds(report.seconds)}"
    )


def _print_more(count: int, shown: int) -> None:
    if shown < count:
        click.echo(f"  ... and {plural(count - shown, 'more tensor')}; see --all")
