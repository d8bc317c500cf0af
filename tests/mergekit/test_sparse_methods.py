"""The methods that leave elements out beside mergekit, on the same files: docs/methods.md says what
differs.

Runs where MERGEKIT_PYTHON names an interpreter that has mergekit.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mergegit import Repository
from tests.merge import reference_sparse as reference
from tests.merge.reference import Models, ulps
from tests.mergekit.family import EXPERTS, make_llama_family
from tests.mergekit.test_parity import DRIVER, PYTHON, Tensors, pytestmark, read

__all__ = ["pytestmark"]

Tensor = torch.Tensor
CELL = 2.0**-9
"""Width of a histogram's cell: to that a threshold on what is no difference of 16-bit floats is
known."""


@dataclass(frozen=True, slots=True)
class Case:
    """One merge, in words that both understand."""

    method: str
    weights: tuple[float, ...] | None = None
    densities: tuple[float, ...] | None = None
    shared: Mapping[str, Any] = field(default_factory=dict)

    def own(self, place: int) -> dict[str, float]:
        values = {"weight": self.weights, "density": self.densities}
        return {key: value[place] for key, value in values.items() if value}

    def recipe(self, root: Path) -> str:
        """As mergekit reads it; JSON is YAML."""
        return json.dumps(
            {
                "merge_method": self.method,
                "base_model": str(root / "base"),
                "models": [
                    {"model": str(root / name), "parameters": self.own(place)}
                    for place, name in enumerate(EXPERTS)
                ],
                "parameters": dict(self.shared),
                "dtype": "float32",
                "out_dtype": "bfloat16",
            }
        )

    def parameters(self) -> dict[str, Any]:
        own = {
            f"{name}.{key}": value
            for place, name in enumerate(EXPERTS)
            for key, value in self.own(place).items()
        }
        return {**self.shared, **own}

    def models(self, base: Tensor, experts: list[Tensor]) -> Models:
        weights = self.weights or (1.0,) * len(experts)
        return Models(base, experts, weights, densities=self.densities)

    def undecided(self, base: Tensor, experts: list[Tensor]) -> Tensor:
        """Elements at a threshold, of which the sort decides which are kept."""
        models = self.models(base, experts)
        if self.method == "sce":
            share = self.shared.get("select_topk", 1.0)
            _, least = reference.select(models.deltas(), share)
            return (reference.spread(models.deltas()) - least).abs() <= CELL * least
        gammas = [self.shared.get("gamma", 0.01)] * len(experts)
        return reference.at_an_edge(models, gammas) | reference.near_an_inexact_edge(models, gammas)


HALVES = (0.5, 0.3, 0.7)
EXACT = {
    "breadcrumbs": Case("breadcrumbs", HALVES, (0.9, 0.9, 0.9)),
    "breadcrumbs, each its own": Case("breadcrumbs", (0.8, -0.5, 0.4), (0.2, 0.5, 0.8)),
    "breadcrumbs, many outliers": Case(
        "breadcrumbs", HALVES, (0.5, 0.5, 0.5), {"gamma": 0.2, "lambda": 0.6}
    ),
    "breadcrumbs, no room for outliers": Case(
        "breadcrumbs", HALVES, (0.9, 0.9, 0.9), {"gamma": 0.3}
    ),
    "breadcrumbs, no outliers": Case("breadcrumbs", HALVES, (0.5, 0.5, 0.5), {"gamma": 0.0}),
    "breadcrumbs, everything": Case("breadcrumbs", HALVES, (1.0, 1.0, 1.0)),
    "breadcrumbs_ties": Case("breadcrumbs_ties", HALVES, (0.9, 0.9, 0.9)),
    "breadcrumbs_ties, normalized": Case(
        "breadcrumbs_ties", (0.8, -0.5, 0.4), (0.2, 0.5, 0.8), {"normalize": True, "gamma": 0.05}
    ),
    "sce": Case("sce"),
    "sce 0.5": Case("sce", shared={"select_topk": 0.5}),
    "sce 0.1": Case("sce", shared={"select_topk": 0.1}),
    "della, everything": Case("della", HALVES, (1.0, 1.0, 1.0)),
}
RANDOM = {
    f"{method} {density}": Case(
        method, HALVES, (density,) * 3, {"epsilon": epsilon, "rescale": False}
    )
    for method in ("della", "della_linear")
    for density, epsilon in ((0.3, 0.2), (0.7, 0.25))
}


@dataclass(frozen=True, slots=True)
class Results:
    """What both made of each case."""

    base: Tensors
    experts: list[Tensors]
    ours: dict[str, Tensors]
    theirs: dict[str, Tensors]

    def of(self, key: str) -> tuple[Tensor, list[Tensor]]:
        return self.base[key], [expert[key] for expert in self.experts]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    root = tmp_path_factory.mktemp("parity")
    make_llama_family(root)
    _set_apart(root)
    asked: list[str] = []
    cases = {**EXACT, **RANDOM}
    for number, case in enumerate(cases.values()):
        recipe = root / f"{number}.yml"
        recipe.write_text(case.recipe(root))
        asked += [str(recipe), str(root / f"out-{number}")]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    assert PYTHON is not None
    done = subprocess.run(
        [PYTHON, str(DRIVER), *asked], env=environment, cwd=root, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    ours: dict[str, Tensors] = {}
    with Repository.init(root / "repository") as repository:
        repository.add(root / "base")
        for name in EXPERTS:
            repository.add(root / name, base="base")
        for name, case in cases.items():
            recipe_ = repository.recipe(EXPERTS, method=case.method, parameters=case.parameters())
            ours[name] = repository.load(repository.merge(repository.plan(recipe_)).branch)
    return Results(
        base=read(root / "base"),
        experts=[read(root / name) for name in EXPERTS],
        ours=ours,
        theirs={name: read(root / f"out-{number}") for number, name in enumerate(cases)},
    )


def _set_apart(root: Path) -> None:
    """Make the second expert move twice as far as the first and the third three times, so that
    energies differ."""
    base = read(root / "base")
    for place, name in enumerate(EXPERTS):
        moved = {
            key: (base[key].float() + (tensor.float() - base[key].float()) * (place + 1)).bfloat16()
            for key, tensor in read(root / name).items()
        }
        save_file(moved, root / name / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture
def say(record_property: Any) -> Any:
    """Shows a measured number under `pytest -s`, and keeps it in reports."""

    def show(**numbers: object) -> None:
        for key, value in numbers.items():
            record_property(key, value)
        print(", ".join(f"{key} {value}" for key, value in numbers.items()))

    return show


@pytest.mark.parametrize("name", EXACT)
def test_a_full_merge_is_mergekits_to_one_unit_in_the_last_place(
    results: Results, name: str, say: Any
) -> None:
    case, ours, theirs = EXACT[name], results.ours[name], results.theirs[name]
    assert ours.keys() == theirs.keys()
    compared = excluded = apart = 0
    for key in ours:
        base, experts = results.of(key)
        if case.method == "sce" and _is_too_small_for_mergekit(base, experts):
            continue
        but = case.undecided(base, experts)
        # Where base and delta cancel, a unit is finer than the last bits of float32's sums, and
        # than what weights make of a delta that are a few in ten thousand apart.
        slack = torch.full(base.shape, 1e-8, dtype=torch.float64)
        if case.method == "sce":
            slack += 1e-3 * (theirs[key].double() - base.double()).abs()
        near = (ours[key].double() - theirs[key].double()).abs() < slack
        units = ulps(ours[key], theirs[key]).masked_fill(near | but, 0)
        assert int(units.max()) <= 1
        excluded += int(but.sum())
        compared += int((~but).sum())
        apart += int((units > 0).sum())
    say(case=name, compared=compared, excluded=excluded, apart=apart)
    assert compared > 2_000_000
    # Energies of selected elements are known to the cell of the threshold: one rounding in a few
    # thousand turns.
    assert apart <= (1e-3 * compared if case.method == "sce" else 1e-6 * compared)
    assert excluded <= 0.15 * (compared + excluded)


def _is_too_small_for_mergekit(base: Tensor, experts: list[Tensor]) -> bool:
    """It weights all experts alike where their mean squares add up to less than 1e-6."""
    return sum(float((e.float() - base.float()).square().mean()) for e in experts) < 2e-6


@pytest.mark.parametrize("name", RANDOM)
def test_random_methods_have_the_same_distribution(results: Results, name: str, say: Any) -> None:
    """Share of elements that moved, and mean and deviation of the merged delta."""
    measured = {}
    for who, models in (("ours", results.ours[name]), ("theirs", results.theirs[name])):
        deltas = torch.cat(
            [
                (models[key].double() - results.base[key].double()).flatten()
                for key in results.base
                if "norm" not in key
            ]
        )
        measured[who] = (
            float((deltas != 0).double().mean()), float(deltas.mean()), float(deltas.std())
        )  # fmt: skip
    n = sum(tensor.numel() for tensor in results.base.values())
    (our_share, our_mean, our_spread), (share, mean, spread) = measured.values()
    say(
        case=name,
        share=f"{our_share:.4f} {share:.4f}",
        mean=f"{our_mean:.2e} {mean:.2e}",
        spread=f"{our_spread:.4e} {spread:.4e}",
    )
    assert our_share == pytest.approx(share, abs=5 / n**0.5)
    assert our_mean == pytest.approx(mean, abs=5 * spread * (2 / n) ** 0.5)
    assert our_spread == pytest.approx(spread, rel=5e-3)


@pytest.mark.parametrize("name", RANDOM)
def test_random_methods_keep_large_deltas_alike(results: Results, name: str, say: Any) -> None:
    """Regressed on the merge that drops nothing, and on its cube, both have one slope: small and
    large deltas are kept as often by both."""
    case = RANDOM[name]
    assert case.weights is not None
    slopes: dict[str, list[float]] = {"ours": [], "theirs": []}
    for power in (1, 3):
        for who, models in (("ours", results.ours[name]), ("theirs", results.theirs[name])):
            product = square = 0.0
            for key in results.base:
                base, experts = results.of(key)
                whole = torch.zeros(base.shape, dtype=torch.float64)
                for weight, expert in zip(case.weights, experts, strict=True):
                    whole += weight * (expert.double() - base.double())
                moved = models[key].double() - base.double()
                product += float((moved * whole**power).sum())
                square += float((whole ** (power + 1)).sum())
            slopes[who].append(product / square)
    say(case=name, **{who: [f"{slope:.4f}" for slope in both] for who, both in slopes.items()})
    assert slopes["ours"] == pytest.approx(slopes["theirs"], abs=0.01)
    if case.method == "della_linear":
        assert case.densities is not None
        assert slopes["ours"][1] > slopes["ours"][0] > case.densities[0] + 0.05
