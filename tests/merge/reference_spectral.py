"""Methods that see matrices as wholes, in plain torch, written from the papers' equations.

As in tests.merge.reference, on whole tensors and rounded once at the end, but in float64, from
deltas in float32; it shares nothing with the product.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tests.merge.reference import Models, Tensor

NOTHING = 1e-6
"""Singular values that are smaller, beside the largest, count as zero."""


def deltas_of(models: Models) -> list[Tensor]:
    """Each expert's delta times its weight."""
    return [
        weight * (expert.float() - models.base.float()).double()
        for expert, weight in zip(models.experts, models.weights, strict=True)
    ]


def finished(models: Models, delta: Tensor, lam: float) -> Tensor:
    whole = models.base.double() + lam * delta
    return whole.to(models.dtype or models.base.dtype)


def mean(models: Models, *, lam: float = 1.0) -> Tensor:
    """b + lambda / K * sum w_i d_i, over the K experts whose weight is not zero."""
    count = sum(weight != 0 for weight in models.weights)
    return finished(models, sum(deltas_of(models)) / max(count, 1), lam)


def wudi(models: Models, *, ridge: float = 0.1, lam: float = 1.0) -> Tensor:
    return finished(models, wudi_delta(deltas_of(models), ridge), lam)


def wudi_delta(deltas: Sequence[Tensor], ridge: float) -> Tensor:
    """(sum w D D^T D) (sum w D^T D + eps I)^-1, w = 1 / |D|^2, over deltas that are not zero."""
    moved = [delta for delta in deltas if bool(delta.any())]
    if not moved:
        return torch.zeros_like(deltas[0])
    n = moved[0].shape[1]
    shares = [1 / delta.square().sum() for delta in moved]
    gram = sum(w * d.T @ d for w, d in zip(shares, moved, strict=True))
    target = sum(w * d @ d.T @ d for w, d in zip(shares, moved, strict=True))
    eps = ridge * gram.trace() / n
    return torch.linalg.solve(gram + eps * torch.eye(n, dtype=torch.float64), target, left=False)


def interference(merged: Tensor, deltas: Sequence[Tensor]) -> float:
    """What WUDI makes small: sum |(T - D) D^T|^2 / |D|^2."""
    return float(
        sum(((merged - d) @ d.T).square().sum() / d.square().sum() for d in deltas if d.any())
    )


def svd(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """U, S, V^T of the singular values that are not zero."""
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    kept = s > NOTHING * s[0]
    return u[:, kept], s[kept], v[kept]


def tsv(models: Models, *, lam: float = 1.0) -> Tensor:
    """The leading rank / K components of each, with U and V the nearest orthonormal ones."""
    moved = [delta for delta in deltas_of(models) if bool(delta.any())]
    if not moved:
        return finished(models, torch.zeros(models.base.shape, dtype=torch.float64), lam)
    share = max(min(models.base.shape) // len(moved), 1)
    parts = [svd(delta) for delta in moved]
    left = torch.cat([u[:, :share] for u, _, _ in parts], dim=1)
    sizes = torch.cat([s[:share] for _, s, _ in parts])
    right = torch.cat([v[:share] for _, _, v in parts])
    return finished(models, _nearest(left) @ torch.diag(sizes) @ _nearest(right), lam)


def _nearest(matrix: Tensor) -> Tensor:
    u, _, v = svd(matrix)
    return u @ v


def iso_c(models: Models, *, lam: float = 1.0) -> Tensor:
    """U V^T of the sum, times the mean of its singular values."""
    total = sum(deltas_of(models))
    if not bool(total.any()):
        return models.base.to(models.dtype or models.base.dtype)
    u, s, v = svd(total)
    return finished(models, s.mean() * u @ v, lam)
