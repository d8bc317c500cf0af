from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergegit.cli.graph import Graph, as_ascii

History = Sequence[tuple[str, Sequence[str]]]
"""Commits with their parents, children first."""

ARMS = {
    " ": "", "│": "ud", "─": "lr", "├": "udr", "┤": "udl", "┼": "udlr",
    "╮": "ld", "╯": "lu", "┬": "lrd", "┴": "lru", "●": "ud",
}  # fmt: skip
"""The sides on which each character meets its neighbours."""


def draw_all(commits: History) -> Iterator[str]:
    """The graph of commits and their parents, without any text."""
    graph: Graph[str] = Graph()
    for commit, parents in commits:
        for line, _ in graph.draw(commit, parents):
            yield line


def drawing(text: str) -> list[str]:
    return text.strip("\n").split("\n")


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[str, list[str]]]:
    """Any history: several tips and roots, octopus merges, parents in any order."""
    names = [f"c{i}" for i in range(draw(st.integers(1, 12)))]
    older = [names[i + 1 :] for i in range(len(names))]
    return [
        (name, draw(st.lists(st.sampled_from(rest), max_size=4)) if rest else [])
        for name, rest in zip(names, older, strict=True)
    ]


def drawn(history: History) -> tuple[list[str], dict[str, tuple[int, int]]]:
    """The lines of a history, padded to one width, and where each commit's mark stands."""
    graph: Graph[str] = Graph()
    lines: list[str] = []
    marks: dict[str, tuple[int, int]] = {}
    for commit, parents in history:
        for line, is_commit in graph.draw(commit, parents):
            if is_commit:
                marks[commit] = (len(lines), line.index("●"))
            lines.append(line)
    width = max(map(len, lines), default=0)
    return [line.ljust(width) for line in lines], marks


# -- drawings ------------------------------------------------------------------------------------


def test_a_line_of_descent_is_one_lane() -> None:
    assert list(draw_all([("c", "b"), ("b", "a"), ("a", "")])) == drawing("""
●
●
●
""")


def test_a_merge_of_two_parents() -> None:
    history = [("merge", ["a", "b"]), ("b", ["root"]), ("a", ["root"]), ("root", [])]
    assert list(draw_all(history)) == drawing("""
●
├─╮
│ ●
● │
├─╯
●
""")


def test_a_merge_whose_first_parent_comes_first() -> None:
    history = [("merge", ["a", "b"]), ("a", ["root"]), ("b", ["root"]), ("root", [])]
    assert list(draw_all(history)) == drawing("""
●
├─╮
● │
│ ●
├─╯
●
""")


def test_two_branches_of_one_root() -> None:
    history = [("a", ["root"]), ("b", ["root"]), ("root", [])]
    assert list(draw_all(history)) == drawing("""
●
│ ●
├─╯
●
""")


def test_an_octopus_of_twenty_parents() -> None:
    parents = ["base", *(f"e{i}" for i in range(1, 20))]
    history = [("merge", parents), *((f"e{i}", ["base"]) for i in range(1, 20)), ("base", [])]
    lines = list(draw_all(history))
    assert lines[:4] == drawing("""
●
├─┬─┬─┬─┬─┬─┬─┬─┬─┬─┬─┬─┬─┬─┬─┬─┬─┬─┬─╮
│ ● │ │ │ │ │ │ │ │ │ │ │ │ │ │ │ │ │ │
│ │ ● │ │ │ │ │ │ │ │ │ │ │ │ │ │ │ │ │
""")
    assert lines[20:] == drawing("""
│ │ │ │ │ │ │ │ │ │ │ │ │ │ │ │ │ │ │ ●
├─┴─┴─┴─┴─┴─┴─┴─┴─┴─┴─┴─┴─┴─┴─┴─┴─┴─┴─╯
●
""")
    assert len(lines) == 23


def test_a_criss_cross() -> None:
    history = [
        ("z", ["x", "y"]), ("y", ["b", "a"]), ("x", ["a", "b"]), ("b", ["root"]), ("a", ["root"]),
        ("root", []),
    ]  # fmt: skip
    assert list(draw_all(history)) == drawing("""
●
├─╮
│ ●
│ ├─╮
● │ │
├─┤ │
│ ● │
├─┼─╯
● │
├─╯
●
""")


def test_several_roots() -> None:
    history = [("x", ["a"]), ("y", ["b"]), ("a", []), ("b", []), ("alone", [])]
    assert list(draw_all(history)) == drawing("""
●
│ ●
● │
  ●
●
""")


def test_a_merge_of_two_roots() -> None:
    history = [("merge", ["a", "b"]), ("a", []), ("b", [])]
    assert list(draw_all(history)) == drawing("""
●
├─╮
● │
  ●
""")


def test_a_merge_that_joins_a_lane_to_its_left() -> None:
    history = [("x", ["base"]), ("merge", ["a", "base"]), ("a", ["base"]), ("base", [])]
    assert list(draw_all(history)) == drawing("""
●
│ ●
├─┤
│ ●
├─╯
●
""")


def test_a_merge_across_lanes_that_pass() -> None:
    history = [
        ("x", ["r"]), ("y", ["s"]), ("merge", ["t", "r"]), ("t", []), ("s", []), ("r", []),
    ]  # fmt: skip
    assert list(draw_all(history)) == drawing("""
●
│ ●
│ │ ●
├─┼─┤
│ │ ●
│ ●
●
""")


def test_a_parent_that_is_named_twice_is_drawn_once() -> None:
    assert list(draw_all([("b", ["a", "a"]), ("a", [])])) == drawing("""
●
●
""")


def test_a_merge_opens_lanes_to_its_right_alone() -> None:
    history = [("x", ["a"]), ("t", ["m"]), ("a", []), ("m", ["p", "q"]), ("p", []), ("q", [])]
    assert list(draw_all(history)) == drawing("""
●
│ ●
● │
  ●
  ├─╮
  ● │
    ●
""")


def test_a_lane_that_fell_free_is_used_again() -> None:
    history = [("x", ["a"]), ("y", ["b"]), ("a", []), ("z", ["b"]), ("b", [])]
    assert list(draw_all(history)) == drawing("""
●
│ ●
● │
● │
├─╯
●
""")


def test_the_margin_runs_beside_the_text_of_a_commit() -> None:
    graph: Graph[str] = Graph()
    list(graph.draw("merge", ["a", "b"]))
    assert graph.margin == "│ │"
    list(graph.draw("a", []))
    assert graph.margin == "  │"
    list(graph.draw("b", []))
    assert graph.margin == ""


def test_a_terminal_without_box_drawing_gets_ascii() -> None:
    history = [
        ("z", ["x", "y", "w"]), ("y", ["b", "a"]), ("x", ["a", "b"]), ("w", ["b"]), ("b", ["root"]),
        ("a", ["root"]), ("root", []),
    ]  # fmt: skip
    lines = list(draw_all(history))
    plain = [as_ascii(line) for line in lines]
    assert all(line.isascii() for line in plain)
    assert [len(line) for line in plain] == [len(line) for line in lines]
    assert sum(line.count("*") for line in plain) == len(history)


def test_nothing_is_drawn_of_nothing() -> None:
    assert list(draw_all([])) == []


# -- any history ---------------------------------------------------------------------------------


@given(histories())
def test_every_commit_has_exactly_one_mark(history: History) -> None:
    lines, marks = drawn(history)
    assert sum(line.count("●") for line in lines) == len(history)
    assert list(marks) == [commit for commit, _ in history]
    assert [row for row, _ in marks.values()] == sorted({row for row, _ in marks.values()})


@given(histories())
def test_every_line_of_a_drawing_leads_on(history: History) -> None:
    """Wherever a character reaches out to a side, its neighbour reaches back."""
    lines, marks = drawn(history)
    parents = dict(history)
    tips = {commit for commit, _ in history} - {p for _, ps in history for p in ps}
    places = {place: commit for commit, place in marks.items()}

    def arms(row: int, column: int) -> str:
        if not (0 <= row < len(lines) and 0 <= column < len(lines[0])):
            return ""
        commit = places.get((row, column))
        if commit is None:
            return ARMS[lines[row][column]]
        return ("" if commit in tips else "u") + ("d" if parents[commit] else "")

    for row, line in enumerate(lines):
        for column in range(len(line)):
            here = arms(row, column)
            assert ("d" in here) == ("u" in arms(row + 1, column))
            assert ("r" in here) == ("l" in arms(row, column + 1))


@given(histories())
def test_every_commit_is_joined_to_its_parents(history: History) -> None:
    lines, marks = drawn(history)
    places = set(marks.values())
    for commit, parents in history:
        reached = _reached(lines, marks[commit], places)
        assert {marks[parent] for parent in parents} <= reached


def _reached(
    lines: Sequence[str], start: tuple[int, int], marks: set[tuple[int, int]]
) -> set[tuple[int, int]]:
    """The marks to which lines lead from a mark, down and to the sides."""
    steps = {"d": (1, 0), "l": (0, -1), "r": (0, 1)}
    seen: set[tuple[int, int]] = set()
    pending = [(start[0] + 1, start[1])]
    while pending:
        place = row, column = pending.pop()
        if place in seen or row >= len(lines):
            continue
        seen.add(place)
        if place not in marks:
            for arm in ARMS[lines[row][column]]:
                if arm != "u":
                    pending.append((row + steps[arm][0], column + steps[arm][1]))
    return seen & marks


@given(histories())
def test_lanes_are_open_as_long_as_parents_are_to_come(history: History) -> None:
    graph: Graph[str] = Graph()
    awaited: set[str] = set()
    for commit, parents in history:
        list(graph.draw(commit, parents))
        awaited = (awaited | set(parents)) - {commit}
        lanes = graph.margin.count("│")
        assert (lanes == 0) == (not awaited)
        assert lanes >= len(awaited)


@given(histories())
def test_no_line_ends_in_blanks(history: History) -> None:
    assert all(line == line.rstrip() and line for line in draw_all(history))


@pytest.mark.parametrize("parents", [1, 2, 3, 50])
def test_a_merge_is_as_wide_as_it_has_parents(parents: int) -> None:
    names = [f"p{i}" for i in range(parents)]
    lines = list(draw_all([("merge", names), *((name, []) for name in names)]))
    assert max(map(len, lines)) == 2 * parents - 1
