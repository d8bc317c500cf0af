"""Merging single tensors in memory, by the product's methods and kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from mergegit.dtypes import DTYPES
from mergegit.kernels.combine import Coefficients, combine
from mergegit.kernels.measure import measure
from mergegit.merge.bands import cut, regroup
from mergegit.merge.method import Band, ExpertTensor, TensorContext
from mergegit.merge.recipe import Recipe, make_recipe, resolved
from mergegit.merge.settings import Scalar, Setting
from mergegit.objects import CommitId
from mergegit.statistics import Histogram
from tests.families import generator

NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
BY_NAME = {name: dtype for dtype, name in NAMES.items()}


def random_tensor(*key: object, n: int, scale: float = 0.02) -> torch.Tensor:
    return torch.randn(n, generator=generator(*key)) * scale


def random_models(
    *key: object, n: int, experts: int, dtype: torch.dtype, sigma: float = 5e-3
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A base and experts near it, rounded to ``dtype``; a tenth of the elements did not move."""
    base = random_tensor(*key, "base", n=n)
    out = []
    for place in range(experts):
        delta = random_tensor(*key, place, n=n, scale=sigma)
        delta[torch.rand(n, generator=generator(*key, place, "still")) < 0.1] = 0.0
        out.append((base.to(dtype).float() + delta).to(dtype))
    return base.to(dtype), out


def to_bytes(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()


def from_bytes(data: bytes | memoryview, dtype: torch.dtype) -> torch.Tensor:
    if not len(data):
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype)


def commit_id(number: int) -> CommitId:
    return CommitId(bytes([number]) * 32)


def recipe_of(
    method: str,
    experts: int = 1,
    weights: Sequence[float] | None = None,
    densities: Sequence[float] | None = None,
    parameters: Mapping[str, Scalar] | None = None,
    seed: int = 0,
) -> Recipe:
    own: list[dict[str, Setting]] = [{} for _ in range(experts)]
    for place in range(experts):
        if weights is not None:
            own[place]["weight"] = Setting.constant(weights[place])
        if densities is not None:
            own[place]["density"] = Setting.constant(densities[place])
    return make_recipe(
        method_name=method,
        base=("base", commit_id(0)),
        experts=[(f"expert{place}", commit_id(place + 1)) for place in range(experts)],
        parameters={key: Setting.constant(value) for key, value in (parameters or {}).items()},
        expert_parameters=own,
        seed=seed,
    )


def histogram_of(expert: torch.Tensor, base: torch.Tensor) -> Histogram:
    """The histogram of |delta|, as it is taken when an expert is added."""
    measured = measure(
        to_bytes(expert), NAMES[expert.dtype], to_bytes(base), NAMES[base.dtype], base.numel(), 0
    )
    bins = np.flatnonzero(measured.histogram).astype(np.uint32)
    return Histogram(bins, measured.histogram[bins].astype(np.uint64))


def context_of(
    recipe: Recipe,
    base: torch.Tensor,
    experts: Sequence[torch.Tensor],
    *,
    name: str = "weight",
    keys: Sequence[bytes] | None = None,
) -> TensorContext:
    return TensorContext(
        name=name,
        shape=tuple(base.shape),
        parameters=resolved(recipe.parameters, name, 0.0),
        seed=recipe.seed,
        experts=[
            ExpertTensor(
                parameters=resolved(asked.parameters, name, 0.0),
                histogram=histogram_of(expert, base),
                key=keys[place] if keys else b"expert%d" % place,
                energy=float((expert.float() - base.float()).double().square().sum()),
            )
            for place, (asked, expert) in enumerate(zip(recipe.experts, experts, strict=True))
        ],
    )


def coefficients_of(
    recipe: Recipe,
    base: torch.Tensor,
    experts: Sequence[torch.Tensor],
    *,
    name: str = "weight",
    keys: Sequence[bytes] | None = None,
) -> Coefficients:
    return recipe.method.coefficients(context_of(recipe, base, experts, name=name, keys=keys))


def bands_of(
    base: torch.Tensor, experts: Sequence[torch.Tensor], block: int | None = None
) -> list[Band]:
    """A tensor and its experts' deltas as the executor hands them out, block by block."""
    reference = base.float().flatten().numpy()
    deltas = [expert.float().flatten().numpy() - reference for expert in experts]
    size = block or max(reference.size, 1)
    return [
        Band(reference[at : at + size], np.stack([d[at : at + size] for d in deltas]), at)
        for at in range(0, reference.size, size)
    ]


def combine_tensors(
    base: torch.Tensor,
    experts: Mapping[int, torch.Tensor],
    coefficients: Coefficients,
    *,
    dtype: torch.dtype | None = None,
    first: int = 0,
) -> torch.Tensor:
    """One block merged by the kernel; ``experts`` gives their places among the coefficients."""
    rows = [to_bytes(expert) for expert in experts.values()]
    width = max((row.size for row in rows), default=0)
    table = np.zeros((len(rows), width), np.uint8)
    for place, row in enumerate(rows):
        table[place, : row.size] = row
    codes = np.array([DTYPES[NAMES[e.dtype]].code for e in experts.values()], np.int64)
    out = dtype or base.dtype
    data = combine(
        table,
        codes,
        np.array(list(experts), np.int64),
        to_bytes(base),
        NAMES[base.dtype],
        base.numel(),
        first,
        coefficients,
        NAMES[out],
    )
    return from_bytes(data, out)


def merge_tensor(
    method: str,
    base: torch.Tensor,
    experts: Sequence[torch.Tensor],
    *,
    weights: Sequence[float] | None = None,
    densities: Sequence[float] | None = None,
    parameters: Mapping[str, Scalar] | None = None,
    seed: int = 0,
    name: str = "weight",
    keys: Sequence[bytes] | None = None,
    dtype: torch.dtype | None = None,
    block: int | None = None,
) -> torch.Tensor:
    """A whole tensor merged, in blocks of ``block`` elements where that is given."""
    recipe = recipe_of(method, len(experts), weights, densities, parameters, seed)
    context = context_of(recipe, base, experts, name=name, keys=keys)
    size = block or max(base.numel(), 1)
    survey = recipe.method.survey(context) if recipe.method.survey else None
    if survey is not None:
        for band in bands_of(base, experts, size):
            survey.add(survey.measure(band))
        context = replace(context, surveyed=survey.finish())
    rule = recipe.method.rule(context)
    if not isinstance(rule, Coefficients):
        bands = regroup(bands_of(base, experts, size), rule.unit, tuple(base.shape))
        pieces = list(cut((rule.apply(band) for band in bands), size))
        merged = torch.from_numpy(np.concatenate(pieces)) if pieces else torch.empty(0)
        return merged.to(dtype or base.dtype).reshape(base.shape)
    flat, rows = base.flatten(), [expert.flatten() for expert in experts]
    parts = [
        combine_tensors(
            flat[start : start + size],
            {place: row[start : start + size] for place, row in enumerate(rows)},
            rule,
            dtype=dtype,
            first=start,
        )
        for start in range(0, base.numel(), size)
    ]
    merged = torch.cat(parts) if parts else torch.empty(0, dtype=dtype or base.dtype)
    return merged.reshape(base.shape)
