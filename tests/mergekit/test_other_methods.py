"""The methods of other forms beside mergekit, on the same files: docs/methods.md says what differs.

Runs where MERGEKIT_PYTHON names an interpreter that has mergekit.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from mergegit import Repository
from mergegit.merge.method import Merges
from mergegit.merge.methods import METHODS
from tests.merge import reference_spherical as reference
from tests.merge.reference import ulps
from tests.mergekit.family import EXPERTS, make_llama_family
from tests.mergekit.test_parity import DRIVER, PYTHON, Tensors, pytestmark, read

__all__ = ["pytestmark"]

Tensor = torch.Tensor
PAIR = EXPERTS[:2]


@dataclass(frozen=True, slots=True)
class Case:
    """One merge: what both are asked, and what it is, from the base's and the models' tensors."""

    method: str
    exact: Callable[[Tensor, list[Tensor]], Tensor]
    models: tuple[str, ...] = EXPERTS
    weights: tuple[float, ...] | None = None
    shared: Mapping[str, Any] = field(default_factory=dict)
    with_base: bool = False

    def recipe(self, root: Path) -> str:
        """As mergekit reads it; JSON is YAML. It calls the first model of two the base."""
        base = None
        if self.with_base:
            base = str(root / "base")
        elif METHODS[self.method].merges is Merges.FROM_FIRST:
            base = str(root / self.models[0])
        models = [
            {
                "model": str(root / name),
                "parameters": {"weight": self.weights[place]} if self.weights else {},
            }
            for place, name in enumerate(self.models)
        ]
        value = {
            "merge_method": self.method,
            "models": models,
            "parameters": dict(self.shared),
            "dtype": "float32",
            "out_dtype": "bfloat16",
        }
        return json.dumps(value | ({"base_model": base} if base else {}))

    def parameters(self) -> dict[str, Any]:
        own = zip(self.models, self.weights or (), strict=False)
        return {**self.shared, **{f"{name}.weight": weight for name, weight in own}}


CASES = {
    "slerp 0.3": Case(
        "slerp", lambda b, e: reference.slerp(*e, 0.3), PAIR, shared={"t": 0.3}
    ),
    "slerp 0.5": Case(
        "slerp", lambda b, e: reference.slerp(*e, 0.5), PAIR, shared={"t": 0.5}
    ),
    "nuslerp": Case(
        "nuslerp", lambda b, e: reference.nuslerp(*e, (0.6, 0.2)), PAIR, (0.6, 0.2)
    ),
    "nuslerp of rows": Case(
        "nuslerp", lambda b, e: reference.nuslerp(*e, (0.6, 0.2), flatten=False), PAIR, (0.6, 0.2),
        {"nuslerp_flatten": False},
    ),
    "nuslerp of columns": Case(
        "nuslerp",
        lambda b, e: reference.nuslerp(*e, (0.6, 0.2), flatten=False, row_wise=True),
        PAIR, (0.6, 0.2), {"nuslerp_flatten": False, "nuslerp_row_wise": True},
    ),
    "nuslerp of deltas": Case(
        "nuslerp", lambda b, e: reference.nuslerp(*e, (0.6, 0.2), base=b), PAIR, (0.6, 0.2),
        with_base=True,
    ),
    "nuslerp of deltas' columns": Case(
        "nuslerp",
        lambda b, e: reference.nuslerp(*e, (0.6, 0.2), base=b, flatten=False, row_wise=True),
        PAIR, (0.6, 0.2), {"nuslerp_flatten": False, "nuslerp_row_wise": True}, with_base=True,
    ),
    "multislerp": Case(
        "multislerp", lambda b, e: reference.multislerp(e, (0.5, 0.3, 0.7)), weights=(0.5, 0.3, 0.7)
    ),
    "multislerp, not normalized": Case(
        "multislerp", lambda b, e: reference.multislerp(e, (0.5, 0.3, 0.7), normalize=False),
        weights=(0.5, 0.3, 0.7), shared={"normalize_weights": False},
    ),
    "multislerp of deltas": Case(
        "multislerp", lambda b, e: reference.multislerp(e, (0.5, 0.3, 0.7), base=b),
        weights=(0.5, 0.3, 0.7), with_base=True,
    ),
    "karcher": Case("karcher", lambda b, e: reference.karcher(e)),
    "model_stock": Case("model_stock", reference.model_stock, with_base=True),
    "model_stock by rows": Case(
        "model_stock", lambda b, e: reference.model_stock(b, e, filter_wise=True),
        shared={"filter_wise": True}, with_base=True,
    ),
    "nearswap 1e-3": Case(
        "nearswap", lambda b, e: reference.nearswap(*e, 1e-3), PAIR, shared={"t": 1e-3}
    ),
    "nearswap 1e-5": Case(
        "nearswap", lambda b, e: reference.nearswap(*e, 1e-5), PAIR, shared={"t": 1e-5}
    ),
    "arcee_fusion": Case("arcee_fusion", lambda b, e: reference.arcee_fusion(*e), PAIR),
    "ram": Case("ram", reference.ram, with_base=True),
    "ram 1e-3": Case(
        "ram", lambda b, e: reference.ram(b, e, epsilon=1e-3), shared={"epsilon": 1e-3},
        with_base=True,
    ),
    "ramplus_tl": Case(
        "ramplus_tl", lambda b, e: reference.ram(b, e, epsilon=1e-3, r=0.3),
        shared={"epsilon": 1e-3, "r": 0.3}, with_base=True,
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Results:
    """What both made of each case."""

    models: dict[str, Tensors]
    ours: dict[str, Tensors]
    theirs: dict[str, Tensors]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    root = tmp_path_factory.mktemp("parity")
    make_llama_family(root)
    asked: list[str] = []
    for number, case in enumerate(CASES.values()):
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
            repository.add(root / name)
        for name, case in CASES.items():
            recipe_ = repository.recipe(
                case.models,
                base="base" if case.with_base else None,
                method=case.method,
                parameters=case.parameters(),
            )
            ours[name] = repository.load(repository.merge(repository.plan(recipe_)).branch)
    return Results(
        models={name: read(root / name) for name in ("base", *EXPERTS)},
        ours=ours,
        theirs={name: read(root / f"out-{number}") for number, name in enumerate(CASES)},
    )


def exact_of(case: Case, results: Results, key: str) -> Tensor:
    """The merge in float64."""
    models = [results.models[name][key].double() for name in case.models]
    return case.exact(results.models["base"][key].double(), models)


CANCELLED = 1e-8
"""Where terms cancel, a unit in the last place is finer than the last bits of float32's sums."""


def units_apart(made: Tensor, other: Tensor, cancelled: float = CANCELLED) -> Tensor:
    near = (made.double() - other.double()).abs() < cancelled
    return ulps(made, other).masked_fill(near, 0)


@pytest.mark.parametrize("name", CASES)
def test_a_full_merge_is_the_exact_one_rounded_once(
    results: Results, name: str, record_property: Any
) -> None:
    apart = dict.fromkeys(("ours", "theirs"), 0)
    compared = 0
    for key, ours in results.ours[name].items():
        exact = exact_of(CASES[name], results, key).bfloat16()
        units = units_apart(ours, exact)
        assert int(units.max()) <= 1, key
        compared += units.numel()
        apart["ours"] += int((units > 0).sum())
        apart["theirs"] += int((units_apart(results.theirs[name][key], exact) > 0).sum())
    show(record_property, case=name, compared=compared, **apart)
    # Half of what two of the experts moved lies half way between two values now and then.
    assert apart["ours"] <= (5e-4 if "ram" in name else 5e-5) * compared
    assert apart["ours"] <= apart["theirs"] + 10


@pytest.mark.parametrize("name", [name for name in CASES if name != "arcee_fusion"])
def test_a_full_merge_is_mergekits_to_one_unit_in_the_last_place(
    results: Results, name: str, record_property: Any
) -> None:
    ours, theirs = results.ours[name], results.theirs[name]
    assert ours.keys() == theirs.keys()
    # mergekit's sums of whole tensors of deltas are good to so much.
    cancelled = 2e-7 if name == "multislerp of deltas" else CANCELLED
    apart = 0
    for key in ours:
        units = units_apart(ours[key], theirs[key], cancelled)
        assert int(units.max()) <= 1, key
        apart += int((units > 0).sum())
    show(record_property, case=name, apart=apart)


def test_arcee_fusion_differs_from_mergekits_only_near_the_threshold(
    results: Results, record_property: Any
) -> None:
    """mergekit's divergence of two rows, in float32, is good to a fifth where they are alike."""
    compared = differing = taken = 0
    for key, ours in results.ours["arcee_fusion"].items():
        first, second = (results.models[name][key] for name in PAIR)
        apart = ours != results.theirs["arcee_fusion"][key]
        importance = reference.fusion_importance(first.double(), second.double())
        margin = (importance / reference.fusion_threshold(importance) - 1).abs()
        assert bool((margin[apart] < 0.4).all()), key
        assert bool(((ours == first) | (ours == second)).all())
        compared += ours.numel()
        differing += int(apart.sum())
        taken += int((ours != first).sum())
    show(record_property, compared=compared, taken=taken, differing=differing)
    assert 0.02 * compared < taken < 0.1 * compared
    assert differing < 0.02 * compared


def show(record_property: Any, **numbers: object) -> None:
    """Shows measured numbers under `pytest -s`, and keeps them in reports."""
    for key, value in numbers.items():
        record_property(key, value)
    print(", ".join(f"{key} {value}" for key, value in numbers.items()))
