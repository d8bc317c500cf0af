"""Where commits come from and go to: bases that are inferred, parents, and the branches that merges
move."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from mergegit.checkpoint.adapter import WEIGHTS_FILE
from mergegit.checkpoint.adapter_settings import CONFIG_FILE
from mergegit.errors import Mismatch, NoBase, RefConflict
from mergegit.history import first_parents, is_ancestor, merge_bases, walk
from mergegit.objects import Commit, CommitId, Manifest, PlanId
from mergegit.repository.naming import ResolvedRef, short
from mergegit.storage.refs import check_name
from mergegit.storage.store import Store

if TYPE_CHECKING:
    from mergegit.merge.recipe import Recipe

_MAX_BRANCH: Final = 60


def all_commits(store: Store) -> Iterator[tuple[CommitId, Commit]]:
    """Every commit that refs reach, children before their parents."""
    starts = [*store.refs.all("heads").values(), *store.refs.all("tags").values()]
    return walk(starts, store.commit)


def name_of(store: Store, commit: CommitId) -> str:
    """A branch or tag at a commit, else its short id."""
    for refs in (store.refs.all("heads"), store.refs.all("tags")):
        for name, target in refs.items():
            if target == commit:
                return name
    return short(commit)


def infer_base(
    store: Store, shapes: Mapping[str, tuple[int, ...]], notes: list[str]
) -> ResolvedRef | None:
    """The one root commit with these tensors. Raises ``NoBase`` where there are several."""
    roots = [(i, commit) for i, commit in all_commits(store) if not commit.parents]
    fitting, near = [], []
    for commit_id, commit in roots:
        tensors = store.manifest(commit.manifest).tensors
        if tensors.keys() == shapes.keys() and all(
            store.tensor(tensor_id).shape == shapes[name] for name, tensor_id in tensors.items()
        ):
            fitting.append(commit_id)
        elif 2 * len(tensors.keys() & shapes.keys()) > len(shapes):
            near.append(commit_id)
    if len(fitting) > 1:
        names = ", ".join(name_of(store, commit_id) for commit_id in fitting)
        raise NoBase(
            f"several commits have the same tensor names and shapes: {names}",
            hint="say which is the base with --base REF, or add without one with --no-base",
        )
    if fitting:
        return ResolvedRef(name_of(store, fitting[0]), fitting[0])
    if near:
        names = ", ".join(name_of(store, commit_id) for commit_id in near[:3])
        notes.append(
            f"added without a base: {names} has other tensors or shapes; "
            "if it is the base all the same, say so with --base"
        )
    return None


def is_adapter(manifest: Manifest) -> bool:
    """Whether a commit holds an adapter and no model."""
    model = [shard.path for shard in manifest.shards if len(shard.strays) < len(shard.names)]
    return CONFIG_FILE in manifest.files and model == [WEIGHTS_FILE]


def is_adapter_directory(path: Path) -> bool:
    """Whether an adapter lies there, as far as the names of its files tell."""
    return (path / CONFIG_FILE).is_file() and (path / WEIGHTS_FILE).is_file()


def check_base(ref: str, manifest: Manifest) -> None:
    """Raises ``Mismatch`` where what is to be a base is an adapter."""
    if is_adapter(manifest):
        raise Mismatch(
            f"the base {ref} is an adapter, and no model", hint="choose another base with --base"
        )


def model_of(store: Store, found: ResolvedRef) -> ResolvedRef:
    """A commit that holds a model, or, of an adapter, the base that it stands on."""
    commit = store.commit(found.commit)
    while commit.parents and is_adapter(store.manifest(commit.manifest)):
        base = commit.parents[0]
        found, commit = ResolvedRef(name_of(store, base), base), store.commit(base)
    return found


def infer_adapter_base(
    store: Store, adapter: str, config: bytes, tip: CommitId | None, notes: list[str]
) -> ResolvedRef:
    """The base of the adapter that the branch holds, at ``tip``, else the branch or tag that its
    config names. Raises ``NoBase``."""
    if tip is not None and is_adapter(store.manifest(store.commit(tip).manifest)):
        return model_of(store, ResolvedRef(adapter, tip))
    try:
        named = str(json.loads(config).get("base_model_name_or_path") or "")
    except (ValueError, AttributeError, RecursionError):
        named = ""
    stem = named.rstrip("/").rpartition("/")[2]
    for refs in (store.refs.all("heads"), store.refs.all("tags")):
        for name in (named, stem):
            if name in refs:
                notes.append(f"its config names {named} as its base")
                return ResolvedRef(name, refs[name])
    said = f"its config names {named}, which" if named else "the model that it was trained on"
    raise NoBase(
        f"{adapter} is an adapter, and {said} is not in the repository",
        hint="say which commit it was trained on with --base REF",
    )


def merge_base(store: Store, experts: Sequence[ResolvedRef]) -> ResolvedRef:
    """The merge base of the experts; of one alone, its first parent. Raises ``NoBase``."""
    commits = list(dict.fromkeys(expert.commit for expert in experts))
    hint = "say which commit the experts were trained from with --base REF"
    if len(commits) == 1:
        parents = store.commit(commits[0]).parents
        if not parents:
            raise NoBase(f"{experts[0].name} was added without a base", hint=hint)
        return ResolvedRef(name_of(store, parents[0]), parents[0])
    bases = merge_bases(commits, store.commit)
    names = ", ".join(expert.name for expert in experts)
    if not bases:
        raise NoBase(f"{names} have no common ancestor", hint=hint)
    if len(bases) > 1:
        lines = [set(first_parents(commit, store.commit)) for commit in commits]
        own = [base for base in bases if all(base in line for line in lines)]
        # What was carried to another base, from one that the others don't know, stands on it.
        bases = own if len(own) == 1 else bases
    if len(bases) > 1:
        listed = ", ".join(name_of(store, base) for base in bases)
        raise NoBase(f"{names} have several common ancestors: {listed}", hint=hint)
    # Two versions of an adapter have the older one for an ancestor, which is no model.
    return model_of(store, ResolvedRef(name_of(store, bases[0]), bases[0]))


def other_base(store: Store, commit_id: CommitId, base: ResolvedRef | None) -> Iterator[str]:
    """A word for whoever adds a checkpoint again, with another base."""
    parents = store.commit(commit_id).parents
    if base is not None and base.commit not in parents:
        on = f"on base {name_of(store, parents[0])}" if parents else "without a base"
        yield (
            f"commit {short(commit_id)} holds this checkpoint already, {on}; it stays so: "
            f"to merge it on {base.name}, say --base {base.name} then, too"
        )


def same_checkpoint(
    store: Store, manifest_id: bytes, tip: CommitId | None, adapted: CommitId | None = None
) -> CommitId | None:
    """A commit that holds this very checkpoint: the branch's own, else any that was added.

    An adapter is the same only on the same base, the commit ``adapted``.
    """

    def is_same(commit: Commit) -> bool:
        return commit.manifest == manifest_id and adapted in (None, *commit.parents[:1])

    if tip is not None:
        return tip if is_same(store.commit(tip)) else None
    if not store.has_object(manifest_id):
        return None
    for commit_id, commit in all_commits(store):
        if commit.recipe is None and is_same(commit):
            return commit_id
    return None


def parents_of_added(
    store: Store, base: ResolvedRef | None, tip: CommitId | None
) -> tuple[CommitId, ...]:
    """The base, and the branch's tip where a new version of a checkpoint is added."""
    parents = [base.commit] if base else []
    reached = base and tip and is_ancestor(tip, base.commit, store.commit)
    if tip and not reached:
        parents.append(tip)
    return tuple(parents)


def merge_branch(
    store: Store,
    branch: str | None,
    recipe: Recipe,
    plan: PlanId,
    parents: tuple[CommitId, ...],
    replaces: CommitId | None = None,
) -> tuple[str, CommitId | None]:
    """The branch that a merge moves, and where it stands. From the commit ``replaces`` it may move
    anywhere. Raises ``RefConflict``."""
    if branch is not None:
        check_name(branch)
        tip = store.refs.read("heads", branch)
        forward = (
            tip in (None, replaces)
            or is_this_merge(store, tip, plan, parents)
            or any(is_ancestor(tip, parent, store.commit) for parent in parents)
        )
        if not forward:
            raise RefConflict(
                f"branch {branch} would not move forward: neither base nor experts descend "
                f"from its commit {short(tip or b'')}",
                hint=f"choose another name with -b, or delete it with `mergegit branch -d "
                f"{branch}`",
            )
        return branch, tip
    stem = _branch_name([expert.ref for expert in recipe.experts])
    name, number = stem, 1
    while (tip := store.refs.read("heads", name)) is not None:
        if is_this_merge(store, tip, plan, parents):
            return name, tip
        number += 1
        name = f"{stem}-{number}"
    return name, None


def is_this_merge(
    store: Store, commit_id: CommitId, plan: PlanId, parents: tuple[CommitId, ...]
) -> bool:
    commit = store.commit(commit_id)
    return commit.plan == plan and commit.parents == parents


def _branch_name(refs: Sequence[str]) -> str:
    words = [re.sub(r"[^A-Za-z0-9._/-]+", "-", ref).strip("-./") for ref in refs]
    name = "+".join(words)
    if len(name) > _MAX_BRANCH:
        name = f"{words[0][:_MAX_BRANCH]}+{len(words) - 1}-more"
    return check_name(name)
