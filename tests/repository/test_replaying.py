"""`replay` and `distance`: merges made again, and held against what is stored."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from mergegit import Repository
from mergegit.errors import BadBudget, BadRecipe
from mergegit.merge.mergekit_yaml import read_documents
from mergegit.merge.methods import METHODS
from mergegit.objects import Commit, Manifest
from mergegit.repository.replaying import fitted
from tests.adapters import save_adapter
from tests.families import EXPERTS, Family, base_tensors
from tests.layered import make_family as make_layered
from tests.merge.examples import experts_for, needed_parameters
from tests.repository.test_merging import read_checkpoint
from tests.vocabularies import make_chat_family

BIG = "model.layers.0.mlp.up_proj.weight"


def merge(repository: Repository, branch: str, budget: str | None = None, **recipe: Any) -> None:
    method = recipe.setdefault("method", "task_arithmetic")
    recipe["parameters"] = {**needed_parameters(method), **recipe.get("parameters", {})}
    asked = repository.recipe(experts_for(method, EXPERTS), **recipe)
    repository.merge(repository.plan(asked, budget=budget, anew=True), branch=branch)


def norm(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor], *names: str) -> float:
    return math.sqrt(
        sum(
            float((one[name].double() - other[name].double()).square().sum())
            for name in names or one
        )
    )


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory, family: Family) -> Any:
    """The family, and merges of it at 10% and in full."""
    path = tmp_path_factory.mktemp("replaying") / "repository"
    with Repository.init(path, author="Ada <ada@example.org>") as repository:
        for checkpoint in (family.base, *family.experts):
            repository.add(checkpoint)
        merge(repository, "tenth", "10%")
        merge(repository, "full")
        yield repository


def forged(repository: Repository, ref: str, changed: Mapping[str, str], branch: str) -> Manifest:
    """A branch with a merge's commit, some of whose tensors are those of other refs."""
    commit, manifest = repository.commit(ref), repository.manifest(ref)
    tensors = dict(manifest.tensors)
    for name, other in changed.items():
        tensors[name] = repository.manifest(other).tensors[name]
    manifest = dataclasses.replace(manifest, tensors=tensors)
    with repository.store.transaction() as transaction:
        manifest_id = transaction.write_manifest(manifest)
        made = transaction.write_commit(dataclasses.replace(commit, manifest=manifest_id))
        transaction.publish()
    repository.create_branch(branch, made.hex())
    return manifest


# -- replay --------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_the_same_bits_again(method: str, tiny: Repository) -> None:
    merge(tiny, "merged", "50%", method=method)
    report = tiny.replay("merged")
    assert report.is_same, (report.tensors, report.files)
    assert report.replayed == tiny.commit("merged").manifest
    assert (report.tensors, report.files, report.is_refitted) == ((), (), False)


def test_it_reads_what_the_plan_lists_though_all_is_remembered(zoo: Repository) -> None:
    report = zoo.replay("tenth")
    plan = zoo.saved_plan("tenth").plan
    assert report.is_same
    assert report.read_bytes == plan.planned_bytes > 0
    assert report.base_read_bytes == plan.base_bytes


def test_it_leaves_the_repository_as_it_is(zoo: Repository) -> None:
    def files() -> set[tuple[str, int]]:
        root = zoo.store.location.root
        return {(str(p), p.stat().st_size) for p in root.rglob("*") if "catalog" not in p.parts}

    before, refs, objects = files(), zoo.branches(), zoo.status().objects
    zoo.replay("tenth")
    zoo.distance("tenth")
    assert (files(), zoo.branches(), zoo.status().objects) == (before, refs, objects)


def test_threads_change_nothing(zoo: Repository) -> None:
    with Repository.open(zoo.store.location.root.parent, threads=1) as alone:
        assert alone.replay("tenth").replayed == zoo.replay("tenth").replayed


def test_a_merge_with_another_dtype_has_the_same_bits_again(zoo: Repository) -> None:
    merge(zoo, "float32", "30%", dtype="F32")
    assert zoo.replay("float32").is_same


def test_what_is_not_what_the_plan_makes_is_told_by_tensor(zoo: Repository, tmp_path: Path) -> None:
    forged(zoo, "tenth", {BIG: "full", "lm_head.weight": "base"}, "forged")
    report = zoo.replay("forged")
    assert not report.is_same
    assert report.replayed == zoo.commit("tenth").manifest
    assert [(tensor.name, tensor.blocks) for tensor in report.tensors] == [
        ("lm_head.weight", 1), (BIG, 2),
    ]  # fmt: skip
    assert report.tensors[0].error is None  # it is the base's, and has no delta
    for ref in ("base", "tenth", "full"):
        zoo.checkout(ref, tmp_path / ref)
    base, tenth, full = (read_checkpoint(tmp_path / ref) for ref in ("base", "tenth", "full"))
    wanted = norm(full, tenth, BIG) / norm(full, base, BIG)
    assert report.tensors[1].error == pytest.approx(wanted, rel=1e-6)


def test_other_files_that_differ_are_told(zoo: Repository) -> None:
    commit, manifest = zoo.commit("tenth"), zoo.manifest("tenth")
    files = {**manifest.files, "README.md": manifest.files["config.json"]}
    with zoo.store.transaction() as transaction:
        manifest_id = transaction.write_manifest(dataclasses.replace(manifest, files=files))
        made = transaction.write_commit(dataclasses.replace(commit, manifest=manifest_id))
        transaction.publish()
    report = zoo.replay(made.hex())
    assert not report.is_same
    assert (report.tensors, report.files) == ((), ("README.md",))


def test_what_is_no_merge_can_not_be_replayed(zoo: Repository) -> None:
    for verb in (zoo.replay, zoo.distance):
        with pytest.raises(BadRecipe, match="math is no merge"):
            verb("math")


def test_methods_on_whole_matrices_say_so(tiny: Repository) -> None:
    for method, portable in (("tsv", False), ("task_arithmetic", True)):
        merge(tiny, method, method=method)
        assert tiny.replay(method).is_portable is portable


# -- stored otherwise ----------------------------------------------------------------------------


@pytest.fixture
def packed(loaded: Repository) -> Repository:
    merge(loaded, "tenth", "10%")
    merge(loaded, "full")
    return loaded


def test_full_merges_are_replayed_from_blocks_in_any_form(packed: Repository) -> None:
    packed.repack(EXPERTS, encoding="raw")
    report = packed.replay("full")
    assert report.is_same
    assert report.is_refitted


def test_layers_that_are_no_more_are_told_and_come_back(packed: Repository) -> None:
    packed.repack(EXPERTS, encoding="raw")
    with pytest.raises(BadRecipe) as error:
        packed.replay("tenth")
    assert "can't be read any more" in error.value.message
    assert "mergegit repack math code prose" in error.value.hint
    packed.repack(EXPERTS)
    report = packed.replay("tenth")
    assert report.is_same
    assert not report.is_refitted


def test_what_was_plain_is_read_whole_when_it_is_a_delta(
    repository: Repository, family: Family
) -> None:
    repository.add(family.base)
    for expert in family.experts:
        repository.add(expert, encoding="raw")
    merge(repository, "merged", "40%")
    plan = repository.saved_plan("merged").plan
    assert {layers for expert in plan.experts for layers in expert.layers} == {0, 1}
    repository.repack(EXPERTS)
    report = repository.replay("merged")
    assert report.is_same
    assert report.is_refitted
    assert report.read_bytes < plan.planned_bytes


def test_one_of_the_experts_in_another_form_is_no_hindrance(packed: Repository) -> None:
    packed.repack(["code"], encoding="raw")
    with pytest.raises(BadRecipe):
        packed.replay("tenth")
    assert packed.replay("full").is_same


def test_a_plan_of_other_blocks_fits_nothing(packed: Repository) -> None:
    plan = packed.saved_plan("tenth").plan
    planner = packed.planner(packed.recipe(EXPERTS))
    assert fitted(plan, planner) == plan
    shorter = [dataclasses.replace(e, layers=e.layers[:-1]) for e in plan.experts]
    assert fitted(dataclasses.replace(plan, experts=tuple(shorter)), planner) is None
    others = dataclasses.replace(plan, tensors=plan.tensors[::-1])
    assert fitted(others, planner) is None


# -- distance ------------------------------------------------------------------------------------


def test_the_distance_is_that_of_the_two_models(zoo: Repository, tmp_path: Path) -> None:
    for ref in ("base", "tenth", "full"):
        zoo.checkout(ref, tmp_path / ref)
    base, tenth, full = (read_checkpoint(tmp_path / ref) for ref in ("base", "tenth", "full"))
    report = zoo.distance("tenth", budget="100%")
    assert report.error == pytest.approx(norm(tenth, full) / norm(full, base), rel=1e-6)
    plan = zoo.saved_plan("tenth").plan
    assert report.predicted_error == plan.predicted_error
    assert report.error == pytest.approx(plan.predicted_error, rel=0.1)
    assert report.own_planned_bytes == plan.planned_bytes < report.planned_bytes
    assert report.read_bytes == report.planned_bytes
    for tensor in report.tensors:
        assert tensor.difference == pytest.approx(norm(tenth, full, tensor.name), rel=1e-6)
        assert tensor.norm == pytest.approx(norm(full, base, tensor.name), rel=1e-6)
    errors = [tensor.error for tensor in report.tensors]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 0.0
    assert {tensor.name for tensor in report.tensors} == set(plan.tensors)


def test_a_full_merge_is_no_distance_from_itself(zoo: Repository) -> None:
    report = zoo.distance("full")
    assert (report.error, {tensor.blocks for tensor in report.tensors}) == (0.0, {0})


def test_a_merge_may_be_held_against_a_smaller_budget(zoo: Repository) -> None:
    report = zoo.distance("full", budget="0")
    assert report.error == math.inf
    assert report.read_bytes == 0
    with pytest.raises(BadBudget):
        zoo.distance("full", budget="much")


def test_a_merge_without_a_plan_is_no_merge(zoo: Repository) -> None:
    commit: Commit = dataclasses.replace(zoo.commit("full"), plan=None)
    with zoo.store.transaction() as transaction:
        made = transaction.write_commit(commit)
        transaction.publish()
    with pytest.raises(BadRecipe):
        zoo.replay(made.hex())


# -- merges of other kinds -----------------------------------------------------------------------


def test_adapters_are_computed_again(
    repository: Repository, family: Family, tmp_path: Path
) -> None:
    base = {name: tensor.bfloat16() for name, tensor in base_tensors().items()}
    save_adapter(tmp_path / "chat", base, saved=["model.norm.weight"], seed="chat")
    repository.add(family.base)
    repository.add(family.experts[0])
    repository.add(tmp_path / "chat", base="base")
    recipe = repository.recipe(["chat", "math"])
    repository.merge(repository.plan(recipe, budget="40%"), branch="merged")
    report = repository.replay("merged")
    assert report.is_same
    assert report.read_bytes == repository.saved_plan("merged").plan.planned_bytes
    assert 0.0 < repository.distance("merged").error < 1.0


def test_layers_in_another_order_are_stacked_again(repository: Repository, tmp_path: Path) -> None:
    for path in make_layered(tmp_path / "layered"):
        repository.add(path)
    document = read_documents(
        "merge_method: passthrough\nslices:\n"
        "- sources: [{model: math, layer_range: [0, 2]}]\n"
        "- sources: [{model: code, layer_range: [1, 4]}]\n"
    )[0]
    plan = repository.plan(repository.recipe_of(document))
    repository.merge(plan, branch="stacked")
    assert repository.replay("stacked").is_same
    assert repository.distance("stacked").error == 0.0


def test_vocabularies_are_aligned_again(repository: Repository, tmp_path: Path) -> None:
    for name, path in make_chat_family(tmp_path / "chat").items():
        base = name == "base"
        repository.add(path, base=None if base else "base", no_base=base)
    recipe = repository.recipe(["chat", "code"], tokenizer_source="union")
    repository.merge(repository.plan(recipe, budget="10%"), branch="union")
    assert repository.replay("union").is_same
    assert 0.0 < repository.distance("union").error < 1.0
    repository.gc(expire=0, grace=0)  # what was aligned for the merge, no ref reaches
    assert repository.replay("union").is_same


def test_what_is_otherwise_here_is_told(zoo: Repository) -> None:
    assert zoo.replay("tenth").elsewhere == ()
    commit = zoo.commit("tenth")
    assert commit.execution is not None
    software = {**commit.execution["software"], "numpy": "1.0.0"}
    execution = {**commit.execution, "software": software}
    with zoo.store.transaction() as transaction:
        made = transaction.write_commit(dataclasses.replace(commit, execution=execution))
        transaction.publish()
    report = zoo.replay(made.hex())
    assert report.is_same
    assert [fact.split(",")[0] for fact in report.elsewhere] == ["numpy 1.0.0"]
