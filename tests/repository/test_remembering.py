"""Merges are remembered: what was merged of the same before is neither read nor written again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mergegit import Repository
from mergegit.merge.methods import METHODS
from mergegit.repository.reports import MergeReport
from tests.families import EXPERTS, generator, save_checkpoint
from tests.merge.examples import experts_for, needed_parameters

LAYERS = 6
LAYER_SHAPE = (400, 300)


def model(seed: int, moved: float = 0.0) -> dict[str, torch.Tensor]:
    """A base of six layers, or an expert that moved from it in all of them."""
    tensors = {}
    for layer in range(LAYERS):
        name = f"model.layers.{layer}.mlp.weight"
        tensors[name] = torch.randn(LAYER_SHAPE, generator=generator("base", layer)) * 0.02
        tensors[name] += torch.randn(LAYER_SHAPE, generator=generator(seed, layer)) * moved
        tensors[f"model.layers.{layer}.norm.weight"] = torch.ones(LAYER_SHAPE[1])
    return tensors


@pytest.fixture
def layered(tmp_path: Path) -> Iterator[Repository]:
    with Repository.init(tmp_path / "layered") as repository:
        repository.add(save_checkpoint(tmp_path / "base", model(0)))
        for number, name in enumerate(EXPERTS, start=1):
            repository.add(save_checkpoint(tmp_path / name, model(number, 1e-3)))
        yield repository


def merge(
    repository: Repository, branch: str, budget: str | None = None, **recipe: Any
) -> MergeReport:
    method = recipe.get("method", "task_arithmetic")
    experts = experts_for(method, recipe.pop("experts", EXPERTS))
    recipe["parameters"] = {**needed_parameters(method), **recipe.get("parameters", {})}
    plan = repository.plan(repository.recipe(experts, **recipe), budget=budget)
    report = repository.merge(plan, branch=branch)
    # What a plan says of its reads is what the merge reads.
    assert report.read_bytes == plan.read_bytes
    assert report.base_read_bytes == plan.base_read_bytes
    assert plan.read_bytes + plan.spared_bytes == plan.plan.planned_bytes
    return report


def contents(repository: Repository, report: MergeReport) -> bytes:
    return repository.commit(report.branch).manifest


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("budget", [None, "20%"])
def test_a_merge_that_is_repeated_reads_nothing(
    layered: Repository, method: str, budget: str | None
) -> None:
    first = merge(layered, "first", budget, method=method)
    again = merge(layered, "again", budget, method=method)
    assert again.read_bytes == again.base_read_bytes == 0
    assert contents(layered, again) == contents(layered, first)
    if METHODS[method].copies is None:
        assert first.read_bytes > 0


@pytest.mark.parametrize("method", ["task_arithmetic", "ties", "dare_linear"])
def test_with_one_layers_weight_changed_that_layer_alone_is_merged_anew(
    layered: Repository, method: str
) -> None:
    first = merge(layered, "first", method=method)
    rules = [{"filter": "layers.3.mlp", "value": 0.25}, {"value": 1.0}]
    changed = merge(layered, "changed", method=method, parameters={"math.weight": rules})
    assert 0 < changed.read_bytes < first.read_bytes / (LAYERS - 1)
    assert 0 < changed.written_bytes < first.written_bytes / (LAYERS - 1)
    before, after = layered.load("first"), layered.load("changed")
    differing = [name for name in before if not torch.equal(before[name], after[name])]
    assert differing == ["model.layers.3.mlp.weight"]


def test_what_is_remembered_is_what_a_merge_from_nothing_gives(
    layered: Repository, tmp_path: Path
) -> None:
    weights = [0.3, 0.7, 0.7]
    rules = [[{"filter": "layers.1", "value": w}, {"value": 1.0}] for w in weights]
    for place, weight in enumerate(rules):
        merge(layered, f"m{place}", parameters={"weight": weight}, budget="30%")
    with Repository.init(tmp_path / "fresh") as fresh:
        for name in ("base", *EXPERTS):
            fresh.add(tmp_path / name)
        for place, weight in enumerate(rules):
            alone = merge(fresh, f"m{place}", parameters={"weight": weight}, budget="30%")
            assert contents(fresh, alone) == layered.commit(f"m{place}").manifest
            break


def test_another_seed_draws_anew(layered: Repository) -> None:
    density = {"density": 0.5}
    first = merge(layered, "first", method="dare_ties", parameters=density)
    other = merge(layered, "other", method="dare_ties", parameters=density, seed=1)
    assert other.read_bytes == first.read_bytes
    assert contents(layered, other) != contents(layered, first)


def test_another_expert_is_read_where_it_differs(layered: Repository, tmp_path: Path) -> None:
    first = merge(layered, "first")
    changed = model(3, 1e-3)
    changed["model.layers.0.mlp.weight"] += 1e-3
    layered.add(save_checkpoint(tmp_path / "other", changed), base="base")
    report = merge(layered, "second", experts=["math", "code", "other"])
    assert 0 < report.read_bytes < first.read_bytes / (LAYERS - 1)


def test_gc_forgets_results_that_are_stored_no_more(layered: Repository) -> None:
    first = merge(layered, "first")
    made = contents(layered, first)
    layered.delete_branch("first")
    assert layered.plan(layered.recipe(EXPERTS)).read_bytes == 0
    layered.gc(expire=0, grace=0)
    assert layered.store.catalog.forget_results() == 0
    again = merge(layered, "again")
    assert again.read_bytes == first.read_bytes
    assert contents(layered, again) == made
    assert not layered.fsck().problems


def test_without_the_catalog_everything_is_merged_again(
    layered: Repository, tmp_path: Path
) -> None:
    first = merge(layered, "first")
    layered.close()
    Repository.rebuild_catalog(tmp_path / "layered")
    with Repository.open(tmp_path / "layered") as repository:
        again = merge(repository, "again")
        assert again.read_bytes == first.read_bytes
        assert contents(repository, again) == contents(repository, first)
