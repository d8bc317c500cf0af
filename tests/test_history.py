from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergegit.history import LoadCommit, first_parents, is_ancestor, merge_bases, walk
from mergegit.objects import Commit, CommitId, ManifestId

Graph = Mapping[str, Sequence[str]]
"""Commits by name, each with the names of its parents."""


def loader(graph: Graph, times: Mapping[str, int] | None = None) -> LoadCommit:
    def load(commit_id: CommitId) -> Commit:
        name = commit_id.decode()
        return Commit(
            manifest=ManifestId(bytes(32)),
            parents=tuple(CommitId(parent.encode()) for parent in graph[name]),
            author="Ada",
            time=(times or {}).get(name, 0),
            message=name,
        )

    return load


def ids(*names: str) -> list[CommitId]:
    return [CommitId(name.encode()) for name in names]


def walked(graph: Graph, *starts: str, times: Mapping[str, int] | None = None) -> list[str]:
    return [commit.message for _, commit in walk(ids(*starts), loader(graph, times))]


def bases(graph: Graph, *names: str) -> list[str]:
    return [commit.decode() for commit in merge_bases(ids(*names), loader(graph))]


def ancestors(graph: Graph, name: str) -> set[str]:
    """A commit and all that it descends from, the plainest way."""
    found = {name}
    for parent in graph[name]:
        found |= ancestors(graph, parent)
    return found


@st.composite
def graphs(draw: st.DrawFn) -> dict[str, list[str]]:
    """Any acyclic graph: several roots, octopus merges, criss-crosses, the same parent twice."""
    names = [chr(ord("a") + i) for i in range(draw(st.integers(1, 10)))]
    return {
        name: draw(st.lists(st.sampled_from(names[:i]), max_size=4)) if i else []
        for i, name in enumerate(names)
    }


CRISS_CROSS: Graph = {
    "root": [], "a": ["root"], "b": ["root"], "x": ["a", "b"], "y": ["b", "a"], "z": ["x", "y"],
}  # fmt: skip
OCTOPUS: Graph = {
    "base": [], **{f"e{i:02}": ["base"] for i in range(20)},
    "merge": ["base", *(f"e{i:02}" for i in range(20))],
}  # fmt: skip


# -- walk ----------------------------------------------------------------------------------------


def test_a_walk_goes_from_the_newest_to_the_oldest() -> None:
    graph = {"a": [], "b": ["a"], "c": ["b"]}
    assert walked(graph, "c") == ["c", "b", "a"]


def test_branches_are_interleaved_by_time() -> None:
    graph = {"a": [], "b1": ["a"], "b2": ["b1"], "c1": ["a"], "c2": ["c1"]}
    times = {"a": 0, "b1": 1, "c1": 2, "b2": 3, "c2": 4}
    assert walked(graph, "b2", "c2", times=times) == ["c2", "b2", "c1", "b1", "a"]


def test_children_come_before_their_parents_whatever_the_clocks_say() -> None:
    graph = {"a": [], "b": ["a"], "c": ["b"]}
    assert walked(graph, "c", times={"a": 30, "b": 20, "c": 10}) == ["c", "b", "a"]


def test_a_commit_that_is_reached_twice_is_walked_once() -> None:
    assert sorted(walked(CRISS_CROSS, "z", "x", "z")) == sorted(CRISS_CROSS)


def test_an_octopus_is_walked_whole() -> None:
    order = walked(OCTOPUS, "merge")
    assert order[0] == "merge"
    assert order[-1] == "base"
    assert sorted(order) == sorted(OCTOPUS)


def test_a_walk_from_nothing_is_empty() -> None:
    assert walked({}, *()) == []


def test_a_walk_sees_only_what_its_starts_descend_from() -> None:
    graph = {"a": [], "b": ["a"], "other": [], "tip": ["b", "other"]}
    assert walked(graph, "b") == ["b", "a"]


def test_a_parent_that_is_named_twice_is_walked_once() -> None:
    assert walked({"a": [], "b": ["a", "a"]}, "b") == ["b", "a"]


def test_a_long_history_is_walked_without_recursion() -> None:
    graph = {"0": [], **{str(i): [str(i - 1)] for i in range(1, 20_000)}}
    assert walked(graph, "19999") == [str(i) for i in range(19_999, -1, -1)]


def test_a_walk_hands_out_the_newest_before_the_rest_is_asked_for() -> None:
    graph = {"a": [], "b": ["a"], "c": ["b"]}
    first, _ = next(walk(ids("c"), loader(graph)))
    assert first == b"c"


@given(graphs(), st.data())
def test_every_commit_is_walked_once_and_after_its_children(
    graph: dict[str, list[str]], data: st.DataObject
) -> None:
    starts = data.draw(st.lists(st.sampled_from(list(graph)), min_size=1, max_size=4))
    times = {name: data.draw(st.integers(0, 3)) for name in graph}
    order = walked(graph, *starts, times=times)
    assert sorted(order) == sorted(set().union(*(ancestors(graph, name) for name in starts)))
    place = {name: i for i, name in enumerate(order)}
    for child in order:
        for parent in graph[child]:
            assert place[child] < place[parent]


@given(graphs(), st.data())
def test_of_commits_that_may_both_come_next_the_newer_does(
    graph: dict[str, list[str]], data: st.DataObject
) -> None:
    times = {name: data.draw(st.integers(0, 5)) for name in graph}
    start = list(graph)[-1]
    order = walked(graph, start, times=times)
    left = set(order)
    for name in order:
        waiting = {parent for child in left for parent in graph[child]}
        assert times[name] == max(times[other] for other in left - waiting)
        left.remove(name)


@given(graphs())
def test_the_order_of_a_walk_is_always_the_same(graph: dict[str, list[str]]) -> None:
    start = list(graph)[-1]
    assert walked(graph, start) == walked(graph, start)


# -- ancestry ------------------------------------------------------------------------------------


def test_a_commit_is_its_own_ancestor() -> None:
    assert is_ancestor(*ids("a", "a"), loader({"a": []}))


def test_descent_goes_one_way() -> None:
    load = loader(CRISS_CROSS)
    assert is_ancestor(*ids("root", "z"), load)
    assert not is_ancestor(*ids("z", "root"), load)
    assert not is_ancestor(*ids("x", "y"), load)


def test_any_parent_of_an_octopus_counts() -> None:
    assert all(is_ancestor(*ids(f"e{i:02}", "merge"), loader(OCTOPUS)) for i in range(20))


@given(graphs(), st.data())
def test_ancestry_is_what_following_parents_finds(
    graph: dict[str, list[str]], data: st.DataObject
) -> None:
    one, other = (data.draw(st.sampled_from(list(graph))) for _ in range(2))
    assert is_ancestor(*ids(one, other), loader(graph)) == (one in ancestors(graph, other))


# -- merge bases ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("graph", "commits", "expected"),
    [
        ({"a": []}, "a", "a"),
        ({"a": [], "b": ["a"]}, "ab", "a"),
        ({"a": [], "b": ["a"], "c": ["a"]}, "bc", "a"),
        ({"a": [], "b": ["a"], "c": ["b"], "d": ["b"]}, "cd", "b"),
        ({"a": [], "b": ["a"], "c": ["b"], "d": ["a"]}, "cd", "a"),
        ({"a": [], "b": []}, "ab", ""),
        ({"a": [], "b": ["a"], "c": ["a"], "d": ["a"]}, "bcd", "a"),
        ({"a": [], "b": ["a"], "c": ["b"], "d": ["b"], "e": ["a"]}, "cde", "a"),
        ({"a": [], "b": ["a"], "c": ["a"], "d": ["b", "c"]}, "bd", "b"),
    ],
)
def test_the_base_is_the_last_commit_in_common(graph: Graph, commits: str, expected: str) -> None:
    assert bases(graph, *commits) == list(expected)


def test_a_criss_cross_has_two_bases() -> None:
    assert bases(CRISS_CROSS, "x", "y") == ["a", "b"]


def test_the_experts_of_an_octopus_have_its_base() -> None:
    experts = [f"e{i:02}" for i in range(20)]
    assert bases(OCTOPUS, *experts) == ["base"]
    assert bases(OCTOPUS, "merge", "e07") == ["e07"]


def test_the_same_commit_twice_is_its_own_base() -> None:
    assert bases(CRISS_CROSS, "x", "x") == ["x"]


def test_an_ancestor_of_all_others_is_their_base() -> None:
    graph = {"base": [], "a": ["base"], "b": ["a"], "c": ["a"]}
    assert bases(graph, "b", "a", "c") == ["a"]


def test_no_commits_have_no_base() -> None:
    assert bases({"a": []}, *()) == []


@given(graphs(), st.data())
def test_merge_bases_are_what_brute_force_finds(
    graph: dict[str, list[str]], data: st.DataObject
) -> None:
    commits = data.draw(st.lists(st.sampled_from(list(graph)), min_size=1, max_size=4))
    common = set.intersection(*(ancestors(graph, name) for name in commits))
    best = {
        name
        for name in common
        if not any(name in ancestors(graph, other) for other in common if other != name)
    }
    assert set(bases(graph, *commits)) == best


@given(graphs(), st.data())
def test_the_order_of_the_commits_does_not_matter(
    graph: dict[str, list[str]], data: st.DataObject
) -> None:
    commits = data.draw(st.lists(st.sampled_from(list(graph)), min_size=1, max_size=4))
    other = data.draw(st.permutations(commits))
    assert bases(graph, *commits) == bases(graph, *other)


# -- what a commit stands on -----------------------------------------------------------------------


def test_a_commit_stands_on_its_first_parents() -> None:
    graph = {"d": ["c", "x"], "c": ["a", "b"], "b": ["a"], "a": [], "x": []}
    line = first_parents(CommitId(b"d"), loader(graph))
    assert [commit.decode() for commit in line] == ["d", "c", "a"]


@given(graphs())
def test_all_that_a_commit_stands_on_are_ancestors(graph: Graph) -> None:
    for name in graph:
        line = [c.decode() for c in first_parents(CommitId(name.encode()), loader(graph))]
        assert line[0] == name
        assert not graph[line[-1]]
        assert set(line) <= ancestors(graph, name)
