"""Methods that survey a tensor, or take it by rows or whole, as merges of a repository's models.

Two of the family's tensors have more than one block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from mergegit import Repository
from tests.families import EXPERTS, Family
from tests.merge import reference_spherical as reference
from tests.merge.methods.rounding import rounded_once

Tensor = torch.Tensor
PAIR = EXPERTS[:2]
WEIGHTS = (0.6, 0.2, 0.5)
Tensors = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Case:
    """What is asked of the repository, and what it is in float64."""

    method: str
    exact: Callable[[Tensor, list[Tensor]], Tensor]
    models: tuple[str, ...] = EXPERTS
    base: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    weighted: bool = False

    def merge(self, repository: Repository, budget: str | None = None) -> Tensors:
        own = {f"{n}.weight": w for n, w in zip(self.models, WEIGHTS, strict=False)}
        recipe = repository.recipe(
            self.models, method=self.method, base=self.base,
            parameters={**self.parameters, **(own if self.weighted else {})},
        )  # fmt: skip
        report = repository.merge(repository.plan(recipe, budget=budget))
        return repository.load(report.branch)


CASES = {
    "slerp": Case("slerp", lambda b, e: reference.slerp(*e, 0.3), PAIR, parameters={"t": 0.3}),
    "slerp from the base": Case(
        "slerp", lambda b, e: reference.slerp(b, *e, 0.3), EXPERTS[:1], parameters={"t": 0.3}
    ),
    "nuslerp of rows": Case(
        "nuslerp", lambda b, e: reference.nuslerp(*e, WEIGHTS[:2], flatten=False), PAIR,
        parameters={"nuslerp_flatten": False}, weighted=True,
    ),
    "nuslerp of deltas' columns": Case(
        "nuslerp",
        lambda b, e: reference.nuslerp(*e, WEIGHTS[:2], base=b, flatten=False, row_wise=True),
        PAIR, "base", {"nuslerp_flatten": False, "nuslerp_row_wise": True}, True,
    ),
    "multislerp": Case("multislerp", lambda b, e: reference.multislerp(e, WEIGHTS), weighted=True),
    "karcher": Case("karcher", lambda b, e: reference.karcher(e)),
    "model_stock": Case("model_stock", reference.model_stock),
    "model_stock by rows": Case(
        "model_stock", lambda b, e: reference.model_stock(b, e, filter_wise=True),
        parameters={"filter_wise": True},
    ),
    "nearswap": Case(
        "nearswap", lambda b, e: reference.nearswap(*e, 1e-3), PAIR, parameters={"t": 1e-3}
    ),
    "arcee_fusion": Case("arcee_fusion", lambda b, e: reference.arcee_fusion(*e), PAIR),
    "ramplus_tl": Case(
        "ramplus_tl", lambda b, e: reference.ram(b, e, epsilon=1e-3, r=0.4),
        parameters={"epsilon": 1e-3, "r": 0.4},
    ),
}  # fmt: skip
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory, family: Family) -> Iterator[Repository]:
    with repository_of(family, tmp_path_factory.mktemp("forms") / "many", threads=3) as made:
        yield made


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, family: Family) -> Iterator[Repository]:
    """The same with a single thread."""
    with repository_of(family, tmp_path_factory.mktemp("forms") / "one", threads=1) as made:
        yield made


def repository_of(family: Family, path: Path, *, threads: int) -> Repository:
    repository = Repository.init(path, threads=threads)
    for checkpoint in (family.base, *family.experts):
        repository.add(checkpoint)
    return repository


@pytest.fixture(scope="module")
def models(zoo: Repository) -> dict[str, Tensors]:
    return {name: zoo.load(name) for name in ("base", *EXPERTS)}


@every_case
def test_a_full_merge_is_the_reference(
    zoo: Repository, models: dict[str, Tensors], case: Case
) -> None:
    merged = case.merge(zoo)
    for name, base in models["base"].items():
        experts = [models[model][name] for model in case.models]
        want = case.exact(base.double(), [expert.double() for expert in experts])
        assert rounded_once(merged[name], want, [base, *experts]), name


@every_case
def test_where_nothing_is_read_the_base_comes_out(
    zoo: Repository, models: dict[str, Tensors], case: Case
) -> None:
    for name, tensor in case.merge(zoo, budget="0").items():
        assert torch.equal(tensor, models["base"][name]), name


@pytest.mark.parametrize("name", ["multislerp", "nuslerp of rows", "arcee_fusion", "ramplus_tl"])
def test_threads_do_not_change_a_bit(zoo: Repository, alone: Repository, name: str) -> None:
    """One that is surveyed whole, one by rows, one of whole tensors and one that counts."""
    case = CASES[name]
    for budget in (None, "15%"):
        one, other = case.merge(alone, budget), case.merge(zoo, budget)
        assert all(torch.equal(one[name], other[name]) for name in one)
