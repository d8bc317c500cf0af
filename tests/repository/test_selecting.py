"""Which commits are shown, and how much each of them changed."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergegit import Repository
from mergegit.objects import Commit, CommitId, ManifestId
from mergegit.repository.selecting import (
    ChangeCount,
    Selection,
    changed_names,
    count_changes,
    nearest_shown,
    selected,
)
from tests.adapters import save_adapter
from tests.families import Family, base_tensors, expert_tensors, save_checkpoint
from tests.repository.conftest import AUTHOR

NORM = "model.norm.weight"
EMBED = "model.embed_tokens.weight"
UP = "model.layers.0.mlp.up_proj.weight"


def titles(repository: Repository, selection: Selection) -> list[str]:
    found = selected(repository.log(), repository.store, selection)
    return [commit.title for _, commit in found]


def changed(repository: Repository, ref: str) -> set[str]:
    return set(changed_names(repository.store, repository.commit(ref)))


def count(repository: Repository, ref: str) -> ChangeCount:
    return count_changes(repository.store, repository.commit(ref))


# -- which -----------------------------------------------------------------------------------------


def test_nothing_said_is_everything(merged: Repository) -> None:
    assert Selection().is_all
    assert titles(merged, Selection()) == [commit.title for _, commit in merged.log()]


def test_by_method(merged: Repository) -> None:
    recipe = merged.recipe(["math", "prose"], method="ties", parameters={"density": 0.5})
    merged.merge(merged.plan(recipe), branch="voted")
    assert titles(merged, Selection(method="ties")) == ["merge math, prose by ties"]
    assert titles(merged, Selection(method="dare_ties")) == []


def test_by_expert(merged: Repository) -> None:
    merged.merge(merged.plan(merged.recipe(["prose"])), branch="prosaic")
    prose = merged.resolve("prose")
    assert titles(merged, Selection(expert=prose)) == ["merge prose by task_arithmetic"]
    assert titles(merged, Selection(expert=merged.resolve("base"))) == []


def test_by_time_and_author(tiny: Repository, tiny_family: Family) -> None:
    tiny._clock = lambda: 2_000_000_000
    tiny.author = "Grace <grace@example.org>"
    tiny.add(tiny_family.experts[1], name="math")
    assert titles(tiny, Selection(since=2_000_000_000)) == ["add math"]
    assert titles(tiny, Selection(since=2_000_000_001)) == []
    assert titles(tiny, Selection(author="grace@")) == ["add math"]
    assert titles(tiny, Selection(author="GRACE")) == ["add math"]
    assert titles(tiny, Selection(author="ada", since=2_000_000_000)) == []


def test_by_names_of_tensors(repository: Repository, family: Family, tmp_path: Path) -> None:
    repository.add(family.base)
    tensors = base_tensors()
    only = {**tensors, UP: expert_tensors(tensors, "sparse")[UP]}
    repository.add(save_checkpoint(tmp_path / "sparse", only))
    assert titles(repository, Selection(names=("up_proj",))) == ["add sparse", "add base"]
    assert titles(repository, Selection(names=("lm_head",))) == ["add base"]
    assert titles(repository, Selection(names=("lm_head", "layers.0."))) == [
        "add sparse", "add base",
    ]  # fmt: skip
    assert titles(repository, Selection(names=("nothing",))) == []


# -- how much --------------------------------------------------------------------------------------


def test_a_root_has_everything_first(merged: Repository) -> None:
    assert changed(merged, "base") == set(merged.manifest("base").tensors)
    assert count(merged, "base") == ChangeCount(3, 0, 3, 0, 3, 0, False)


def test_an_expert_changes_what_has_another_id(tiny: Repository) -> None:
    base, math = (tiny.manifest(ref).tensors for ref in ("base", "math"))
    assert changed(tiny, "math") == {name for name in base if base[name] != math[name]}
    assert count(tiny, "math") == ChangeCount(3, 2, 0, 0, 3, 1, True)


def test_blocks_are_counted_where_they_stand(
    repository: Repository, family: Family, tmp_path: Path
) -> None:
    repository.add(family.base)
    tensors = base_tensors()
    moved = tensors[UP].clone()
    moved[-1] += 0.01
    repository.add(save_checkpoint(tmp_path / "dotted", {**tensors, UP: moved}))
    found = count(repository, "dotted")
    assert (found.changed, found.blocks - found.shared) == (1, 1)


def test_tensors_come_and_go(repository: Repository, family: Family, tmp_path: Path) -> None:
    repository.add(family.base)
    tensors = base_tensors()
    del tensors[NORM]
    other = {**tensors, "model.norm.bias": tensors["lm_head.weight"][0]}
    repository.add(save_checkpoint(tmp_path / "other", other), base="base")
    assert changed(repository, "other") == {NORM, "model.norm.bias"}
    found = count(repository, "other")
    assert (found.changed, found.added, found.removed) == (0, 1, 1)


def test_another_dtype_shares_no_block(
    repository: Repository, family: Family, tmp_path: Path
) -> None:
    import torch

    repository.add(family.base)
    zeros = {name: torch.zeros_like(tensor) for name, tensor in base_tensors().items()}
    repository.add(save_checkpoint(tmp_path / "zero", zeros), base="base")
    repository.add(save_checkpoint(tmp_path / "half", zeros, torch.float16), base="zero")
    found = count(repository, "half")
    assert (found.changed, found.shared) == (found.tensors, 0)


def test_an_adapter_changes_what_it_holds(
    repository: Repository, family: Family, tmp_path: Path
) -> None:
    repository.add(family.base)
    base = {name: tensor.bfloat16() for name, tensor in base_tensors().items()}
    repository.add(save_adapter(tmp_path / "chat", base, modules=["q_proj"]), base="base")
    assert all("q_proj" in name for name in changed(repository, "chat"))
    assert titles(repository, Selection(names=("up_proj",))) == ["add base"]
    found = count(repository, "chat")
    assert (found.removed, found.shared, found.has_parent) == (0, 0, False)


# -- graphs of what is shown -----------------------------------------------------------------------

Graph = dict[str, list[str]]


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    names = [f"c{i}" for i in range(draw(st.integers(1, 10)))]
    older = [names[i + 1 :] for i in range(len(names))]
    return {
        name: draw(st.lists(st.sampled_from(rest), max_size=3, unique=True)) if rest else []
        for name, rest in zip(names, older, strict=True)
    }


def nearest(graph: Graph, shown: set[str]) -> dict[str, list[str]]:
    commits = [
        (
            CommitId(name.encode()),
            Commit(ManifestId(b""), tuple(CommitId(p.encode()) for p in parents), AUTHOR, 0, name),
        )
        for name, parents in graph.items()
    ]
    found = nearest_shown(commits, lambda commit: commit.decode() in shown)
    return {name.decode(): [p.decode() for p in parents] for name, parents in found.items()}


def reached(graph: Graph, name: str) -> set[str]:
    below = set(graph[name])
    for parent in graph[name]:
        below |= reached(graph, parent)
    return below


def test_what_is_not_shown_is_passed_over() -> None:
    graph = {"m": ["b", "x", "y"], "x": ["b"], "y": ["x"], "b": ["r"], "r": []}
    assert nearest(graph, {"m", "x", "r"}) == {
        "m": ["r", "x"], "x": ["r"], "y": ["x"], "b": ["r"], "r": [],
    }  # fmt: skip


@given(graphs(), st.data())
def test_what_descends_from_what_stays_as_it_is(graph: Graph, data: st.DataObject) -> None:
    shown = set(data.draw(st.lists(st.sampled_from(sorted(graph)))))
    found = nearest(graph, shown)
    for name in shown:
        assert set(found[name]) <= shown
        assert reached({n: found[n] for n in shown}, name) == reached(graph, name) & shown


@given(graphs())
def test_where_all_is_shown_nothing_changes(graph: Graph) -> None:
    assert nearest(graph, set(graph)) == graph


@pytest.mark.parametrize("shown", [set(), {"r"}])
def test_what_has_no_shown_ancestors_is_a_root(shown: set[str]) -> None:
    assert nearest({"a": ["b"], "b": [], "r": []}, shown | {"a"})["a"] == []
