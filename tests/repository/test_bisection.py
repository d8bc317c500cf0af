"""What is asked next, and what is found: pure functions of the answers so far."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergegit.objects import CommitId
from mergegit.repository.bisection import (
    CommitQuestion,
    CommitsFound,
    Subset,
    SubsetFound,
    SubsetQuestion,
    Verdict,
    next_commit,
    next_subset,
)

Graph = Mapping[str, Sequence[str]]


def commit(name: str) -> CommitId:
    return CommitId(name.encode())


def ancestors(graph: Graph, name: str) -> set[str]:
    found = {name}
    for parent in graph[name]:
        found |= ancestors(graph, parent)
    return found


def ask(
    graph: Graph, bad: str, good: Sequence[str], answers: Sequence[tuple[str, Verdict]]
) -> CommitQuestion | CommitsFound | None:
    """``graph`` has children before their parents."""
    below = ancestors(graph, bad)
    history = {
        commit(name): [commit(parent) for parent in parents]
        for name, parents in graph.items()
        if name in below
    }
    told = [(commit(name), verdict) for name, verdict in answers]
    return next_commit(commit(bad), [commit(name) for name in good], told, history)


def bisect(
    graph: Graph, bad: str, test: Callable[[str], Verdict], good: Sequence[str] = ()
) -> tuple[list[str], int]:
    """The commits that are found, and how many tests that took."""
    answers: list[tuple[str, Verdict]] = []
    while True:
        step = ask(graph, bad, good, answers)
        assert step is not None
        if isinstance(step, CommitsFound):
            return [found.decode() for found in step.commits], len(answers)
        name = step.commit.decode()
        assert name not in dict(answers)
        answers.append((name, test(name)))


def line(length: int) -> dict[str, list[str]]:
    """Commits one after the other, ``c0`` the oldest."""
    return {f"c{i}": [f"c{i - 1}"] if i else [] for i in reversed(range(length))}


# -- commits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 3, 7, 64, 100])
def test_a_line_of_commits_is_halved(length: int) -> None:
    graph = line(length)
    for first in range(length):
        found, tests = bisect(
            graph, f"c{length - 1}", lambda name, f=first: "bad" if int(name[1:]) >= f else "good"
        )
        assert found == [f"c{first}"]
        assert tests <= math.ceil(math.log2(length)) if length > 1 else tests == 0


def test_what_is_known_to_be_good_is_not_asked_for() -> None:
    step = ask(line(8), "c7", ["c3"], [])
    assert step == CommitQuestion(commit("c5"), 4)


@st.composite
def graphs(draw: st.DrawFn) -> dict[str, list[str]]:
    names = [f"c{i}" for i in range(draw(st.integers(1, 12)))]
    older = [names[i + 1 :] for i in range(len(names))]
    return {
        name: draw(st.lists(st.sampled_from(rest), max_size=3, unique=True)) if rest else []
        for name, rest in zip(names, older, strict=True)
    }


@given(graphs(), st.data())
def test_in_any_history_a_first_bad_commit_is_found(graph: Graph, data: st.DataObject) -> None:
    """Bad are some commits and all that descend from them: what is found is bad, and no parent of
    it is."""
    broken = data.draw(st.lists(st.sampled_from(sorted(graph)), min_size=1))
    bad = {name for name in graph if ancestors(graph, name) & set(broken)}
    start = data.draw(st.sampled_from(sorted(bad)))
    good = (
        data.draw(st.lists(st.sampled_from(sorted(set(graph) - bad)))) if set(graph) - bad else []
    )
    good = [name for name in good if name in ancestors(graph, start)]
    found, tests = bisect(graph, start, lambda name: "bad" if name in bad else "good", good)
    assert len(found) == 1
    assert found[0] in bad
    assert not set(graph[found[0]]) & bad
    assert tests < len(ancestors(graph, start)) or tests == 0


def test_what_can_not_be_tested_is_left_open() -> None:
    graph = line(6)

    def test(name: str) -> Verdict:
        return "skip" if name in ("c2", "c3") else "bad" if int(name[1:]) >= 3 else "good"

    found, _ = bisect(graph, "c5", test)
    assert found == ["c4", "c3", "c2"]


def test_what_is_skipped_does_no_harm_elsewhere() -> None:
    graph = line(6)

    def test(name: str) -> Verdict:
        return "skip" if name == "c3" else "bad" if int(name[1:]) >= 2 else "good"

    assert bisect(graph, "c5", test)[0] == ["c2"]


def test_a_good_commit_above_a_bad_one_is_a_contradiction() -> None:
    assert ask(line(4), "c3", ["c3"], []) is None
    assert ask(line(4), "c3", [], [("c1", "bad"), ("c2", "good")]) is None


def test_what_is_known_already_may_be_said_again() -> None:
    once = ask(line(8), "c7", [], [("c4", "bad")])
    assert ask(line(8), "c7", [], [("c4", "bad"), ("c6", "bad"), ("c4", "bad")]) == once


# -- experts ---------------------------------------------------------------------------------------


def delta_debug(
    count: int, test: Callable[[Subset], Verdict]
) -> tuple[SubsetFound, dict[Subset, Verdict]]:
    answers: dict[Subset, Verdict] = {}
    while True:
        step = next_subset(count, answers)
        if isinstance(step, SubsetFound):
            return step, answers
        assert step.experts not in answers
        assert list(step.experts) == sorted(set(step.experts))
        answers[step.experts] = test(step.experts)


@pytest.mark.parametrize("count", [1, 2, 3, 8, 20])
def test_one_expert_is_found_by_halving(count: int) -> None:
    for culprit in range(count):
        found, answers = delta_debug(count, lambda s, c=culprit: "bad" if c in s else "good")
        assert found == SubsetFound((culprit,), True)
        assert len(answers) <= 2 + 2 * math.ceil(math.log2(max(count, 2)))


@pytest.mark.parametrize("count", [2, 5, 9])
def test_two_that_break_it_together_are_found(count: int) -> None:
    for pair in itertools.combinations(range(count), 2):
        found, _ = delta_debug(count, lambda s, p=pair: "bad" if set(p) <= set(s) else "good")
        assert found == SubsetFound(pair, True)


@given(st.integers(1, 7), st.data())
def test_what_is_found_breaks_it_and_with_one_less_does_not(
    count: int, data: st.DataObject
) -> None:
    """Whatever breaks it, as long as more experts break it as well."""
    causes = data.draw(
        st.lists(st.sets(st.integers(0, count - 1), min_size=1), min_size=1, max_size=3)
    )

    def test(subset: Subset) -> Verdict:
        return "bad" if any(cause <= set(subset) for cause in causes) else "good"

    found, answers = delta_debug(count, test)
    assert found.experts is not None
    assert test(found.experts) == "bad"
    for place in found.experts:
        fewer = tuple(other for other in found.experts if other != place)
        assert test(fewer) == "good"
    assert answers[tuple(range(count))] == "bad"
    assert answers[()] == "good"


def test_the_whole_and_the_base_are_tested_first() -> None:
    assert next_subset(3, {}) == SubsetQuestion((0, 1, 2), 3)
    assert next_subset(3, {(0, 1, 2): "good"}) == SubsetFound(None, True)
    assert next_subset(3, {(0, 1, 2): "bad"}) == SubsetQuestion((), 3)
    assert next_subset(3, {(0, 1, 2): "bad", (): "bad"}) == SubsetFound((), True)


def test_merges_that_can_not_be_tested_make_it_uncertain() -> None:
    def test(subset: Subset) -> Verdict:
        if len(subset) in (0, 4):
            return "bad" if subset else "good"
        return "skip" if len(subset) == 1 else "bad" if 2 in subset else "good"

    found, _ = delta_debug(4, test)
    assert found.experts is not None
    assert len(found.experts) == 2
    assert not found.is_certain
