"""Methods that leave elements out, in plain torch, written from the papers' equations.

As in tests.merge.reference: float32 (or what ``precision`` says), whole tensors, sums over the
experts in order, rounded once at the end; it shares nothing with the product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tests.merge.reference import Models, Tensor, elect, weighted_sum

# -- breadcrumbs ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Kept:
    """The magnitudes that breadcrumbs keeps: from ``smallest`` to ``largest``, both included."""

    smallest: float
    largest: float

    def apply(self, delta: Tensor) -> Tensor:
        inside = (delta.abs() >= self.smallest) & (delta.abs() <= self.largest)
        return torch.where(inside, delta, torch.zeros_like(delta))


def crumbs(delta: Tensor, density: float, gamma: float) -> Kept:
    """Sorted by magnitude, the int(gamma n) largest go, and the int(density n) next ones stay."""
    n = delta.numel()
    if density >= 1 or n == 0:
        return Kept(0.0, float("inf"))
    if density <= 0:
        return Kept(float("inf"), 0.0)
    keep = max(int(density * n), 1)
    dropped = min(int(gamma * n), n - keep)
    falling = delta.abs().flatten().sort(descending=True).values
    largest = float(falling[dropped]) if dropped else float("inf")
    return Kept(float(falling[dropped + keep - 1]), largest)


def breadcrumbs(
    models: Models,
    gammas: Sequence[float],
    *,
    normalize: bool = False,
    lam: float = 1.0,
    rescale: bool = False,
    ties: bool = False,
) -> Tensor:
    """b + lambda * sum w_i m_i d_i, with the masks m_i of ``crumbs``; ``ties`` elects a sign."""
    parts = []
    for delta, kept in zip(models.deltas(), kept_of(models, gammas), strict=True):
        part = kept.apply(delta)
        if rescale and bool((part != 0).any()):
            whole, rest = delta.double().abs().sum(), part.double().abs().sum()
            part = part * (whole / rest).to(part.dtype)
        parts.append(part)
    fuse = elect if ties else weighted_sum
    return models.finish(fuse(models, parts, normalize), lam)


def kept_of(models: Models, gammas: Sequence[float]) -> list[Kept]:
    assert models.densities is not None
    return [
        crumbs(delta, density, gamma)
        for delta, density, gamma in zip(models.deltas(), models.densities, gammas, strict=True)
    ]


def at_an_edge(models: Models, gammas: Sequence[float]) -> Tensor:
    """Where some expert's |delta| is the smallest or the largest that is kept: which of those that
    equal it are kept is up to the sort."""
    out = torch.zeros(models.base.shape, dtype=torch.bool)
    for delta, kept in zip(models.deltas(), kept_of(models, gammas), strict=True):
        out |= (delta != 0) & ((delta.abs() == kept.smallest) | (delta.abs() == kept.largest))
    return out


def near_an_inexact_edge(models: Models, gammas: Sequence[float]) -> Tensor:
    """Where an edge is finer than the product's histograms tell: the elements of its cell.

    Differences of narrow floats are that fine only where a weight is far smaller than its delta.
    """
    out = torch.zeros(models.base.shape, dtype=torch.bool)
    for delta, kept in zip(models.deltas(), kept_of(models, gammas), strict=True):
        for edge in (kept.smallest, kept.largest):
            if 0 < edge < float("inf") and int(torch.tensor(edge).view(torch.int32)) & 0x3FFF:
                out |= (delta.abs() - edge).abs() <= 2.0**-9 * edge
    return out


# -- della ---------------------------------------------------------------------------------------


def probabilities(delta: Tensor, density: float, epsilon: float) -> Tensor:
    """Of keeping each element, float64: density - epsilon for the smallest of its row, rising by
    rank to density + epsilon for the largest. Equal magnitudes share the mean of their ranks."""
    if density >= 1 or not delta.numel():
        return torch.ones(delta.shape, dtype=torch.float64)
    rows = delta.abs().reshape(-1, delta.shape[-1] if delta.ndim else 1)
    n = rows.shape[1]
    if n < 2:
        return torch.full(delta.shape, density, dtype=torch.float64)
    rising = rows.sort(dim=1).values
    below = torch.searchsorted(rising, rows)
    up_to = torch.searchsorted(rising, rows, right=True)
    rank = (below + up_to - 1).double() / 2
    return ((density - epsilon) + 2 * epsilon * rank / (n - 1)).reshape(delta.shape)


def draws(key: int, n: int) -> Tensor:
    """The first ``n`` outputs of SplitMix64 from state ``key``, their upper halves, int64."""
    with np.errstate(over="ignore"):
        z = np.uint64(key) + np.arange(1, n + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    return torch.from_numpy((z >> np.uint64(32)).astype(np.int64))


def della(
    models: Models,
    epsilons: Sequence[float],
    keys: Sequence[int],
    *,
    normalize: bool = True,
    lam: float = 1.0,
    rescale: bool = True,
    ties: bool = True,
) -> Tensor:
    """Bernoulli(p) of each delta, divided by p; then the fusion of ties, or the plain sum."""
    assert models.densities is not None
    parts = []
    deltas = models.deltas()
    for delta, p, epsilon, key in zip(deltas, models.densities, epsilons, keys, strict=True):
        chance = probabilities(delta, p, epsilon)
        kept = draws(key, delta.numel()).reshape(delta.shape) < torch.round(chance * 2.0**32)
        scale = (1.0 / chance).to(delta.dtype) if rescale else torch.ones_like(delta)
        parts.append(torch.where(kept, delta * scale, torch.zeros_like(delta)))
    fuse = elect if ties else weighted_sum
    return models.finish(fuse(models, parts, normalize), lam)


# -- sce -----------------------------------------------------------------------------------------


def spread(deltas: Sequence[Tensor]) -> Tensor:
    """The standard deviation over the experts, float64; it orders elements as the variance does."""
    stacked = torch.stack([delta.double() for delta in deltas])
    mean = stacked.sum(0) / len(deltas)
    return ((stacked - mean).square().sum(0) / len(deltas)).sqrt()


def select(deltas: Sequence[Tensor], share: float) -> tuple[Tensor, float]:
    """The top share of the elements that have a variance, as a mask, and their least spread."""
    size = spread(deltas)
    everything = torch.ones(size.shape, dtype=torch.bool)
    if share >= 1:
        return everything, 0.0
    moved = int((size > 0).sum())
    if share <= 0 or not moved:
        return ~everything, float("inf")
    falling = size.flatten().sort(descending=True).values
    least = float(falling[max(int(share * moved), 1) - 1])
    return size >= least, least


def sce(models: Models, *, select_topk: float = 1.0, lam: float = 1.0) -> Tensor:
    """Select, calculate, erase: b + lambda * (sum m_i w_i d_i) / (sum m_i w_i)."""
    deltas = models.deltas()
    mask, _ = select(deltas, select_topk)
    deltas = [torch.where(mask, delta, torch.zeros_like(delta)) for delta in deltas]
    energies = torch.stack([delta.double().square().sum() for delta in deltas])
    weights = (energies / energies.sum()).to(models.precision)
    total = torch.zeros_like(deltas[0])
    for delta in deltas:
        total = total + delta
    sign = torch.where(total >= 0, 1.0, -1.0).to(models.precision)
    merged, divisor = torch.zeros_like(total), torch.zeros_like(total)
    for weight, delta in zip(weights, deltas, strict=True):
        own = torch.where(delta.sign() == sign, weight, torch.zeros_like(delta))
        merged = merged + own * delta
        divisor = divisor + own
    return models.finish(merged / torch.where(divisor == 0, torch.ones_like(divisor), divisor), lam)


# -- consensus -----------------------------------------------------------------------------------


def consensus(
    models: Models, *, tall_lambda: float = 0.4, agree: float = 2.0, lam: float = 1.0
) -> Tensor:
    """b + lambda * m * s with s = sum c_i, c_i = w_i d_i, where m is one where at least ``agree``
    of the masks |c_i| >= tall_lambda * |s - c_i| are."""
    parts = [models.weight(place) * delta for place, delta in enumerate(models.deltas())]
    total = torch.zeros(models.base.shape, dtype=models.precision)
    for part in parts:
        total = total + part
    share = torch.tensor(tall_lambda, dtype=torch.float32).to(models.precision)
    votes = sum((part.abs() >= share * (total - part).abs()).to(torch.int64) for part in parts)
    assert isinstance(votes, torch.Tensor)
    return models.finish(torch.where(votes >= agree, total, torch.zeros_like(total)), lam)


def close_votes(models: Models, tall_lambda: float, share: float = 2.0**-18) -> Tensor:
    """Where some mask is decided within rounding."""
    parts = [models.weight(place) * delta for place, delta in enumerate(models.deltas())]
    total = torch.zeros(models.base.shape, dtype=models.precision)
    size = torch.zeros_like(total)
    for part in parts:
        total, size = total + part, size + part.abs()
    out = torch.zeros(models.base.shape, dtype=torch.bool)
    for part in parts:
        out |= (part.abs() - tall_lambda * (total - part).abs()).abs() <= share * size
    return out & (size > 0)
