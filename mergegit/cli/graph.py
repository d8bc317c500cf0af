"""The commit graph as lines of text, one lane per line of descent.

Each commit is a ``●`` in its lane; a merge opens a lane for each further parent, and lanes that
wait for the same commit close into one before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

_Id = TypeVar("_Id")

_ASCII = str.maketrans("●│─├┤┬┴┼╮╯", "*|-+++++++")


def as_ascii(line: str) -> str:
    """A line for terminals that can't show box drawing."""
    return line.translate(_ASCII)


class Graph(Generic[_Id]):
    """Draws commits that are handed in with children before parents."""

    def __init__(self) -> None:
        self._lanes: list[_Id | None] = []

    def draw(self, commit: _Id, parents: Sequence[_Id]) -> Iterator[tuple[str, bool]]:
        """The lines of one commit, the commit's own marked true; others join lanes.

        After the last, ``margin`` is what stands before further lines of the commit's text.
        """
        waiting = [i for i, lane in enumerate(self._lanes) if lane == commit]
        column = waiting[0] if waiting else self._open(commit)
        if len(waiting) > 1:
            yield self._connect(column, dict.fromkeys(waiting[1:], "╯")), False
            for lane in waiting[1:]:
                self._lanes[lane] = None
            self._trim()
        yield self._row(column, "●"), True
        unique = list(dict.fromkeys(parents))
        if not unique:
            self._lanes[column] = None
            self._trim()
            return
        rest = unique[1:]
        self._lanes[column] = unique[0]
        if rest:
            ends = {}
            for parent in rest:
                known = [i for i, lane in enumerate(self._lanes) if lane == parent and i != column]
                if known:
                    ends[known[0]] = "┤"
                else:
                    ends[self._open(parent, after=column)] = "╮"
            yield self._connect(column, ends), False

    @property
    def margin(self) -> str:
        return " ".join("│" if lane is not None else " " for lane in self._lanes)

    def _open(self, commit: _Id, after: int = -1) -> int:
        """A free lane for a commit, to the right of lane ``after``."""
        for i, lane in enumerate(self._lanes):
            if i > after and lane is None:
                self._lanes[i] = commit
                return i
        self._lanes.append(commit)
        return len(self._lanes) - 1

    def _trim(self) -> None:
        while self._lanes and self._lanes[-1] is None:
            self._lanes.pop()

    def _row(self, column: int, mark: str) -> str:
        cells = ["│" if lane is not None else " " for lane in self._lanes]
        cells[column] = mark
        return " ".join(cells).rstrip()

    def _connect(self, column: int, ends: dict[int, str]) -> str:
        """A line from ``column`` to the lanes ``ends``, over or under those between."""
        low, high = min(column, *ends), max(column, *ends)
        out = []
        for i, lane in enumerate(self._lanes):
            cell = "│" if lane is not None else " "
            if i == column:
                cell = "├" if i == low else "┤" if i == high else "┼"
            elif i in ends:
                cell = self._end(ends[i], i, low, high)
            elif low < i < high:
                cell = "┼" if lane is not None else "─"
            out.append(cell)
            if i + 1 < len(self._lanes):
                out.append("─" if low <= i < high else " ")
        return "".join(out).rstrip()

    def _end(self, mark: str, lane: int, low: int, high: int) -> str:
        """The mark of a lane where a line ends, or passes on to the next end."""
        if lane == high:
            return mark
        if lane == low:
            return "├"
        return {"╮": "┬", "╯": "┴", "┤": "┼"}[mark]
