"""What a commit was made of as people and programs are shown it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import click

from mergegit.cli.heat_map import Scale, heat_map
from mergegit.cli.plan_text import print_table
from mergegit.cli.text import percent, plural, printable
from mergegit.objects import CommitId
from mergegit.repository.blaming import (
    BlameReport,
    Contribution,
    TensorBlame,
    Way,
    share_of,
)
from mergegit.repository.merge_record import BlocksRead
from mergegit.repository.naming import short

_TOP: Final = 4
"""Contributions that a line names."""

Key = tuple[CommitId, str]
"""A commit and a name of it."""


def print_blame(report: BlameReport, *, with_map: bool) -> None:
    """What a commit was made of: a line for each expert, then for each kind of module; or, of one
    tensor, all that is known."""
    click.echo(_headline(report))
    if len(report.tensors) == 1:
        _print_tensor(report, report.tensors[0])
    else:
        if report.method is not None:
            _print_experts(report)
        _print_kinds(report.tensors)
    if with_map:
        _print_maps(report)
    for caveat in dict.fromkeys(_caveats(report.tensors)):
        click.echo(f"  ~: {printable(caveat)}")
    if report.base is not None and report.base_is_merge:
        base = printable(report.base.name)
        click.echo(f"  the base {base} is a merge itself: `mergegit blame {base}`")


def _headline(report: BlameReport) -> str:
    name = click.style(printable(report.ref.name), bold=True)
    on = f" on base {printable(report.base.name)}" if report.base is not None else ""
    if report.method is None:
        return f"{name}: added{on}, and no merge"
    experts = ", ".join(printable(expert.name) for expert in report.experts)
    return f"{name}: merged by {report.method} of {experts}{on}"


def _print_experts(report: BlameReport) -> None:
    """A line for each commit that was merged, over all tensors."""
    found: dict[Key, list[Contribution]] = {}
    for tensor in report.tensors:
        for one in tensor.contributions:
            found.setdefault((one.commit, one.ref), []).append(one)
    if not found:
        click.echo("  every tensor is the base's")
        return
    merged = [t for t in report.tensors if t.origin == "merged"]
    total = _energy(c for tensor in merged for c in tensor.contributions)
    rows: list[tuple[float, list[str]]] = []
    for (_, ref), ones in found.items():
        read = [one for one in ones if one.energy is not None or one.ways[0].reads]
        share = share_of(_energy(read), total) if read else None
        row = [
            printable(ref),
            _weights(ones),
            _share_text(share) if read else "copied",
            ", ".join(filter(None, dict.fromkeys(_via(w) for one in ones for w in one.ways))),
            _reads([way.reads[0] for one in read for way in one.ways if way.reads]),
        ]
        rows.append((share or 0.0, row))
    rows.sort(key=lambda row: -row[0])
    print_table(
        ["expert", "weight", "share", "by way of", "read"], [row for _, row in rows], left=(0, 3, 4)
    )
    blocks = sum(tensor.blocks for tensor in report.tensors)
    left = sum(len(tensor.at_base) for tensor in report.tensors)
    click.echo(f"  {left:,} of {plural(blocks, 'block')} as in the base")


def _print_kinds(tensors: Sequence[TensorBlame]) -> None:
    """A line for each kind of module."""
    kinds: dict[str, list[TensorBlame]] = {}
    for tensor in tensors:
        kinds.setdefault(_kind(tensor), []).append(tensor)
    rows = [
        [printable(kind), f"{len(here):,}", _at_base(here), _made_of(here)]
        for kind, here in kinds.items()
    ]
    print_table(["kind", "tensors", "as in the base", "made of"], rows, left=(0, 3))


def _kind(tensor: TensorBlame) -> str:
    return tensor.spot.kind.removesuffix(".weight")


def _at_base(tensors: Sequence[TensorBlame]) -> str:
    blocks = sum(tensor.blocks for tensor in tensors)
    return percent(sum(len(tensor.at_base) for tensor in tensors), blocks)


def _made_of(tensors: Sequence[TensorBlame]) -> str:
    """``math 61.2%, code 38.8%`` of what was merged; and what was copied or is the base's."""
    merged = [tensor for tensor in tensors if tensor.origin == "merged"]
    parts = _shares_text(merged)
    for tensor in tensors:
        if tensor.origin in ("copied", "own"):
            one = tensor.contributions[0]
            word = "copied from " if tensor.origin == "copied" else ""
            parts.append(f"{word}{printable(one.ref)}")
    plain = [t for t in tensors if t.origin == "base" or (t in merged and not t.contributions)]
    if plain:
        parts.append("base" if len(plain) == len(tensors) else f"base ({len(plain):,})")
    parts = list(dict.fromkeys(parts))
    more = f", and {len(parts) - _TOP} more" if len(parts) > _TOP else ""
    return ", ".join(parts[:_TOP]) + more


def _shares_text(merged: Sequence[TensorBlame]) -> list[str]:
    shares = _shares(merged)
    ordered = sorted(shares.items(), key=lambda item: -(item[1] or 0.0))
    return [f"{printable(ref)} {_share_text(share)}" for (_, ref), share in ordered]


def _shares(tensors: Iterable[TensorBlame]) -> dict[Key, float | None]:
    """Each commit's part of the energies in several tensors together."""
    ones: dict[Key, list[Contribution]] = {}
    for tensor in tensors:
        for one in tensor.contributions:
            ones.setdefault((one.commit, one.ref), []).append(one)
    total = _energy(one for here in ones.values() for one in here)
    return {key: share_of(_energy(here), total) for key, here in ones.items()}


def _energy(contributions: Iterable[Contribution]) -> float | None:
    energies = [one.energy for one in contributions]
    return None if None in energies else sum(energy or 0.0 for energy in energies)


def _print_tensor(report: BlameReport, tensor: TensorBlame) -> None:
    """All that is known of one tensor."""
    click.echo(
        f"  {printable(tensor.name)}: {_origin(report, tensor)}; "
        f"{len(tensor.at_base):,} of {plural(tensor.blocks, 'block')} as in the base"
        f"{_places(tensor)}"
    )
    if tensor.parameters:
        click.echo(f"  {_parameters(tensor.parameters)}")
    for one in tensor.contributions:
        share = "" if tensor.origin != "merged" else f", share {_share_text(one.share)}"
        mark = "~" if one.caveats else ""
        ref = click.style(printable(one.ref), bold=True)
        commit = click.style(short(one.commit), dim=True)
        click.echo(f"  {ref} {commit}: weight {mark}{_number(one.weight)}{share}")
        if one.tensor != tensor.name:
            click.echo(f"    its {printable(one.tensor)}")
        for way in one.ways:
            _print_way(one, way)
    if tensor.note:
        click.echo(f"  {printable(tensor.note)}")


def _print_way(one: Contribution, way: Way) -> None:
    merges = [printable(merge) for merge in way.merges]
    if len(one.ways) > 1 or merges:
        through = f"by way of {', '.join(merges)}" if merges else "directly"
        click.echo(f"    {through}, weight {_number(way.weight)}")
    if way.parameters:
        click.echo(f"    {_parameters(way.parameters)}")
    for place, read in enumerate(way.reads):
        of = "" if not place else f" by {merges[place - 1]}"
        click.echo(f"    read{of}: {_reads([read])}")


def _origin(report: BlameReport, tensor: TensorBlame) -> str:
    base = printable(report.base.name) if report.base is not None else "nothing"
    match tensor.origin:
        case "base":
            return f"the base's, {base}'s {printable(tensor.base_tensor or tensor.name)}"
        case "copied":
            return f"copied from {printable(tensor.contributions[0].ref)}, unread"
        case "own":
            return "its own"
    of = printable(tensor.base_tensor or tensor.name)
    called = "" if of == tensor.name else f"'s {of}"
    return f"merged by {report.method} on {base}{called}"


def _places(tensor: TensorBlame) -> str:
    """Which blocks are the base's, as runs, where some are and some are not."""
    if not tensor.at_base or len(tensor.at_base) == tensor.blocks:
        return ""
    runs: list[list[int]] = []
    for index in tensor.at_base:
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    texts = [f"{a}" if a == b else f"{a} to {b}" for a, b in runs[:8]]
    return f" ({', '.join(texts)}{' ...' if len(runs) > 8 else ''})"


def _parameters(parameters: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={_value(value)}" for key, value in parameters.items())


def _value(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value).lower()


def _number(value: float) -> str:
    """Weights are float32: six digits are what was asked for."""
    return f"{value:.6g}"


def _weights(contributions: Sequence[Contribution]) -> str:
    weights = [one.weight for one in contributions]
    low, high = _number(min(weights)), _number(max(weights))
    mark = "~" if any(one.caveats for one in contributions) else ""
    return f"{mark}{low}" if low == high else f"{mark}{low} to {high}"


def _share_text(share: float | None) -> str:
    return "?" if share is None else f"{100 * share:.1f}%"


def _via(way: Way) -> str:
    return " in ".join(printable(merge) for merge in reversed(way.merges))


def _reads(reads: Sequence[BlocksRead]) -> str:
    """How far blocks were read: ``all of 3 blocks, 2 layers of 7 blocks, nothing of 1 block``."""
    whole = sum(read.whole for read in reads)
    unread = sum(read.unread for read in reads)
    free = sum(read.free for read in reads)
    partly: dict[int, int] = {}
    for read in reads:
        for layers, count in read.partly.items():
            partly[layers] = partly.get(layers, 0) + count
    parts = [f"all of {plural(whole, 'block')}"] if whole else []
    parts += [
        f"{plural(layers, 'layer')} of {plural(count, 'block')}"
        for layers, count in sorted(partly.items(), reverse=True)
    ]
    parts += [f"nothing of {plural(unread, 'block')}"] if unread else []
    parts += [f"{free:,} free"] if free else []
    return ", ".join(parts) or "nothing"


def _print_maps(report: BlameReport) -> None:
    """For each commit that was merged a heat map of its shares."""
    tensors = [t for t in report.tensors if t.spot.stack is not None and t.contributions]
    keys = _shares(tensors)
    scale = Scale.shares()
    for stack in dict.fromkeys(tensor.spot.stack for tensor in tensors):
        cells: dict[tuple[str, int], list[TensorBlame]] = {}
        for tensor in tensors:
            if tensor.spot.stack == stack and tensor.spot.layer is not None:
                cells.setdefault((tensor.spot.short_kind, tensor.spot.layer), []).append(tensor)
        kinds = [printable(kind) for kind in dict.fromkeys(kind for kind, _ in cells)]
        layers = 1 + max(layer for _, layer in cells)
        for key in keys:

            def value(
                kind: str, columns: range, key: Key = key, cells: Any = cells
            ) -> float | None:
                here = [tensor for layer in columns for tensor in cells.get((kind, layer), ())]
                return _share_in(here, key) if here else math.nan

            click.echo(f"  share of {click.style(printable(key[1]), bold=True)} in {stack}N:")
            for line in heat_map(kinds, layers, value, scale):
                click.echo(line)
    if tensors:
        click.echo(f"  share: {scale.legend(lambda bound: f'{100 * bound:.0f}%')}")


def _share_in(tensors: Sequence[TensorBlame], key: Key) -> float | None:
    if all(tensor.origin != "merged" for tensor in tensors):
        own = [t for t in tensors if (t.contributions[0].commit, t.contributions[0].ref) == key]
        return len(own) / len(tensors)
    return _shares(tensor for tensor in tensors if tensor.origin == "merged").get(key, 0.0)


def _caveats(tensors: Iterable[TensorBlame]) -> Iterator[str]:
    for tensor in tensors:
        for one in tensor.contributions:
            for caveat in one.caveats:
                yield f"weights of {one.ref} are not exact: {caveat}"


def blame_json(report: BlameReport) -> dict[str, Any]:
    """The stable keys of a blame."""
    return {
        "ref": report.ref.name,
        "commit": report.ref.commit.hex(),
        "method": report.method,
        "base": {
            "ref": report.base.name,
            "commit": report.base.commit.hex(),
            "is_merge": report.base_is_merge,
        }
        if report.base is not None
        else None,
        "experts": [
            {"ref": expert.name, "commit": expert.commit.hex()} for expert in report.experts
        ],
        "tensors": [_tensor_json(tensor) for tensor in report.tensors],
    }


def _tensor_json(tensor: TensorBlame) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "kind": tensor.spot.kind,
        "layer": tensor.spot.layer,
        "origin": tensor.origin,
        "base_tensor": tensor.base_tensor,
        "parameters": dict(tensor.parameters) if tensor.parameters is not None else None,
        "blocks": tensor.blocks,
        "blocks_at_base": list(tensor.at_base),
        "note": tensor.note,
        "contributions": [
            {
                "ref": one.ref,
                "commit": one.commit.hex(),
                "tensor": one.tensor,
                "weight": float(_number(one.weight)),
                "share": one.share,
                "energy": one.energy,
                "exact": not one.caveats,
                "caveats": list(one.caveats),
                "ways": [_way_json(way) for way in one.ways],
            }
            for one in tensor.contributions
        ],
    }


def _way_json(way: Way) -> dict[str, Any]:
    return {
        "merges": list(way.merges),
        "weight": float(_number(way.weight)),
        "parameters": dict(way.parameters),
        "reads": [
            {
                "whole": read.whole,
                "layers": {str(layers): count for layers, count in read.partly.items()},
                "unread": read.unread,
                "free": read.free,
            }
            for read in way.reads
        ],
    }
