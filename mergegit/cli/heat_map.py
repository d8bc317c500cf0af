"""Heat maps on a terminal: a row for each kind of module, a column for each layer or for several.

The marks say all; colours, where there are any, only repeat it.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import click

Value = Callable[[str, range], float | None]
"""What stands in a row for some layers: a number, NaN where there is nothing, None where it is not
known."""

MARKS: Final = "·░▒▓█"
ASCII_MARKS: Final = ".-+*#"
_COLOURS: Final = (None, 110, 72, 178, 160)
"""Of each mark: blue, green, amber and red that can be told from light and dark backgrounds."""
_LONGEST_LABEL: Final = 40
_MARGIN: Final = "  "
_FEW: Final = 16
"""Columns of which more than every fifth gets its number."""
_STEPS: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500)


@dataclass(frozen=True, slots=True)
class Scale:
    """Marks for values: the first for nothing, the others for values up to each of ``bounds``."""

    bounds: tuple[float, ...]
    marks: str = MARKS

    @classmethod
    def doubling(cls, top: float) -> Scale:
        """Each mark stands for twice as much as the one before; the last ends at ``top``."""
        return cls(tuple(top / 2**step for step in (3, 2, 1, 0)), _marks())

    @classmethod
    def shares(cls) -> Scale:
        """Marks for shares of a whole."""
        return cls((0.25, 0.5, 0.75, 1.0), _marks())

    def level(self, value: float) -> int:
        if value <= 0:
            return 0
        return next(
            (n for n, bound in enumerate(self.bounds, 1) if value <= bound), len(self.bounds)
        )

    def mark(self, value: float | None, times: int = 1) -> str:
        """A value's mark, drawn so many times."""
        if value is None:
            return "?" * times
        if value != value:
            return " " * times
        level = self.level(value)
        return click.style(self.marks[level] * times, fg=_COLOURS[level])

    def legend(self, number: Callable[[float], str]) -> str:
        """What the marks stand for."""
        parts = [f"{self.mark(0.0)} none"]
        parts += [f"{self.mark(bound)} to {number(bound)}" for bound in self.bounds]
        return "  ".join(parts)


def heat_map(
    labels: Sequence[str], layers: int, value: Value, scale: Scale, *, width: int | None = None
) -> list[str]:
    """Lines of a heat map, under a line with the numbers of the layers.

    ``labels`` are the rows. The map is as wide as the terminal, or ``width``: each layer has two
    columns where there is room, or one, and where there is none several layers share a column.
    """
    room = width or shutil.get_terminal_size().columns
    label_width = min(max(map(len, labels), default=0), _LONGEST_LABEL, max(room // 2, 8))
    room = max(room - label_width - 2 * len(_MARGIN), 8)
    per_column = -(-layers // room)
    columns = [
        range(first, min(first + per_column, layers)) for first in range(0, layers, per_column)
    ]
    cell = 2 if 2 * len(columns) <= room else 1
    start = f"{_MARGIN}{' ' * label_width}{_MARGIN}"
    lines = [click.style((start + _axis(columns, cell)).rstrip(), dim=True)]
    for label in labels:
        marks = "".join(scale.mark(value(label, column), cell) for column in columns)
        lines.append(f"{_MARGIN}{_fitted(label, label_width)}{_MARGIN}{marks}".rstrip())
    return lines


def _axis(columns: Sequence[range], cell: int) -> str:
    """Numbers of the layers above the columns that begin with them, where there is room."""
    widest = len(str(columns[-1].start)) if columns else 1
    least = -(-(widest + 1) // cell) if len(columns) <= _FEW else 5
    step = next(step for step in (*_STEPS, len(columns)) if step >= min(least, len(columns)))
    line = ""
    for at in range(0, len(columns), step):
        line = line.ljust(at * cell) + str(columns[at].start)
    return line


def _fitted(label: str, width: int) -> str:
    """A label of just so many characters: what it ends with tells most."""
    return label.ljust(width) if len(label) <= width else f"~{label[len(label) - width + 1 :]}"


def _marks() -> str:
    """Shades, or signs of ASCII where standard output can't show those."""
    try:
        MARKS.encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return ASCII_MARKS
    return MARKS
