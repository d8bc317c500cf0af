"""Matrices to merge, and how near a merge must come to its reference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from mergegit.kernels.combine import Coefficients
from mergegit.merge.method import Rule, Unit
from tests.families import generator
from tests.merge.reference import ulps
from tests.merge.tensors import context_of, random_models, recipe_of

SHAPES = {
    "wide": (24, 60),
    "tall": (60, 24),
    "square": (32, 32),
    "very wide": (5, 90),
    "very tall": (90, 5),
    "tiny": (2, 2),
    "nearly a vector": (2, 9),
}


def random_matrices(
    *key: object, shape: tuple[int, ...], experts: int = 3, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    base, moved = random_models(*key, n=math.prod(shape), experts=experts, dtype=dtype)
    return base.reshape(shape), [expert.reshape(shape) for expert in moved]


def low_rank(*key: object, shape: tuple[int, int], rank: int, scale: float = 1.0) -> torch.Tensor:
    draw = generator(*key)
    left, right = (torch.randn(side, rank, generator=draw) for side in shape)
    return scale * left @ right.T / rank


def near(got: torch.Tensor, want: torch.Tensor, *inputs: torch.Tensor) -> bool:
    """The same value or its neighbour, or as near as float32 can tell beside the largest input."""
    assert got.dtype == want.dtype
    assert bool(got.isfinite().all())
    largest = max(float(tensor.float().abs().max()) for tensor in (want, *inputs))
    slack = 8 * 2.0**-24 * largest
    apart = (got.double() - want.double()).abs()
    return bool(((ulps(got, want) <= 1) | (apart <= slack)).all())


def rule_of(
    method: str,
    base: torch.Tensor,
    experts: Sequence[torch.Tensor],
    *,
    in_layers: bool = True,
    weights: Sequence[float] | None = None,
) -> Rule:
    recipe = recipe_of(method, len(experts), weights)
    context = replace(context_of(recipe, base, experts), in_layers=in_layers)
    return recipe.method.rule(context)


def is_whole(rule: Rule) -> bool:
    """Whether a rule sees the tensor whole, as matrices are merged, or sums up its elements."""
    if isinstance(rule, Coefficients):
        return False
    assert rule.unit is Unit.TENSOR
    return True
