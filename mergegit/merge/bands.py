"""Regrouping a tensor's blocks into the bands that a method needs whole, and back into blocks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from mergegit.kernels.floats import Floats
from mergegit.merge.method import Band, Unit


def regroup(blocks: Iterable[Band], unit: Unit, shape: tuple[int, ...]) -> Iterator[Band]:
    """Bands of whole elements, rows or one of the whole tensor, from consecutive blocks."""
    match unit:
        case Unit.ELEMENT:
            return iter(blocks)
        case Unit.ROW:
            return _rows(blocks, shape[-1] if shape else 1)
        case Unit.TENSOR:
            return _whole(blocks, math.prod(shape))


def cut(pieces: Iterable[Floats], elements: int) -> Iterator[Floats]:
    """Consecutive runs of values, cut anew into runs of ``elements``; the last may be shorter."""
    held: list[Floats] = []
    size = 0
    for piece in pieces:
        held.append(piece)
        size += piece.size
        if size >= elements:
            joined = np.concatenate(held) if len(held) > 1 else piece
            whole = size - size % elements
            for start in range(0, whole, elements):
                yield joined[start : start + elements]
            held, size = [joined[whole:]], size - whole
    if size:
        yield np.concatenate(held)


def _rows(blocks: Iterable[Band], columns: int) -> Iterator[Band]:
    held: Band | None = None
    for block in blocks:
        band = block if held is None else _joined(held, block)
        whole = band.base.size - band.base.size % columns
        if whole:
            yield Band(band.base[:whole], band.deltas[:, :whole], band.first)
        held = Band(band.base[whole:], band.deltas[:, whole:], band.first + whole)
    assert held is None or not held.base.size, "a tensor holds whole rows"


def _joined(left: Band, right: Band) -> Band:
    return replace(
        left,
        base=np.concatenate([left.base, right.base]),
        deltas=np.concatenate([left.deltas, right.deltas], axis=1),
    )


def _whole(blocks: Iterable[Band], elements: int) -> Iterator[Band]:
    base = np.empty(elements, np.float32)
    deltas: Floats | None = None
    for block in blocks:
        if deltas is None:
            deltas = np.empty((len(block.deltas), elements), np.float32)
        stop = block.first + block.base.size
        base[block.first : stop] = block.base
        deltas[:, block.first : stop] = block.deltas
    if deltas is not None:
        yield Band(base, deltas, 0)
