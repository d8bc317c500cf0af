"""Spherical averages, Model Stock, pairs and RAM in plain torch, from their definitions.

On whole tensors, in the precision of what they are given, unrounded. Slow and simple on purpose:
angles come from the tensors themselves, and nothing is shared with the product.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

Tensor = torch.Tensor


def slerp(first: Tensor, second: Tensor, t: float, beyond: float = 0.9995) -> Tensor:
    """sin((1 - t) a) / sin a v_0 + sin(t a) / sin a v_1; the chord where abs(cos a) > ``beyond``"""
    lengths = first.norm() * second.norm()
    if lengths == 0:
        return (1 - t) * first + t * second
    cosine = ((first * second).sum() / lengths).clamp(-1, 1)
    if cosine.abs() > beyond:
        return (1 - t) * first + t * second
    angle = torch.acos(cosine)
    ends = torch.sin((1 - t) * angle) * first + torch.sin(t * angle) * second
    return ends / torch.sin(angle)


def nuslerp(
    first: Tensor,
    second: Tensor,
    weights: Sequence[float],
    *,
    base: Tensor | None = None,
    flatten: bool = True,
    row_wise: bool = False,
) -> Tensor:
    """slerp at t = w_1 / (w_0 + w_1), of whole tensors, of each row, or ``row_wise`` of each column
    along the first axis"""
    total = sum(weights)
    t = weights[1] / total if abs(total) >= 1e-6 else 0.5
    if base is not None:
        deltas = (first - base, second - base)
        return base + nuslerp(*deltas, weights, flatten=flatten, row_wise=row_wise)
    if flatten or first.dim() < 2:
        return slerp(first, second, t, beyond=1 - 1e-15)
    if row_wise:
        pairs = [part.reshape(len(first), -1).T for part in (first, second)]
    else:
        pairs = [part.reshape(-1, first.shape[-1]) for part in (first, second)]
    merged = torch.stack([slerp(a, b, t, beyond=1 - 1e-15) for a, b in zip(*pairs, strict=True)])
    return (merged.T if row_wise else merged).reshape(first.shape)


def multislerp(
    tensors: Sequence[Tensor],
    weights: Sequence[float],
    *,
    base: Tensor | None = None,
    normalize: bool = True,
) -> Tensor:
    """From the mean direction along the weighted sum of what the directions have in the tangent
    space there, by the exponential map; as long as the vectors are on average"""
    if base is not None:
        deltas = [tensor - base for tensor in tensors]
        return base + multislerp(deltas, weights, normalize=normalize)
    w = torch.tensor(weights, dtype=tensors[0].dtype)
    w = w / w.sum() if normalize else w
    lengths = torch.stack([tensor.norm() for tensor in tensors])
    units = [v / length if length > 0 else v for v, length in zip(tensors, lengths, strict=True)]
    mean = sum(part * unit for part, unit in zip(w, units, strict=True))
    assert isinstance(mean, Tensor)
    mean = mean / mean.norm()
    tangent = torch.zeros_like(mean)
    for part, unit in zip(w, units, strict=True):
        tangent = tangent + part * (unit - (unit * mean).sum() * mean)
    return exponential(mean, tangent) * (w * lengths).sum()


def karcher(tensors: Sequence[Tensor], *, max_iter: int = 10, tol: float = 1e-5) -> Tensor:
    """The mean on the sphere by fixed-point iteration, as long as the vectors are on average"""
    units = [tensor / tensor.norm() for tensor in tensors if tensor.norm() > 0]
    mean = torch.stack(units).mean(dim=0)
    mean = mean / mean.norm()
    for _ in range(max_iter):
        tangent = torch.stack([logarithm(mean, unit) for unit in units]).mean(dim=0)
        if tangent.norm() < tol:
            break
        mean = exponential(mean, tangent)
    return mean * torch.stack([tensor.norm() for tensor in tensors]).mean()


def exponential(point: Tensor, tangent: Tensor) -> Tensor:
    """Where one comes from a point of the sphere by going along a tangent as far as it is long."""
    length = tangent.norm()
    if length == 0:
        return point
    return torch.cos(length) * point + torch.sin(length) / length * tangent


def logarithm(point: Tensor, other: Tensor) -> Tensor:
    """The tangent at ``point`` that leads to ``other``, both of length one."""
    cosine = (point * other).sum().clamp(-1, 1)
    across = other - cosine * point
    length = across.norm()
    return across if length == 0 else torch.atan2(length, cosine) / length * across


def model_stock(base: Tensor, experts: Sequence[Tensor], *, filter_wise: bool = False) -> Tensor:
    """b + t (mean e_i - b) with t = N c / (1 + (N - 1) c)"""
    if filter_wise and base.dim() > 1:
        rows = [part.reshape(-1, base.shape[-1]) for part in (base, *experts)]
        merged = [model_stock(row, list(others)) for row, *others in zip(*rows, strict=True)]
        return torch.stack(merged).reshape(base.shape)
    deltas = [expert - base for expert in experts]
    count = len(deltas)
    cosines = []
    for place, one in enumerate(deltas):
        for other in deltas[place + 1 :]:
            lengths = one.norm() * other.norm()
            cosines.append((one * other).sum() / lengths if lengths > 0 else lengths)
    cosine = torch.stack(cosines).mean()
    ratio = count * cosine / (1 + (count - 1) * cosine)
    return base + ratio * torch.stack(deltas).mean(dim=0)


def nearswap(first: Tensor, second: Tensor, t: float) -> Tensor:
    share = (t / (first - second).abs().clamp(min=1e-6)).clamp(0, 1)
    return share * second + (1 - share) * first


def fusion_importance(first: Tensor, second: Tensor) -> Tensor:
    """abs(v_1 - v_0) times KL(softmax(v_1) || softmax(v_0)) of the row"""
    flat = second.dim() == 0
    rows = [part.reshape(1) if flat else part for part in (first, second)]
    log_q, log_p = (torch.log_softmax(part, dim=-1) for part in rows)
    divergence = (log_p.exp() * (log_p - log_q)).sum(dim=-1, keepdim=True).clamp(min=0)
    return (rows[1] - rows[0]).abs() * divergence


def fusion_threshold(importance: Tensor) -> float:
    """median + 1.5 IQR"""
    ordered = importance.flatten().sort().values
    first, median, third = (float(ordered[int(q * (len(ordered) - 1))]) for q in (0.25, 0.5, 0.75))
    return median + 1.5 * (third - first)


def arcee_fusion(first: Tensor, second: Tensor) -> Tensor:
    importance = fusion_importance(first, second)
    taken = (importance >= fusion_threshold(importance)).reshape(first.shape)
    return torch.where(taken, second, first)


def ram(
    base: Tensor,
    experts: Sequence[Tensor],
    *,
    epsilon: float = 1e-5,
    r: float = 0.0,
    alpha: float = 0.2,
) -> Tensor:
    """What one expert alone moved is added, times 1 + r min(shared / unique, alpha); what several
    moved is averaged over them"""
    deltas = [expert - base for expert in experts]
    moved = [delta.abs() > epsilon for delta in deltas]
    counts = torch.stack(moved).sum(dim=0)
    total = torch.zeros_like(base)
    for delta, mine in zip(deltas, moved, strict=True):
        shared, unique = int((mine & (counts > 1)).sum()), int((mine & (counts == 1)).sum())
        overlap = min(shared / unique, alpha) if unique else (alpha if shared else 0.0)
        factor = torch.where(counts == 1, 1 + r * overlap, 1 / counts.clamp(min=1))
        total = total + torch.where(mine, factor.to(base.dtype) * delta, torch.zeros_like(base))
    return base + total
