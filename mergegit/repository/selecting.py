"""Which commits `log` is to show, and how much each of them changed. No weights are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from mergegit.objects import Commit, CommitId, Manifest
from mergegit.repository.lineage import is_adapter
from mergegit.storage.store import Store


@dataclass(frozen=True, slots=True)
class Selection:
    """What commits must be, all of it, to be shown.

    ``method`` by which a merge was made, ``expert`` a commit that it merged, ``since`` the earliest
    time (seconds since 1970), ``author`` a part of the author's name, in any case; ``names`` parts
    of names of tensors of which the commit changed one.
    """

    method: str | None = None
    expert: CommitId | None = None
    since: float | None = None
    author: str | None = None
    names: tuple[str, ...] = ()

    @property
    def is_all(self) -> bool:
        return self == Selection()

    def takes(self, store: Store, commit: Commit) -> bool:
        recipe = commit.recipe or {}
        if self.method is not None and recipe.get("method") != self.method:
            return False
        if self.expert is not None:
            merged = {expert["commit"] for expert in recipe.get("experts", ())}
            if self.expert.hex() not in merged:
                return False
        if self.since is not None and commit.time < self.since:
            return False
        if self.author is not None and self.author.casefold() not in commit.author.casefold():
            return False
        return not self.names or any(
            any(part in name for part in self.names) for name in changed_names(store, commit)
        )


def selected(
    commits: Iterator[tuple[CommitId, Commit]], store: Store, selection: Selection
) -> Iterator[tuple[CommitId, Commit]]:
    return ((i, commit) for i, commit in commits if selection.takes(store, commit))


def changed_names(store: Store, commit: Commit) -> Iterator[str]:
    """Names of tensors that a commit has otherwise than its first parent, or that it has first.

    An adapter changes what it holds: what it lacks of its base is no change.
    """
    manifest, before = _manifests(store, commit)
    for name, tensor_id in manifest.tensors.items():
        if before is None or before.tensors.get(name) != tensor_id:
            yield name
    if before is not None and not is_adapter(manifest):
        yield from (name for name in before.tensors if name not in manifest.tensors)


@dataclass(frozen=True, slots=True)
class ChangeCount:
    """What a commit changed of its first parent, by the ids of tensors and blocks alone.

    ``changed``, ``added`` and ``removed`` are tensors, of ``tensors`` that it has; ``shared`` of
    its ``blocks`` are its parent's, in the same place. A root, or an adapter, shares nothing.
    """

    tensors: int
    changed: int
    added: int
    removed: int
    blocks: int
    shared: int
    has_parent: bool


def count_changes(store: Store, commit: Commit) -> ChangeCount:
    manifest, before = _manifests(store, commit)
    if before is not None and is_adapter(manifest):
        before = None
    old = before.tensors if before is not None else {}
    changed = added = blocks = shared = 0
    for name, tensor_id in manifest.tensors.items():
        tensor = store.tensor(tensor_id)
        blocks += len(tensor)
        if name not in old:
            added += 1
        elif old[name] == tensor_id:
            shared += len(tensor)
        else:
            changed += 1
            other = store.tensor(old[name])
            if tensor.dtype == other.dtype:
                pairs = zip(tensor.blocks(), other.blocks(), strict=False)
                shared += sum(block == below for block, below in pairs)
    removed = sum(name not in manifest.tensors for name in old)
    return ChangeCount(
        len(manifest.tensors), changed, added, removed, blocks, shared, before is not None
    )


def _manifests(store: Store, commit: Commit) -> tuple[Manifest, Manifest | None]:
    """The commit's manifest, and its first parent's."""
    if not commit.parents:
        return store.manifest(commit.manifest), None
    parent = store.commit(commit.parents[0])
    return store.manifest(commit.manifest), store.manifest(parent.manifest)


def nearest_shown(
    commits: Sequence[tuple[CommitId, Commit]], is_shown: Callable[[CommitId], bool]
) -> dict[CommitId, list[CommitId]]:
    """For each commit the nearest of its ancestors that are shown, as its parents lead to them.

    ``commits`` are a history, children before their parents. A graph of those that are shown takes
    these for their parents.
    """
    seen: dict[CommitId, list[CommitId]] = {}
    for commit_id, commit in reversed(commits):
        nearest: dict[CommitId, None] = {}
        for parent in commit.parents:
            if is_shown(parent):
                nearest[parent] = None
            else:
                nearest |= dict.fromkeys(seen.get(parent, ()))
        seen[commit_id] = list(nearest)
    return seen
