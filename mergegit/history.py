"""Walks over the commit graph.

Handed a function that loads commits, never a store. networkx answers the questions about the
shape of the graph; a plain walk, which every `log` needs, does without loading it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from mergegit.objects import Commit, CommitId

if TYPE_CHECKING:
    import networkx as nx

LoadCommit = Callable[[CommitId], Commit]


def walk(starts: Iterable[CommitId], load: LoadCommit) -> Iterator[tuple[CommitId, Commit]]:
    """Every commit that the starts descend from, newest first and children before parents."""
    commits: dict[CommitId, Commit] = {}
    children: dict[CommitId, int] = {}
    roots = list(dict.fromkeys(starts))
    pending = list(roots)
    while pending:
        commit_id = pending.pop()
        if commit_id in commits:
            continue
        commit = commits[commit_id] = load(commit_id)
        for parent in dict.fromkeys(commit.parents):
            children[parent] = children.get(parent, 0) + 1
            pending.append(parent)
    order = {commit_id: place for place, commit_id in enumerate(commits)}
    ready = [
        (-commits[commit_id].time, order[commit_id], commit_id)
        for commit_id in commits
        if not children.get(commit_id)
    ]
    heapq.heapify(ready)
    while ready:
        _, _, commit_id = heapq.heappop(ready)
        commit = commits[commit_id]
        yield commit_id, commit
        for parent in dict.fromkeys(commit.parents):
            children[parent] -= 1
            if not children[parent]:
                heapq.heappush(ready, (-commits[parent].time, order[parent], parent))


def is_ancestor(ancestor: CommitId, of: CommitId, load: LoadCommit) -> bool:
    """Whether ``of`` is ``ancestor`` or descends from it."""
    return any(commit_id == ancestor for commit_id, _ in walk([of], load))


def first_parents(commit: CommitId, load: LoadCommit) -> Iterator[CommitId]:
    """A commit, its first parent, the first parent of that, and so on: what it stands on."""
    while True:
        yield commit
        parents = load(commit).parents
        if not parents:
            return
        commit = parents[0]


def merge_bases(commits: Sequence[CommitId], load: LoadCommit) -> list[CommitId]:
    """The best common ancestors of all ``commits``: those with no other below them.

    An expert that is itself an ancestor of all others is their base, as in Git.
    """
    import networkx as nx

    graph = _graph(commits, load)
    common = set(graph)
    for commit_id in commits:
        common &= nx.descendants(graph, commit_id) | {commit_id}
    shadowed = {above for commit_id in common for above in nx.descendants(graph, commit_id)}
    return sorted(common - shadowed)


def _graph(starts: Iterable[CommitId], load: LoadCommit) -> nx.DiGraph[CommitId]:
    """The commit graph with edges from children to parents."""
    import networkx as nx

    graph: nx.DiGraph[CommitId] = nx.DiGraph()
    for commit_id, commit in walk(starts, load):
        graph.add_node(commit_id)
        graph.add_edges_from((commit_id, parent) for parent in commit.parents)
    return graph
