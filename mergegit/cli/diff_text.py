"""A diff as people and programs are shown it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Final

import click

from mergegit.cli.figure_text import cosine_text, figure_json, figure_text, number
from mergegit.cli.heat_map import Scale, heat_map
from mergegit.cli.plan_text import print_table
from mergegit.cli.text import human_bytes, percent, plural, printable
from mergegit.objects import Tensor
from mergegit.repository.comparing import (
    DiffReport,
    TensorChange,
    cosine_of,
    norm_of,
    relative_of,
)
from mergegit.repository.figures import total
from mergegit.repository.file_changes import FileChange
from mergegit.repository.naming import ResolvedRef

_NAMED: Final = 8
"""Tensors that were added, removed or reshaped are named up to so many."""
_LONGEST_LINE: Final = 500
_LINE_COLOURS: Final = {"+": "green", "-": "red", "@": "cyan"}


def print_diff(report: DiffReport, *, stat: bool) -> None:
    """What differs: a summary, then a heat map or with ``stat`` a line per tensor; then files."""
    if report.is_same:
        click.echo(f"{report.old.name} and {report.new.name} do not differ")
        return
    if report.tensors:
        _print_summary(report)
        changed = report.with_status("changed")
        if stat:
            _print_tensors(report)
        elif changed:
            _print_map(report)
        unknown = [change for change in changed if change.has_numbers and change.norm is None]
        if unknown:
            nbytes = sum(_changed_bytes(change) for change in unknown)
            click.echo(
                f"  ?: no statistics tell of {plural(len(unknown), 'tensor')}; "
                f"--exact reads what differs, {human_bytes(nbytes)} of blocks on each side"
            )
    if report.shards[0] != report.shards[1] and report.tensors:
        click.echo(f"  the weights lie in other files: {_shards_text(report)}")
    for file in report.files:
        _print_file(file)


def _shards_text(report: DiffReport) -> str:
    before, now = map(len, report.shards)
    if before == now == 1:
        return " -> ".join(printable(shards[0]) for shards in report.shards)
    return f"{before:,} before, {now:,} now"


def _print_summary(report: DiffReport) -> None:
    common = [change for change in report.tensors if change.is_common]
    changed = report.with_status("changed")
    title = f"{report.old.name}..{report.new.name}"
    blocks = sum(len(change.either) for change in common)
    elements = sum(change.either.elements for change in common)
    counts = f"{sum(change.blocks_changed for change in changed):,} of {blocks:,} blocks"
    moved = _elements_changed(common)
    if moved is not None:
        counts += f", {percent(moved, elements)} of {elements:,} elements"
    click.echo(
        f"{click.style(printable(title), bold=True)}: {len(changed):,} of "
        f"{plural(len(common), 'tensor')} changed ({counts})"
    )
    if changed:
        line = f"  relative norm of the change {_relative_text(common, with_error=True)}"
        largest = _largest(changed)
        if largest is not None:
            line += f", largest in {printable(largest.name)}: {figure_text(largest.relative)}"
        click.echo(line)
        if report.third is not None:
            cosine = figure_text(cosine_of(common), with_error=True)
            click.echo(f"  cosine with the change to {printable(report.third.name)}: {cosine}")
    for status in ("added", "removed", "reshaped"):
        _print_named(status, report.with_status(status))


def _print_named(status: str, changes: Sequence[TensorChange]) -> None:
    if not changes:
        return
    click.echo(f"  {status}: {plural(len(changes), 'tensor')}")
    for change in changes[:_NAMED]:
        click.echo(f"    {printable(change.name)} {_form_text(change)}")
    if len(changes) > _NAMED:
        click.echo(f"    ... and {len(changes) - _NAMED} more; see --stat")


def _form_text(change: TensorChange) -> str:
    forms = [_shape(tensor) for tensor in (change.old, change.new) if tensor is not None]
    dtypes = [tensor.dtype for tensor in (change.old, change.new) if tensor is not None]
    return " ".join((" -> ".join(dict.fromkeys(dtypes)), " -> ".join(dict.fromkeys(forms))))


def _shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "scalar"


def _print_map(report: DiffReport) -> None:
    """Heat maps of every stack of layers, then what lies outside of them."""
    seen = [change for change in report.tensors if change.has_numbers]
    inside = [change for change in seen if change.spot.stack is not None]
    # What lies outside has its number beside it, and may exceed the scale.
    top = _largest_value(inside) or _largest_value(seen)
    if all(_relative_value([change]) is None for change in seen if change.status == "changed"):
        return
    scale = Scale.doubling(top or 1.0)
    stacks = dict.fromkeys(change.spot.stack for change in inside)
    for stack in stacks:
        cells: dict[tuple[str, int], list[TensorChange]] = {}
        for change in (change for change in inside if change.spot.stack == stack):
            assert change.spot.layer is not None
            cells.setdefault((change.spot.short_kind, change.spot.layer), []).append(change)

        def value(kind: str, layers: range, cells: Any = cells) -> float | None:
            here = [change for layer in layers for change in cells.get((kind, layer), ())]
            if not here:
                return math.nan
            return _relative_value(here)

        layers = 1 + max(layer for _, layer in cells)
        click.echo(f"  {printable(stack or '')}N, by layer:")
        kinds = [printable(kind) for kind in dict.fromkeys(kind for kind, _ in cells)]
        for line in heat_map(kinds, layers, value, scale):
            click.echo(line)
    outside = [change for change in seen if change.spot.stack is None and change.status != "same"]
    if outside:
        click.echo("  outside of the layers:" if stacks else "  tensors:")
        width = max(len(printable(change.spot.short_kind)) for change in outside)
        for kind in dict.fromkeys(change.spot.short_kind for change in outside):
            here = [change for change in seen if change.spot.short_kind == kind]
            mark = scale.mark(_relative_value(here))
            click.echo(f"  {printable(kind).ljust(width)}  {mark} {_relative_text(here)}")
    click.echo(f"  relative norm: {scale.legend(number)}")


def _relative_value(changes: Sequence[TensorChange]) -> float | None:
    """What a heat map shows of tensors: what was zero has changed beyond all measure."""
    relative = relative_of(changes)
    if relative is not None:
        return relative.value
    base = total(change.numbers.base_energy for change in changes if change.has_numbers)
    was_zero = base is not None and base.value == 0.0 and norm_of(changes) is not None
    return math.inf if was_zero else None


def _relative_text(changes: Sequence[TensorChange], *, with_error: bool = False) -> str:
    if _relative_value(changes) == math.inf:
        return "from 0"
    return figure_text(relative_of(changes), with_error=with_error)


def _largest_value(changes: Iterable[TensorChange]) -> float:
    relatives = [change.relative for change in changes]
    return max((figure.value for figure in relatives if figure is not None), default=0.0)


def _print_tensors(report: DiffReport) -> None:
    """A line for each tensor that is not the same."""
    head = ["tensor", "form", "relative", "norm", "blocks", "elements"]
    if report.third is not None:
        head.append("cosine")
    rows = []
    for change in report.tensors:
        if change.status == "same":
            continue
        row = [printable(change.name), _form_text(change)]
        if change.status == "changed":
            told = [_relative_text([change]), figure_text(change.norm)]
            row += told if change.has_numbers else ["", ""]
        else:
            row += [change.status, ""]
        row.append(f"{change.blocks_changed:,}/{len(change.either):,}")
        moved = change.elements_changed
        row.append("?" if moved is None else percent(moved, change.either.elements))
        if report.third is not None:
            row.append(cosine_text(change.cosine) if change.is_beside else "")
        rows.append(row)
    print_table(head, rows, left=(0, 1))


def _print_file(file: FileChange) -> None:
    sizes = [human_bytes(size) for size in (file.old_bytes, file.new_bytes) if size is not None]
    path = click.style(printable(file.path), bold=True)
    if file.status != "changed":
        click.echo(f"{path}: {file.status}, {sizes[0]}")
        return
    if file.lines is None:
        word = "binary" if file.is_binary else "too long to compare by lines"
        click.echo(f"{path}: {word}, {' -> '.join(dict.fromkeys(sizes))}")
        return
    if not file.lines:
        click.echo(f"{path}: differs in the ends of its lines")
    for line in file.lines:
        bold = line.startswith(("--- a/", "+++ b/"))
        colour = None if bold else _LINE_COLOURS.get(line[:1])
        click.echo(click.style(_readable(line), fg=colour, bold=bold or None))


def _readable(line: str) -> str:
    """A line with its tabs, other control characters made visible, cut where it is endless."""
    text = "\t".join(map(printable, line[:_LONGEST_LINE].split("\t")))
    if len(line) > _LONGEST_LINE:
        text += f" ... and {len(line) - _LONGEST_LINE:,} characters more"
    return text


def _largest(changes: Iterable[TensorChange]) -> TensorChange | None:
    """The tensor that changed most, of those of which it is known."""
    known = [(change.relative, change) for change in changes if change.has_numbers]
    told = [(relative.value, change) for relative, change in known if relative is not None]
    return max(told, key=lambda pair: pair[0], default=(0.0, None))[1]


def _elements_changed(common: Iterable[TensorChange]) -> int | None:
    counts = [change.elements_changed for change in common]
    return None if None in counts else sum(count or 0 for count in counts)


def _changed_bytes(change: TensorChange) -> int:
    return change.either.nbytes * change.blocks_changed // max(len(change.either), 1)


def diff_json(report: DiffReport) -> dict[str, Any]:
    """The stable keys of a diff."""
    common = [change for change in report.tensors if change.is_common]
    changed = report.with_status("changed")
    return {
        "old": _ref_json(report.old),
        "new": _ref_json(report.new),
        "against": _ref_json(report.third) if report.third is not None else None,
        "exact": report.exact,
        "read_bytes": report.read_bytes,
        "summary": {
            "tensors": len(report.tensors),
            **{
                status: len(report.with_status(status))
                for status in ("same", "changed", "added", "removed", "reshaped")
            },
            "blocks": sum(len(change.either) for change in common),
            "blocks_changed": sum(change.blocks_changed for change in changed),
            "elements": sum(change.either.elements for change in common),
            "elements_changed": _elements_changed(common),
            **_numbers_json(common, beside=report.third is not None),
        },
        "tensors": [_tensor_json(change) for change in report.tensors if change.status != "same"],
        "groups": _groups_json(report),
        "shards": {"old": list(report.shards[0]), "new": list(report.shards[1])},
        "files": [_file_json(file) for file in report.files],
    }


def _ref_json(ref: ResolvedRef) -> dict[str, str]:
    return {"ref": ref.name, "commit": ref.commit.hex()}


def _numbers_json(changes: Sequence[TensorChange], *, beside: bool) -> dict[str, Any]:
    return {
        **figure_json("norm", norm_of(changes)),
        **figure_json("relative", relative_of(changes)),
        **figure_json("cosine", cosine_of(changes) if beside else None),
    }


def _tensor_json(change: TensorChange) -> dict[str, Any]:
    told = change.status == "changed" and change.has_numbers
    return {
        "name": change.name,
        "kind": change.spot.kind,
        "layer": change.spot.layer,
        "status": change.status,
        "old": _form_json(change.old),
        "new": _form_json(change.new),
        "blocks": len(change.either),
        "blocks_changed": change.blocks_changed,
        "elements": change.either.elements,
        "elements_changed": change.elements_changed,
        **figure_json("norm", change.norm if told else None),
        **figure_json("relative", change.relative if told else None),
        **figure_json("cosine", change.cosine if told and change.is_beside else None),
    }


def _form_json(tensor: Tensor | None) -> dict[str, Any] | None:
    return None if tensor is None else {"dtype": tensor.dtype, "shape": list(tensor.shape)}


def _groups_json(report: DiffReport) -> list[dict[str, Any]]:
    """What a heat map shows: a value for each kind of module and layer."""
    groups: dict[tuple[str, int | None], list[TensorChange]] = {}
    for change in report.tensors:
        if change.has_numbers:
            groups.setdefault((change.spot.kind, change.spot.layer), []).append(change)
    return [
        {
            "kind": kind,
            "layer": layer,
            "tensors": len(changes),
            "changed": sum(change.status == "changed" for change in changes),
            **_numbers_json(changes, beside=report.third is not None),
        }
        for (kind, layer), changes in groups.items()
        if any(change.status == "changed" for change in changes)
    ]


def _file_json(file: FileChange) -> dict[str, Any]:
    return {
        "path": file.path,
        "status": file.status,
        "old_bytes": file.old_bytes,
        "new_bytes": file.new_bytes,
        "binary": file.is_binary,
        "diff": list(file.lines) if file.lines is not None else None,
    }
