"""mergegit beside mergekit, on the same files: docs/parity.md says what came out.

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
from safetensors.torch import load_file

from mergegit import Repository
from tests.merge import reference
from tests.merge.reference import Models, ulps
from tests.mergekit.family import EXPERTS, make_llama_family

PYTHON = os.environ.get("MERGEKIT_PYTHON")

pytestmark = [
    pytest.mark.mergekit,
    pytest.mark.slow,
    pytest.mark.skipif(
        not PYTHON,
        reason="MERGEKIT_PYTHON is not set; let it name a Python that has mergekit installed",
    ),
]

DRIVER = Path(__file__).with_name("mergekit_driver.py")
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Case:
    """One merge, in words that both understand. ``shared`` are a method's own parameters."""

    method: str
    weights: tuple[float, ...] = (1.0, 1.0, 1.0)
    densities: tuple[float, ...] | None = None
    shared: Mapping[str, Any] = field(default_factory=dict)

    def parameters(self, place: int) -> dict[str, float]:
        own = {"weight": self.weights[place]}
        if self.densities:
            own["density"] = self.densities[place]
        return own

    def recipe(self, root: Path, *, dtype: str = "float32") -> str:
        """As mergekit reads it; JSON is YAML."""
        base = {} if self.method == "linear" else {"base_model": str(root / "base")}
        return json.dumps(
            {
                "merge_method": self.method,
                **base,
                "models": [
                    {"model": str(root / name), "parameters": self.parameters(place)}
                    for place, name in enumerate(EXPERTS)
                ],
                "parameters": dict(self.shared),
                "dtype": dtype,
                "out_dtype": "bfloat16",
            }
        )

    def models(
        self, base: torch.Tensor, experts: list[torch.Tensor], precision: torch.dtype
    ) -> Models:
        return Models(
            base, experts, self.weights, densities=self.densities, precision=precision,
            dtype=precision,
        )  # fmt: skip

    def reference(
        self, base: torch.Tensor, experts: list[torch.Tensor], precision: torch.dtype
    ) -> torch.Tensor:
        options = {"lam" if key == "lambda" else key: value for key, value in self.shared.items()}
        return reference.METHODS[self.method](self.models(base, experts, precision), **options)


EXACT = {
    "linear": Case("linear"),
    "linear, weighted": Case("linear", (0.5, 0.3, 0.2)),
    "linear, not normalized": Case("linear", (0.7, 0.4, 0.2), shared={"normalize": False}),
    "task arithmetic": Case("task_arithmetic", (0.3, 0.3, 0.3)),
    "task arithmetic, both signs": Case(
        "task_arithmetic", (0.8, -0.5, 0.4), shared={"lambda": 0.7}
    ),
    "task arithmetic, normalized": Case(
        "task_arithmetic", (0.8, 0.5, 0.4), shared={"normalize": True}
    ),
    "ties 0.1": Case("ties", densities=(0.1, 0.1, 0.1)),
    "ties 0.5": Case("ties", densities=(0.5, 0.5, 0.5)),
    "ties 0.9": Case("ties", densities=(0.9, 0.9, 0.9)),
    "ties 1": Case("ties", densities=(1.0, 1.0, 1.0)),
    "ties, weighted": Case("ties", (0.5, 0.3, 0.7), (0.2, 0.5, 0.8)),
    "ties, both signs": Case("ties", (0.9, -0.4, 0.6), (0.4, 0.4, 0.4)),
    "ties, not normalized": Case("ties", (0.5, 0.3, 0.7), (0.5,) * 3, {"normalize": False}),
    "ties, lambda": Case("ties", densities=(0.3, 0.3, 0.3), shared={"lambda": 0.6}),
}
RANDOM = {
    "dare_linear 0.3": Case("dare_linear", (0.5, 0.3, 0.2), (0.3, 0.3, 0.3)),
    "dare_linear 0.7": Case("dare_linear", (0.5, 0.3, 0.2), (0.7, 0.7, 0.7)),
    "dare_ties 0.3": Case("dare_ties", (0.5, 0.3, 0.2), (0.3, 0.3, 0.3)),
    "dare_ties 0.7": Case("dare_ties", (0.5, 0.3, 0.2), (0.7, 0.7, 0.7), {"normalize": True}),
}
ROUNDED = (
    "linear, weighted",
    "task arithmetic",
    "task arithmetic, both signs",
    "ties 0.5",
    "ties, weighted",
)
"""Cases that mergekit computes in bf16 as well."""


@dataclass(frozen=True, slots=True)
class Results:
    """What both made of each case; ``theirs_rounded`` is mergekit's in bf16."""

    base: Tensors
    experts: list[Tensors]
    ours: dict[str, Tensors]
    theirs: dict[str, Tensors]
    theirs_rounded: dict[str, Tensors]

    def of(self, name: str) -> tuple[torch.Tensor, list[torch.Tensor]]:
        return self.base[name], [expert[name] for expert in self.experts]


def read(path: Path) -> Tensors:
    tensors: Tensors = {}
    for file in sorted(path.glob("*.safetensors")):
        tensors.update(load_file(file))
    return tensors


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    root = tmp_path_factory.mktemp("parity")
    make_llama_family(root)
    asked: list[str] = []
    cases = {**EXACT, **RANDOM}
    for number, (name, case) in enumerate(cases.items()):
        for dtype in ("float32", "bfloat16") if name in ROUNDED else ("float32",):
            recipe = root / f"{number}-{dtype}.yml"
            recipe.write_text(case.recipe(root, dtype=dtype))
            asked += [str(recipe), str(root / f"out-{number}-{dtype}")]
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
            repository.add(root / name)
        for name, case in cases.items():
            parameters: dict[str, Any] = dict(case.shared)
            for place, expert in enumerate(EXPERTS):
                own = case.parameters(place)
                parameters.update({f"{expert}.{key}": value for key, value in own.items()})
            recipe_ = repository.recipe(EXPERTS, method=case.method, parameters=parameters)
            ours[name] = repository.load(repository.merge(repository.plan(recipe_)).branch)
    return Results(
        base=read(root / "base"),
        experts=[read(root / name) for name in EXPERTS],
        ours=ours,
        theirs={name: read(root / f"out-{number}-float32") for number, name in enumerate(cases)},
        theirs_rounded={
            name: read(root / f"out-{number}-bfloat16")
            for number, name in enumerate(cases)
            if name in ROUNDED
        },
    )


@pytest.fixture
def say(record_property: Any, capsys: pytest.CaptureFixture[str]) -> Any:
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
        units = ulps(ours[key], theirs[key])
        but = torch.zeros(base.shape, dtype=torch.bool)
        if case.densities:
            but = reference.undecided(case.models(base, experts, torch.float32))
        # Where terms cancel, a unit is finer than the last bits of float32's sums.
        near = (ours[key].double() - theirs[key].double()).abs() < 1e-8
        units = units.masked_fill(near | but, 0)
        assert int(units.max()) <= 1
        # One unit apart are results half way between two values, to float32's precision.
        half_way = units > 0
        exact = case.reference(base, experts, torch.float64)[half_way]
        distances = [(made[key].double()[half_way] - exact).abs() for made in (ours, theirs)]
        assert bool(((distances[0] - distances[1]).abs() <= 2.0**-20 * exact.abs()).all())
        excluded += int(but.sum())
        compared += int((~but).sum())
        apart += int(half_way.sum())
    say(case=name, compared=compared, excluded=excluded, apart=apart)
    assert apart <= (0.04 * compared if case.method == "linear" else 0)
    assert excluded <= 0.15 * (compared + excluded)


@pytest.mark.parametrize("name", ROUNDED)
def test_mergekit_in_bf16_is_farther_from_the_exact_merge(
    results: Results, name: str, say: Any
) -> None:
    case = EXACT[name]
    squares = dict.fromkeys(("ours", "theirs", "least"), 0.0)
    changed = dict.fromkeys(("ours", "theirs"), 0)
    whole = compared = 0.0
    for key in results.base:
        base, experts = results.of(key)
        exact = case.reference(base, experts, torch.float64)
        count = torch.ones(base.shape, dtype=torch.bool)
        if case.densities:
            models = case.models(base, experts, torch.float32)
            count = ~(reference.undecided(models) | reference.close_elections(models))
        made = {
            "ours": results.ours[name][key],
            "theirs": results.theirs_rounded[name][key],
            "least": exact.bfloat16(),
        }
        for who, tensor in made.items():
            squares[who] += float((tensor.double() - exact)[count].square().sum())
        for who in changed:
            changed[who] += int((made[who] != made["least"])[count].sum())
        whole += float((exact - base.double())[count].square().sum())
        compared += float(count.sum())
    error = {who: (value / whole) ** 0.5 for who, value in squares.items()}
    say(
        case=name,
        **{f"error of {who}": f"{value:.5f}" for who, value in error.items()},
        **{f"changed by {who}": f"{value / compared:.2%}" for who, value in changed.items()},
    )
    # No model in bf16 can be nearer than the exact merge rounded once.
    assert error["ours"] <= error["least"] * (1 + 1e-6)
    assert error["ours"] <= error["theirs"] * (1 + 1e-6)
    if case.method != "linear":
        # mergekit computes linear in float32 whatever the recipe's dtype is.
        assert error["ours"] < error["theirs"]
        assert changed["ours"] < changed["theirs"]


@pytest.mark.parametrize("name", RANDOM)
def test_random_methods_have_the_same_distribution(results: Results, name: str, say: Any) -> None:
    """Share of elements that moved, and mean and variance of the merged delta."""
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
def test_random_methods_move_the_expectation_alike(results: Results, name: str, say: Any) -> None:
    """Regressed on the merge that drops nothing, both have one slope."""
    case = RANDOM[name]
    slopes = {}
    for who, models in (("ours", results.ours[name]), ("theirs", results.theirs[name])):
        product = square = 0.0
        for key in results.base:
            base, experts = results.of(key)
            whole = sum(
                weight * (expert.double() - base.double())
                for weight, expert in zip(case.weights, experts, strict=True)
            )
            assert isinstance(whole, torch.Tensor)
            product += float((models[key].double() - base.double()).flatten() @ whole.flatten())
            square += float(whole.square().sum())
        slopes[who] = product / square
    say(case=name, **{who: f"{slope:.4f}" for who, slope in slopes.items()})
    assert slopes["ours"] == pytest.approx(slopes["theirs"], abs=0.01)
    if case.method == "dare_linear":
        assert slopes["ours"] == pytest.approx(1.0, abs=0.01)
