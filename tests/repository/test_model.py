"""The repository beside a model of it in memory, through any sequence of verbs."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)
from safetensors.torch import load_file

from mergegit import Repository
from mergegit.errors import RefConflict, UnknownRef
from mergegit.objects import CommitId
from tests.families import tiny_checkpoint
from tests.memory import directory_in_memory
from tests.trees import tree_of

NAMES = ("one", "two", "three", "a/b", "a/c")
CHECKPOINTS = 4


@dataclass(slots=True)
class ModelCommit:
    """What the model knows of a commit: its files, or its weights, and its parents."""

    parents: tuple[CommitId, ...]
    weights: dict[str, torch.Tensor]
    tree: dict[str, bytes | None] | None = None


@dataclass(slots=True)
class Model:
    commits: dict[CommitId, ModelCommit] = field(default_factory=dict)
    branches: dict[str, CommitId] = field(default_factory=dict)
    tags: dict[str, CommitId] = field(default_factory=dict)

    def reachable(self) -> set[CommitId]:
        pending = [*self.branches.values(), *self.tags.values()]
        seen: set[CommitId] = set()
        while pending:
            commit = pending.pop()
            if commit not in seen:
                seen.add(commit)
                pending += self.commits[commit].parents
        return seen

    def descends(self, commit: CommitId, ancestor: CommitId) -> bool:
        return commit == ancestor or any(
            self.descends(parent, ancestor) for parent in self.commits[commit].parents
        )

    def has_room(self, refs: dict[str, CommitId], name: str) -> bool:
        return not any(
            other.startswith(f"{name}/") or name.startswith(f"{other}/") for other in refs
        )


def merge_weights(
    base: dict[str, torch.Tensor], experts: list[dict[str, torch.Tensor]], weight: float
) -> dict[str, torch.Tensor]:
    """Task arithmetic in float32, rounded once."""
    out = {}
    for name, tensor in base.items():
        delta = torch.zeros(tensor.shape)
        for expert in experts:
            delta += weight * (expert[name].float() - tensor.float())
        out[name] = (tensor.float() + delta).to(tensor.dtype)
    return out


class RepositoryMachine(RuleBasedStateMachine):
    refs = Bundle("refs")

    @initialize(target=refs)
    def begin(self) -> str:
        self.place = directory_in_memory()
        self.root = self.place.__enter__()
        self.clock = 0
        self.model = Model()
        self.checkpoints = [tiny_checkpoint(self.root / "base")]
        self.checkpoints += [
            tiny_checkpoint(self.root / f"expert{k}", moved=k) for k in range(1, CHECKPOINTS)
        ]
        self.trees = [tree_of(path) for path in self.checkpoints]
        self.weights = [load_file(path / "model.safetensors") for path in self.checkpoints]
        Repository.init(self.root / "r").close()
        self.open()
        self.add(0, "base")
        return "base"

    def open(self) -> None:
        self.repository = Repository.open(self.root / "r")
        self.repository._clock = self.tick

    def tick(self) -> int:
        self.clock += 1
        return self.clock

    def teardown(self) -> None:
        if hasattr(self, "root"):
            assert self.repository.fsck().problems == []
            self.repository.close()
            self.place.__exit__(None, None, None)

    def known(self, ref: str) -> CommitId | None:
        return self.model.branches.get(ref, self.model.tags.get(ref))

    @property
    def base(self) -> CommitId | None:
        """The root commit, if any ref still reaches it."""
        roots = [c for c in self.model.reachable() if not self.model.commits[c].parents]
        return roots[0] if roots else None

    # -- verbs -------------------------------------------------------------------------------

    @precondition(lambda self: self.base is not None)
    @rule(target=refs, number=st.integers(0, CHECKPOINTS - 1), name=st.sampled_from(NAMES))
    def add(self, number: int, name: str) -> object:
        model = self.model
        tip = model.branches.get(name)
        if tip is None and not model.has_room(model.branches, name):
            try:
                self.repository.add(self.checkpoints[number], name=name)
            except RefConflict:
                return multiple()
            raise AssertionError("a name stands beside its own directory")
        base = self.base
        report = self.repository.add(self.checkpoints[number], name=name)
        same = [
            commit
            for commit in (model.reachable() if tip is None else {tip})
            if model.commits[commit].tree == self.trees[number]
        ]
        if same:
            assert report.commit in same
            assert report.is_new == (tip != report.commit)
            assert report.new_bytes == 0
        else:
            parents = [base] if base is not None else []
            if tip is not None and tip not in parents:
                parents.append(tip)
            assert self.repository.store.commit(report.commit).parents == tuple(parents)
            model.commits[report.commit] = ModelCommit(
                tuple(parents), self.weights[number], self.trees[number]
            )
        model.branches[name] = report.commit
        return name

    @precondition(lambda self: self.base is not None)
    @rule(
        target=refs,
        experts=st.lists(refs, min_size=1, max_size=3),
        weight=st.sampled_from([0.5, 1.0]),
        name=st.sampled_from(NAMES),
    )
    def merge(self, experts: list[str], weight: float, name: str) -> object:
        model = self.model
        commits = [self.known(ref) for ref in experts]
        if None in commits:
            return multiple()
        recipe = self.repository.recipe(
            experts, base=self.base.hex(), parameters={"weight": weight}
        )  # type: ignore[union-attr]
        plan = self.repository.plan(recipe)
        # A model that is named twice, or is the base, is a parent once.
        parents = tuple(dict.fromkeys((self.base, *commits)))
        tip = model.branches.get(name)
        forward = (
            tip is None
            or tip in self.merged_so(plan.id, parents)
            or any(model.descends(parent, tip) for parent in parents)  # type: ignore[arg-type]
        )
        room = tip is not None or model.has_room(model.branches, name)
        if not forward or not room:
            try:
                self.repository.merge(plan, branch=name)
            except RefConflict:
                return multiple()
            raise AssertionError("a branch moved backwards")
        report = self.repository.merge(plan, branch=name)
        assert report.read_bytes == (plan.read_bytes if report.is_new else 0)
        if report.is_new:
            assert self.repository.store.commit(report.commit).parents == parents
            model.commits[report.commit] = ModelCommit(
                parents,  # type: ignore[arg-type]
                merge_weights(
                    model.commits[self.base].weights,  # type: ignore[index]
                    [model.commits[commit].weights for commit in commits],  # type: ignore[index]
                    weight,
                ),
            )
        else:
            assert report.commit == tip
        model.branches[name] = report.commit
        return name

    def merged_so(self, plan: bytes, parents: tuple[object, ...]) -> set[CommitId]:
        return {
            commit_id
            for commit_id, commit in self.repository.log()
            if commit.plan == plan and commit.parents == parents
        }

    @rule(target=refs, ref=refs, name=st.sampled_from(NAMES), tag=st.booleans())
    def create(self, ref: str, name: str, tag: bool) -> object:
        refs = self.model.tags if tag else self.model.branches
        make = self.repository.create_tag if tag else self.repository.create_branch
        commit = self.known(ref)
        try:
            made = make(name, ref)
        except UnknownRef:
            assert commit is None
            return multiple()
        except RefConflict:
            assert name in refs or not self.model.has_room(refs, name)
            return multiple()
        assert name not in refs
        assert made == commit
        refs[name] = made
        return name

    @rule(ref=consumes(refs), tag=st.booleans())
    def delete(self, ref: str, tag: bool) -> None:
        refs = self.model.tags if tag else self.model.branches
        delete = self.repository.delete_tag if tag else self.repository.delete_branch
        try:
            commit = delete(ref)
        except UnknownRef:
            assert ref not in refs
            return
        assert refs.pop(ref) == commit

    @rule(target=refs, old=consumes(refs), new=st.sampled_from(NAMES))
    def rename(self, old: str, new: str) -> object:
        branches = self.model.branches
        try:
            commit = self.repository.rename_branch(old, new)
        except UnknownRef:
            assert old not in branches
            return multiple()
        except RefConflict:
            assert new in branches or not self.model.has_room(branches, new)
            return old
        assert new not in branches
        assert branches.pop(old) == commit
        branches[new] = commit
        return new

    @rule(ref=refs)
    def checkout(self, ref: str) -> None:
        commit = self.known(ref)
        target = self.root / "out"
        try:
            report = self.repository.checkout(ref, target)
        except UnknownRef:
            assert commit is None
            return
        assert commit is not None
        known = self.model.commits[commit]
        assert report.commit == commit
        if known.tree is not None:
            assert tree_of(target) == known.tree
        weights = load_file(target / "model.safetensors")
        assert weights.keys() == known.weights.keys()
        for name, tensor in known.weights.items():
            assert torch.equal(weights[name].view(torch.int16), tensor.view(torch.int16))
        shutil.rmtree(target)

    @rule(raw=st.booleans())
    def repack(self, raw: bool) -> None:
        self.repository.repack(encoding="raw" if raw else "delta")

    @rule(name=st.sampled_from(NAMES), ref=refs)
    def reset(self, name: str, ref: str) -> None:
        branches, commit = self.model.branches, self.known(ref)
        try:
            moved = self.repository.reset_branch(name, ref)
        except UnknownRef:
            assert commit is None or name not in branches
            return
        assert moved == (branches[name], commit)
        branches[name] = moved[1]

    @rule(everything=st.booleans())
    def gc(self, everything: bool) -> None:
        if everything:
            report = self.repository.gc(expire=0, grace=0)
            assert report.commits == len(self.model.reachable())
            assert report.trash_bytes == 0
        else:
            self.repository.gc()
        self.everything_is_there()

    def everything_is_there(self) -> None:
        """All that refs reach is sound, and comes back as it was."""
        assert self.repository.fsck().problems == []
        for commit in self.model.reachable():
            known = self.model.commits[commit]
            for name, tensor in self.repository.load(commit.hex()).items():
                assert torch.equal(tensor.view(torch.int16), known.weights[name].view(torch.int16))
            if known.tree is not None:
                self.repository.checkout(commit.hex(), self.root / "out")
                assert tree_of(self.root / "out") == known.tree
                shutil.rmtree(self.root / "out")

    @rule()
    def reopen(self) -> None:
        self.repository.close()
        self.open()

    @rule()
    def rebuild(self) -> None:
        self.repository.close()
        Repository.rebuild_catalog(self.root / "r")
        self.open()

    # -- what always holds -------------------------------------------------------------------

    @invariant()
    def refs_are_where_they_should_be(self) -> None:
        if hasattr(self, "root"):
            assert self.repository.branches() == self.model.branches
            assert self.repository.tags() == self.model.tags

    @invariant()
    def history_is_what_refs_reach(self) -> None:
        if hasattr(self, "root"):
            shown = [commit_id for commit_id, _ in self.repository.log()]
            assert len(shown) == len(set(shown))
            assert set(shown) == self.model.reachable()
            place = {commit_id: number for number, commit_id in enumerate(shown)}
            for commit_id, commit in self.repository.log():
                assert commit.parents == self.model.commits[commit_id].parents
                assert all(place[parent] > place[commit_id] for parent in commit.parents)

    @invariant()
    def nothing_temporary_is_left(self) -> None:
        if hasattr(self, "root"):
            assert list((self.root / "r" / ".mergegit" / "tmp").iterdir()) == []


RepositoryMachine.TestCase.settings = settings(
    max_examples=25,
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestRepository = RepositoryMachine.TestCase
