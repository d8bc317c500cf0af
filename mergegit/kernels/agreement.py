"""Sums that keep the elements on which enough experts agree."""

from __future__ import annotations

from typing import Any

import numpy as np

from mergegit.kernels.floats import PIECE, Floats, compiled


def agreed_sum(
    base: Floats, deltas: Floats, weights: Floats, share: float, votes: float, factor: float
) -> Floats:
    """``base`` plus ``factor`` times the weighted sum of ``deltas``, where enough experts vote.

    With c_k = weights[k] * deltas[k] and s their sum, expert k votes for an element where
    |c_k| >= ``share`` * |s - c_k|; s counts where at least ``votes`` of them do, and elsewhere
    zero. ``base`` (n), ``deltas`` (K, n) and ``weights`` (K) are float32, and so is the result.
    """
    out = np.empty_like(base)
    _agreed_sum(
        base, deltas, weights, np.float32(share), np.float32(votes), np.float32(factor), out
    )
    return out


@compiled
def _agreed_sum(
    base: Floats, deltas: Any, weights: Floats, share: Any, votes: Any, factor: Any, out: Floats
) -> None:
    count, n = deltas.shape
    parts = np.empty((count, PIECE), np.float32)
    total = np.empty(PIECE, np.float32)
    agreeing = np.empty(PIECE, np.float32)
    zero, one = np.float32(0.0), np.float32(1.0)
    for start in range(0, n, PIECE):
        stop = min(n, start + PIECE)
        m = stop - start
        for i in range(m):
            total[i] = zero
            agreeing[i] = zero
        for k in range(count):
            part, delta, weight = parts[k], deltas[k, start:stop], weights[k]
            for i in range(m):
                part[i] = weight * delta[i]
                total[i] += part[i]
        for k in range(count):
            part = parts[k]
            for i in range(m):
                agreeing[i] += one if abs(part[i]) >= share * abs(total[i] - part[i]) else zero
        own, merged = base[start:stop], out[start:stop]
        for i in range(m):
            merged[i] = own[i] + factor * (total[i] if agreeing[i] >= votes else zero)
