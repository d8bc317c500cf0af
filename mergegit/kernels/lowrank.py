"""What a low-rank adapter changes in a tensor, for a run of the tensor's elements.

LoRA (Hu et al., 2021, arXiv 2106.09685, eq. 3) adds ``scale * B A`` to a matrix, with ``B`` of
shape (m, r) and ``A`` of shape (r, n). DoRA (Liu et al., 2024, arXiv 2402.09353, eq. 5) also gives
every output of the sum a length of its own:

    W' = magnitude * V / ||V||,   V = W + scale * B A

Some tensors are stored with inputs first, as the transpose of that: weights of GPT-2's Conv1D, and
embeddings. ``transposed`` says so. A tensor's output axis, whose every entry has one magnitude, is
then the second, and otherwise the first.

Each element's sum over the rank runs in one order, with no reordering and no contraction, so that
neither the machine nor the cut of a tensor into runs shows in a single bit.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from mergegit.kernels.floats import Floats, compiled

Doubles = npt.NDArray[np.float64]

_WIDTH: Final = 512
_DEPTH: Final = 16
"""Columns and terms of the sum that are taken at a time: as much of a factor as the first-level
cache holds, for all rows of a run."""


def low_rank_delta(
    a: Floats,
    b: Floats,
    scale: float,
    transposed: bool,
    shape: tuple[int, int],
    first: int,
    elements: int,
) -> Floats:
    """Elements ``first`` to ``first + elements`` of ``scale * B A``, float32, row-major.

    ``a`` is (r, n) and ``b`` (m, r), float32; ``shape`` is the tensor's: (m, n), or (n, m) where
    it is ``transposed``. The sum over the rank is taken in float32 and then multiplied by
    ``scale``, once rounded to float32.
    """
    columns = shape[1]
    top = first // columns if elements else 0
    bottom = -(-(first + elements) // columns)
    if transposed:
        left = np.ascontiguousarray(a[:, top:bottom].T)
        right = np.ascontiguousarray(b.T)
    else:
        left, right = np.ascontiguousarray(b[top:bottom]), np.ascontiguousarray(a)
    out = np.empty(elements, np.float32)
    _multiply(left, right, np.float32(scale), first - top * columns, out)
    return out


@compiled
def _multiply(left: Any, right: Any, scale: Any, first: int, out: Any) -> None:
    """``scale * left @ right``, as many elements from ``first`` on as ``out`` holds."""
    rank, columns = right.shape
    end = first + out.size
    for edge in range(0, columns, _WIDTH):
        for k in range(0, rank, _DEPTH):
            for row in range(left.shape[0]):
                start = max(edge, first - row * columns)
                stop = min(edge + _WIDTH, columns, end - row * columns)
                if start < stop:
                    at = row * columns - first
                    piece = out[at + start : at + stop]
                    terms = min(rank, k + _DEPTH)
                    _add_terms(left[row], right, k, terms, start, stop, piece)
                    if terms == rank:
                        for j in range(piece.size):
                            piece[j] *= scale


@compiled
def _add_terms(w: Any, right: Any, k: int, terms: int, start: int, stop: int, piece: Any) -> None:
    """Add terms ``k`` to ``terms`` of a row's sums to ``piece``, one after the other."""
    if k == 0:
        for j in range(piece.size):
            piece[j] = np.float32(0.0)
    # Eight terms at a time save loads and stores of the sum.
    while k + 8 <= terms:
        w0, w1, w2, w3 = w[k], w[k + 1], w[k + 2], w[k + 3]
        w4, w5, w6, w7 = w[k + 4], w[k + 5], w[k + 6], w[k + 7]
        x0, x1 = right[k, start:stop], right[k + 1, start:stop]
        x2, x3 = right[k + 2, start:stop], right[k + 3, start:stop]
        x4, x5 = right[k + 4, start:stop], right[k + 5, start:stop]
        x6, x7 = right[k + 6, start:stop], right[k + 7, start:stop]
        for j in range(piece.size):
            s = (((piece[j] + w0 * x0[j]) + w1 * x1[j]) + w2 * x2[j]) + w3 * x3[j]
            piece[j] = (((s + w4 * x4[j]) + w5 * x5[j]) + w6 * x6[j]) + w7 * x7[j]
        k += 8
    while k < terms:
        w0, x0 = w[k], right[k, start:stop]
        for j in range(piece.size):
            piece[j] += w0 * x0[j]
        k += 1


def add_square_sums(
    w: Floats, delta: Floats, transposed: bool, first: int, columns: int, out: Doubles
) -> None:
    """Add the squares of ``V = w + delta`` to the sum of each element's output.

    ``w`` and ``delta`` (float32, of one length) are a run of the tensor from element ``first`` on;
    ``out`` (float64) has an entry for each output. Sums run in the order of the elements: hand in
    the runs of a tensor one after the other, and the sums are those of any other cut.
    """
    _add_square_sums(w, delta, transposed, first, columns, out)


@compiled
def _add_square_sums(
    w: Any, delta: Any, transposed: Any, first: Any, columns: Any, out: Any
) -> None:
    done = 0
    while done < w.size:
        row = (first + done) // columns
        start = first + done - row * columns
        m = min(columns - start, w.size - done)
        here, change = w[done : done + m], delta[done : done + m]
        if transposed:
            sums = out[start : start + m]
            for j in range(m):
                v = np.float64(here[j]) + np.float64(change[j])
                sums[j] += v * v
        else:
            total = out[row]
            for j in range(m):
                v = np.float64(here[j]) + np.float64(change[j])
                total += v * v
            out[row] = total
        done += m


def dora_gain(magnitude: Floats, square_sums: Doubles) -> Doubles:
    """``magnitude / ||V||`` for each output, float64, of the sums that ``add_square_sums`` made.

    An output of nothing but zeros has no direction: its gain is zero, so that it stays as it is.
    """
    norms = np.sqrt(square_sums)
    gain = np.zeros(norms.size, np.float64)
    return np.divide(magnitude, norms, out=gain, where=norms != 0)


def dora_delta(
    w: Floats, delta: Floats, gain: Doubles, transposed: bool, first: int, columns: int
) -> Floats:
    """``gain * (w + delta) - w`` in float64, rounded once to float32.

    ``w`` and ``delta`` (float32, of one length) are a run of the tensor from element ``first`` on;
    ``gain`` (float64) has an entry for each output.
    """
    out = np.empty(w.size, np.float32)
    _dora_delta(w, delta, gain, transposed, first, columns, out)
    return out


@compiled
def _dora_delta(
    w: Any, delta: Any, gain: Any, transposed: Any, first: Any, columns: Any, out: Any
) -> None:
    done = 0
    while done < w.size:
        row = (first + done) // columns
        start = first + done - row * columns
        m = min(columns - start, w.size - done)
        here, change, made = w[done : done + m], delta[done : done + m], out[done : done + m]
        if transposed:
            gains = gain[start : start + m]
            for j in range(m):
                base = np.float64(here[j])
                made[j] = np.float32(gains[j] * (base + np.float64(change[j])) - base)
        else:
            g = gain[row]
            for j in range(m):
                base = np.float64(here[j])
                made[j] = np.float32(g * (base + np.float64(change[j])) - base)
        done += m
