"""`verify`: lineages that are sound, and what is found where they are not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from mergegit import Repository
from mergegit.errors import UnknownRef
from mergegit.objects import Commit, CommitId, Plan
from mergegit.repository.verifying import VerifyReport
from tests.families import EXPERTS, Family
from tests.repository.damage import flip, records_of


def problems(report: VerifyReport) -> dict[str, tuple[str, ...]]:
    """What is wrong, by the title of the commit."""
    return {str(found.title): found.problems for found in report.commits if found.problems}


def forged(
    repository: Repository,
    change: Callable[[Commit], Commit],
    change_plan: Callable[[Plan], Plan] = lambda plan: plan,
) -> str:
    """A commit like that of ``merged``, which says something else of itself."""
    commit = repository.commit("merged")
    assert commit.plan is not None
    with repository.store.transaction() as transaction:
        plan = transaction.write_plan(change_plan(repository.store.plan(commit.plan)))
        made = transaction.write_commit(change(dataclasses.replace(commit, plan=plan)))
        transaction.publish()
    return made.hex()


# -- sound -----------------------------------------------------------------------------------------


def test_a_lineage_is_checked_from_a_commit_to_its_roots(merged: Repository) -> None:
    report = merged.verify("merged")
    assert report.is_sound
    lineage = list(merged.log("merged"))
    assert [found.commit for found in report.commits] == [commit_id for commit_id, _ in lineage]
    assert [found.is_merge for found in report.commits] == [True, *[False] * 4]
    head = report.commits[0]
    assert head.title == "merge math, code by task_arithmetic"
    manifest = merged.manifest("merged")
    assert head.tensors == len(manifest.tensors)
    assert head.nbytes == sum(merged.tensor(t).nbytes for t in set(manifest.tensor_ids()))
    assert head.replay is None


def test_what_is_no_ancestor_is_not_looked_at(merged: Repository) -> None:
    assert len(merged.verify("base").commits) == 1
    assert merged.resolve("prose") not in {f.commit for f in merged.verify("code").commits}


def test_every_byte_is_read_once(merged: Repository) -> None:
    report = merged.verify("merged")
    again = merged.verify("merged")
    assert [f.checked_bytes for f in again.commits] == [f.checked_bytes for f in report.commits]
    assert merged.verify("base").commits[0].checked_bytes > report.commits[-1].checked_bytes > 0


def test_merges_are_made_again_where_that_is_asked_for(merged: Repository) -> None:
    report = merged.verify("merged", replay=True)
    assert report.is_sound
    replays = [found.replay for found in report.commits]
    assert replays[0] is not None
    assert replays[0].is_same
    assert replays[1:] == [None] * 4


def test_merges_of_merges_are_sound(merged: Repository) -> None:
    recipe = merged.recipe(["merged", "prose"], method="ties", parameters={"density": 0.5})
    merged.merge(merged.plan(recipe, budget="50%"), branch="more")
    report = merged.verify("more", replay=True)
    assert report.is_sound
    assert sum(found.replay is not None for found in report.commits) == 2


def test_a_ref_must_be_there(merged: Repository) -> None:
    with pytest.raises(UnknownRef):
        merged.verify("nothing")


# -- damage ----------------------------------------------------------------------------------------


def test_a_damaged_block_is_found_where_it_is_needed(merged: Repository) -> None:
    raw = max(records_of(merged, "raw"), key=lambda record: record.header.length)
    flip(raw.pack, raw.offset)
    block = raw.header.key.hex()
    report = merged.verify("merged")
    assert not report.is_sound
    assert any(block[:10] in problem for found in report.commits for problem in found.problems)
    sound = {found.title for found in report.commits if found.is_sound}
    assert len(sound) < len(report.commits)


def test_damage_elsewhere_is_no_matter(merged: Repository) -> None:
    """A commit that needs nothing of what is damaged is sound."""
    tensors = {merged.tensor(t).block(0) for t in set(merged.manifest("base").tensor_ids())}
    others = [r for r in records_of(merged, "layer 4") if r.header.key not in tensors]
    for record in others:
        flip(record.pack, record.offset)
    assert merged.verify("base").is_sound
    assert not merged.verify("merged").is_sound


@pytest.mark.parametrize("word", ["commit", "manifest", "plan", "tensor"])
def test_damaged_objects_are_found(word: str, merged: Repository) -> None:
    wanted: Mapping[str, Any] = {
        "commit": merged.resolve("base"),
        "manifest": merged.commit("merged").manifest,
        "plan": merged.commit("merged").plan,
        "tensor": merged.manifest("merged").tensors["model.embed_tokens.weight"],
    }
    record = next(r for r in records_of(merged, word) if r.header.key == wanted[word])
    flip(record.pack, record.offset)
    merged.store.forget()
    report = merged.verify("merged")
    assert not report.is_sound
    found = [found for found in report.commits if not found.is_sound]
    if word == "commit":
        assert (found[-1].commit, found[-1].title) == (merged.resolve("base"), None)
        assert "what it was merged from can't be read" in found[0].problems[0]
    else:
        assert found[0].title == "merge math, code by task_arithmetic"


# -- merges that do not add up ---------------------------------------------------------------------


def test_a_recipe_that_is_not_the_plans(merged: Repository) -> None:
    def change(commit: Commit) -> Commit:
        assert commit.recipe is not None
        return dataclasses.replace(commit, recipe={**commit.recipe, "seed": 7})

    report = merged.verify(forged(merged, change))
    assert list(problems(report).values()) == [("its plan is that of another recipe",)]


def test_other_parents(merged: Repository) -> None:
    def change(commit: Commit) -> Commit:
        return dataclasses.replace(commit, parents=commit.parents[:2])

    report = merged.verify(forged(merged, change))
    assert list(problems(report).values()) == [
        ("its parents are not the base and the experts of its recipe",)
    ]


def test_more_bytes_than_the_plan_lists(merged: Repository) -> None:
    def change(commit: Commit) -> Commit:
        assert commit.execution is not None
        return dataclasses.replace(commit, execution={**commit.execution, "read_bytes": 1})

    report = merged.verify(forged(merged, change))
    assert list(problems(report).values()) == [("it did not read what its plan lists",)]


def test_a_plan_beyond_its_budget(merged: Repository) -> None:
    def change(plan: Plan) -> Plan:
        return dataclasses.replace(plan, budget_bytes=plan.planned_bytes - 1)

    report = merged.verify(forged(merged, lambda commit: commit, change))
    assert list(problems(report).values()) == [("its plan exceeds its budget",)]


def test_a_plan_of_other_tensors(merged: Repository) -> None:
    def change(plan: Plan) -> Plan:
        return dataclasses.replace(plan, tensors=plan.tensors[:-1])

    report = merged.verify(forged(merged, lambda commit: commit, change))
    assert list(problems(report).values()) == [
        ("its plan merges other tensors than its recipe does",)
    ]


def test_tensors_of_another_shape(merged: Repository) -> None:
    manifest = merged.manifest("merged")
    name = "model.norm.weight"
    tensors = {**manifest.tensors, name: manifest.tensors["model.layers.0.mlp.up_proj.weight"]}
    with merged.store.transaction() as transaction:
        other = transaction.write_manifest(dataclasses.replace(manifest, tensors=tensors))
        transaction.publish()
    ref = forged(merged, lambda commit: dataclasses.replace(commit, manifest=other))
    assert list(problems(merged.verify(ref)).values()) == [
        ("tensor model.norm.weight should be BF16 [8]",)
    ]


def test_other_contents_are_found_by_merging_again(merged: Repository, tiny_family: Family) -> None:
    manifest = merged.manifest("merged")
    name = "model.embed_tokens.weight"
    tensors = {**manifest.tensors, name: merged.manifest("prose").tensors[name]}
    with merged.store.transaction() as transaction:
        other = transaction.write_manifest(dataclasses.replace(manifest, tensors=tensors))
        transaction.publish()
    ref = forged(merged, lambda commit: dataclasses.replace(commit, manifest=other))
    assert merged.verify(ref).is_sound
    assert list(problems(merged.verify(ref, replay=True)).values()) == [
        (f"replayed it comes out otherwise: {name}",)
    ]


def test_a_merge_that_can_not_be_made_again(loaded: Repository) -> None:
    recipe = loaded.recipe(EXPERTS)
    loaded.merge(loaded.plan(recipe, budget="10%"), branch="tenth")
    loaded.repack(EXPERTS, encoding="raw")
    assert loaded.verify("tenth").is_sound
    found = problems(loaded.verify("tenth", replay=True))
    assert len(found) == 1
    assert "can't be read any more" in next(iter(found.values()))[0]


def test_a_recipe_without_a_plan(merged: Repository) -> None:
    ref = forged(merged, lambda commit: dataclasses.replace(commit, plan=None))
    assert list(problems(merged.verify(ref)).values()) == [("it has a recipe alone",)]


def test_parents_that_are_not_there(merged: Repository) -> None:
    gone = CommitId(b"\x01" * 32)
    commit = dataclasses.replace(merged.commit("base"), parents=(gone,))
    with merged.store.transaction() as transaction:
        made = transaction.write_commit(commit)
        transaction.publish()
    report = merged.verify(made.hex())
    assert [(f.commit, f.is_sound) for f in report.commits] == [(made, True), (gone, False)]
