"""The merge methods in plain torch, written from the papers' equations.

Everything is float32 (or what ``precision`` says), on whole tensors, rounded once at the end; sums
run over the experts in order. Slow and simple on purpose: it shares nothing with the product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class Models:
    """A base, experts and their weights; ``precision`` is what sums are computed in."""

    base: Tensor
    experts: Sequence[Tensor]
    weights: Sequence[float]
    precision: torch.dtype = torch.float32
    dtype: torch.dtype | None = None
    masks: Sequence[Tensor] | None = None
    densities: Sequence[float] | None = None

    def deltas(self) -> list[Tensor]:
        base = self.base.to(self.precision)
        return [expert.to(self.precision) - base for expert in self.experts]

    def weight(self, place: int) -> Tensor:
        return torch.tensor(self.weights[place], dtype=torch.float32).to(self.precision)

    def weight_sum(self) -> Tensor:
        total = torch.zeros((), dtype=self.precision)
        for place in range(len(self.weights)):
            total = total + self.weight(place)
        return total

    def finish(self, delta: Tensor, factor: float = 1.0) -> Tensor:
        """base + lambda * delta, rounded to the output's dtype."""
        lam = torch.tensor(factor, dtype=torch.float32).to(self.precision)
        whole = self.base.to(self.precision) + lam * delta
        return whole.to(self.dtype or self.base.dtype)


def linear(models: Models, *, normalize: bool = True) -> Tensor:
    """sum w_i e_i / sum w_i"""
    total = torch.zeros(models.base.shape, dtype=models.precision)
    for place, expert in enumerate(models.experts):
        total = total + models.weight(place) * expert.to(models.precision)
    if normalize:
        total = total / models.weight_sum()
    return total.to(models.dtype or models.base.dtype)


def task_arithmetic(models: Models, *, normalize: bool = False, lam: float = 1.0) -> Tensor:
    """b + lambda * sum w_i d_i"""
    return models.finish(weighted_sum(models, models.deltas(), normalize), lam)


def ties(
    models: Models, *, normalize: bool = True, lam: float = 1.0, rescale: bool = False
) -> Tensor:
    """Trim, elect a sign, merge those that agree."""
    assert models.densities is not None
    trimmed = []
    for delta, density in zip(models.deltas(), models.densities, strict=True):
        kept = trim(delta, density)
        if rescale and bool((kept != 0).any()):
            whole, rest = delta.double().abs().sum(), kept.double().abs().sum()
            kept = kept * (whole / rest).to(kept.dtype)
        trimmed.append(kept)
    return models.finish(elect(models, trimmed, normalize), lam)


def dare_linear(
    models: Models, *, normalize: bool = False, lam: float = 1.0, rescale: bool = True
) -> Tensor:
    """task arithmetic of deltas of which ``masks`` say what is kept, divided by the density"""
    return models.finish(weighted_sum(models, _dropped(models, rescale), normalize), lam)


def dare_ties(
    models: Models, *, normalize: bool = False, lam: float = 1.0, rescale: bool = True
) -> Tensor:
    """The same, with the election of ties."""
    return models.finish(elect(models, _dropped(models, rescale), normalize), lam)


METHODS: dict[str, Callable[..., Tensor]] = {
    "linear": linear,
    "task_arithmetic": task_arithmetic,
    "ties": ties,
    "dare_linear": dare_linear,
    "dare_ties": dare_ties,
}


def trim(delta: Tensor, density: float) -> Tensor:
    """The int(density * n) largest magnitudes, and all that equal the smallest of them."""
    threshold = trim_threshold(delta, density)
    return torch.where(delta.abs() >= threshold, delta, torch.zeros_like(delta))


def trim_threshold(delta: Tensor, density: float) -> float:
    """The smallest magnitude that is kept."""
    if density >= 1 or delta.numel() == 0:
        return 0.0
    count = int(density * delta.numel())
    if count == 0:
        return float("inf")
    return float(delta.abs().flatten().sort(descending=True).values[count - 1])


def undecided(models: Models, cell: float = 0.0) -> Tensor:
    """Where some expert's |delta| is its threshold, to within the share ``cell``.

    Which of the elements that equal a threshold are kept is up to the sort; methods are compared
    everywhere else.
    """
    assert models.densities is not None
    out = torch.zeros(models.base.shape, dtype=torch.bool)
    for delta, density in zip(models.deltas(), models.densities, strict=True):
        threshold = trim_threshold(delta, density)
        if 0 < threshold < float("inf"):
            out |= (delta.abs() - threshold).abs() <= cell * threshold
    return out


def close_elections(models: Models, share: float = 2.0**-18) -> Tensor:
    """Where the sum that elects a sign is zero to within rounding: either side may win."""
    assert models.densities is not None
    total = torch.zeros(models.base.shape, dtype=models.precision)
    size = torch.zeros_like(total)
    for place, (delta, p) in enumerate(zip(models.deltas(), models.densities, strict=True)):
        part = models.weight(place) * trim(delta, p)
        total, size = total + part, size + part.abs()
    return (size > 0) & (total.abs() <= share * size)


def _dropped(models: Models, rescale: bool) -> list[Tensor]:
    assert models.masks is not None
    assert models.densities is not None
    out = []
    for delta, mask, p in zip(models.deltas(), models.masks, models.densities, strict=True):
        scale = torch.tensor(1.0 / p if rescale else 1.0, dtype=torch.float32)
        out.append(torch.where(mask, delta, torch.zeros_like(delta)) * scale.to(delta.dtype))
    return out


def weighted_sum(models: Models, deltas: Sequence[Tensor], normalize: bool) -> Tensor:
    total = torch.zeros(models.base.shape, dtype=models.precision)
    for place, delta in enumerate(deltas):
        total = total + models.weight(place) * delta
    divisor = models.weight_sum()
    return total / divisor if normalize and divisor.abs() >= 1e-8 else total


def elect(models: Models, deltas: Sequence[Tensor], normalize: bool) -> Tensor:
    """Sum of the weighted deltas whose sign is that of the sum of all; zero counts as positive."""
    parts = [models.weight(place) * delta for place, delta in enumerate(deltas)]
    total = torch.zeros(models.base.shape, dtype=models.precision)
    for part in parts:
        total = total + part
    sign = torch.where(total >= 0, 1.0, -1.0).to(models.precision)
    merged = torch.zeros_like(total)
    divisor = torch.zeros_like(total)
    for place, part in enumerate(parts):
        agrees = part.sign() == sign
        merged = merged + torch.where(agrees, part, torch.zeros_like(part))
        divisor = divisor + torch.where(agrees, models.weight(place), torch.zeros_like(part))
    if not normalize:
        return merged
    return merged / torch.where(divisor == 0, torch.ones_like(divisor), divisor)


def ulps(a: Tensor, b: Tensor) -> Tensor:
    """How many representable values lie between the elements of two tensors of one dtype."""
    assert a.dtype == b.dtype
    return (_ordered(a) - _ordered(b)).abs()


def _ordered(tensor: Tensor) -> Tensor:
    """The bits of floats as integers in the order of the floats; both zeros are 0."""
    width = tensor.dtype.itemsize
    kind = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[width]
    bits = tensor.contiguous().view(kind).to(torch.int64)
    magnitude = bits & ((1 << (8 * width - 1)) - 1)
    return torch.where(bits < 0, -magnitude, magnitude)
