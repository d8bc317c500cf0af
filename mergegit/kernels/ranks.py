"""Ranks of magnitudes within rows, and random masks whose probability follows them."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from mergegit.kernels.combine import draw
from mergegit.kernels.floats import Floats, compiled

_FEW: Final = 24
"""Rows of so many elements are sorted by insertion: clearing counters for them takes longer."""


def double_ranks(values: Floats, columns: int) -> npt.NDArray[np.uint32]:
    """Twice the rank of each magnitude within its row, from 0 for the smallest to 2 (columns - 1).

    ``values`` (n) float32 are whole rows of ``columns`` elements. Equal magnitudes share the mean
    of their ranks, so that neither the order of elements nor the way of sorting decides; NaN is
    above infinity.
    """
    out = np.empty(values.size, np.uint32)
    # Few wide digits make few passes, but clearing their counters pays in long rows only.
    _double_ranks(values, columns, 11 if columns >= 512 else 8, out)
    return out


def keep_by_rank(
    values: Floats,
    columns: int,
    first: int,
    low: float,
    high: float,
    key: int,
    rescale: bool,
    out: Floats,
) -> None:
    """Keep elements at random, the larger of a row more likely than the smaller; zeros elsewhere.

    The probability of an element rises linearly with its rank within its row (``double_ranks``)
    from ``low``, of the smallest, to ``high``; a row of one element has their mean. With
    ``rescale`` what is kept is divided by its probability. ``first`` is the index of the first
    element in its tensor and ``key`` seeds the draws; ``out`` (n) float32 receives the result.
    """
    ranks = double_ranks(values, columns)
    middle = (low + high) / 2
    slope = (high - low) / (2 * (columns - 1)) if columns > 1 else 0.0
    start = low if columns > 1 else middle
    _keep_by_rank(values, ranks, first, start, slope, np.uint64(key), rescale, out)


@compiled
def _double_ranks(values: Floats, columns: int, digit: int, out: Any) -> None:
    """Rows are sorted by their magnitudes' bits, digit by digit, with the places carried along."""
    places = np.empty(1 << digit, np.int32)
    rows = (np.empty(columns, np.uint64), np.empty(columns, np.uint64))
    bits = values.view(np.uint32)
    for start in range(0, values.size, columns):
        row, ranks = bits[start : start + columns], out[start : start + columns]
        one, other = rows
        for i in range(columns):
            one[i] = (np.uint64(row[i] & np.uint32(0x7FFFFFFF)) << np.uint64(32)) | np.uint64(i)
        if columns <= _FEW:
            _insert(one)
        else:
            for shift in range(32, 63, digit):
                if _distribute(one, np.uint64(shift), places, other):
                    one, other = other, one
        _share_ranks(one, ranks)


@compiled
def _insert(words: Any) -> None:
    for i in range(1, words.size):
        word = words[i]
        j = i
        while j > 0 and words[j - 1] > word:
            words[j] = words[j - 1]
            j -= 1
        words[j] = word


@compiled
def _distribute(words: Any, shift: Any, places: Any, out: Any) -> bool:
    """Order words by one digit into ``out``, unless they all have the same."""
    mask = np.uint64(places.size - 1)
    places[:] = 0
    for i in range(words.size):
        places[(words[i] >> shift) & mask] += np.int32(1)
    if places[(words[0] >> shift) & mask] == words.size:
        return False
    total = np.int32(0)
    for value in range(places.size):
        count = places[value]
        places[value] = total
        total += count
    for i in range(words.size):
        value = (words[i] >> shift) & mask
        place = places[value]
        places[value] = place + np.int32(1)
        out[np.uint32(place)] = words[i]
    return True


@compiled
def _share_ranks(words: Any, ranks: Any) -> None:
    """The first and the last rank of each run of equal magnitudes, added up."""
    n = words.size
    low = np.uint64(0xFFFFFFFF)
    first = np.uint32(0)
    for i in range(n):
        first = np.uint32(i) if (words[i] ^ words[max(i - 1, 0)]) > low else first
        ranks[words[i] & low] = first
    last = np.uint32(n - 1)
    for j in range(n):
        i = n - 1 - j
        last = np.uint32(i) if (words[i] ^ words[min(i + 1, n - 1)]) > low else last
        ranks[words[i] & low] += last


@compiled
def _keep_by_rank(
    values: Floats, ranks: Any, first: int, start: float, slope: float, key: Any, rescale: bool,
    out: Floats,
) -> None:  # fmt: skip
    for i in range(values.size):
        probability = start + slope * np.float64(ranks[i])
        limit = np.uint64(probability * 4294967296.0 + 0.5)
        scale = np.float32(1.0 / probability) if rescale else np.float32(1.0)
        kept = draw(key, first + i) < limit
        out[i] = values[i] * scale if kept else np.float32(0.0)
