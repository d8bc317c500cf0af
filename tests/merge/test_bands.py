from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mergegit.merge.bands import cut, regroup
from mergegit.merge.method import Band, Unit

SHAPES = st.lists(st.integers(1, 9), min_size=0, max_size=3).map(tuple)


def blocks_of(elements: int, block: int, experts: int = 2) -> list[Band]:
    """A tensor 0, 1, 2, ... and deltas that tell the expert, in blocks as the executor has them."""
    base = np.arange(elements, dtype=np.float32)
    deltas = np.stack([base + 1000 * (k + 1) for k in range(experts)])
    return [
        Band(base[at : at + block], deltas[:, at : at + block], at)
        for at in range(0, elements, block)
    ]


def joined(bands: list[Band], elements: int) -> None:
    """The bands hold every element once, in order, and know where they begin."""
    at = 0
    for band in bands:
        assert band.first == at
        assert band.base.tolist() == list(range(at, at + band.base.size))
        for k, deltas in enumerate(band.deltas):
            assert (deltas == band.base + 1000 * (k + 1)).all()
        at += band.base.size
    assert at == elements


@settings(deadline=None)
@given(shape=SHAPES, block=st.integers(1, 12))
def test_rows_are_whole_and_nothing_is_lost(shape: tuple[int, ...], block: int) -> None:
    elements, columns = math.prod(shape), shape[-1] if shape else 1
    bands = list(regroup(blocks_of(elements, block), Unit.ROW, shape))
    joined(bands, elements)
    assert all(band.base.size and band.base.size % columns == 0 for band in bands)


@settings(deadline=None)
@given(shape=SHAPES, block=st.integers(1, 12))
def test_rows_are_handed_out_as_soon_as_they_are_there(shape: tuple[int, ...], block: int) -> None:
    """No band holds a row that was whole before its last block came."""
    columns = shape[-1] if shape else 1
    seen = 0

    def watched() -> object:
        nonlocal seen
        for band in blocks_of(math.prod(shape), block):
            seen = band.first + band.base.size
            yield band

    for band in regroup(watched(), Unit.ROW, shape):  # type: ignore[arg-type]
        assert band.first + band.base.size == seen - seen % columns


@settings(deadline=None)
@given(shape=SHAPES, block=st.integers(1, 12))
def test_the_tensor_is_one_band(shape: tuple[int, ...], block: int) -> None:
    elements = math.prod(shape)
    bands = list(regroup(blocks_of(elements, block), Unit.TENSOR, shape))
    joined(bands, elements)
    assert len(bands) == 1


def test_blocks_are_elements_enough() -> None:
    blocks = blocks_of(10, 4)
    assert list(regroup(blocks, Unit.ELEMENT, (5, 2))) == blocks


@pytest.mark.parametrize("unit", Unit)
def test_an_empty_tensor_has_no_bands(unit: Unit) -> None:
    assert list(regroup([], unit, (0, 3))) == []


@settings(deadline=None)
@given(pieces=st.lists(st.integers(0, 20)), elements=st.integers(1, 12))
def test_cut_pieces_are_of_one_size_but_for_the_last(pieces: list[int], elements: int) -> None:
    values = np.arange(sum(pieces), dtype=np.float32)
    ends = np.cumsum(pieces)
    runs = [values[end - size : end] for size, end in zip(pieces, ends, strict=True)]
    parts = list(cut(runs, elements))
    assert all(part.size == elements for part in parts[:-1])
    assert all(0 < part.size <= elements for part in parts[-1:])
    assert np.concatenate([np.empty(0, np.float32), *parts]).tolist() == values.tolist()
