"""Matrices of numbers between -1 and 1 on a terminal, and as SVG."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from html import escape
from typing import Final

import click

from mergegit.cli.heat_map import Scale

Cell = Callable[[int, int], float | None]

_LONGEST_LABEL: Final = 28
_CELL: Final = 9
"""Columns of a cell: two spaces, a number like ``~-0.12``, and its mark."""

_SIDE: Final = 56
_LEFT, _TOP, _MARGIN = 150, 96, 24
_WORD: Final = 7.2
"""Width of a letter of the labels, about."""
_POSITIVE, _NEGATIVE = "#2a78d6", "#c4581c"
_STYLE: Final = """
  .back { fill: #ffffff } .ink { fill: #1f2328 } .soft { fill: #59636e }
  text { font: 13px system-ui, sans-serif } .title { font-size: 15px; font-weight: 600 }
  @media (prefers-color-scheme: dark) {
    .back { fill: #0d1117 } .ink { fill: #e6edf3 } .soft { fill: #9198a1 }
  }
"""


def matrix_lines(
    labels: Sequence[str],
    text: Callable[[int, int], str],
    value: Cell,
    scale: Scale,
    *,
    width: int | None = None,
) -> list[str]:
    """Lines of a square matrix: rows with labels, columns with the labels' beginnings or, where
    there is no room for numbers, marks alone under the rows' own numbers."""
    room = width or shutil.get_terminal_size().columns
    numbered = [f"{place + 1} {label}" for place, label in enumerate(labels)]
    label_width = min(max(map(len, numbered)), _LONGEST_LABEL, room // 3)
    with_numbers = label_width + 2 + _CELL * len(labels) <= room
    width_of_cell = _CELL if with_numbers else 2 + len(str(len(labels)))

    def cell(row: int, column: int) -> str:
        known = value(row, column)
        shown = (
            text(row, column) if with_numbers else "-" if known is not None and known < 0 else ""
        )
        if known is None and with_numbers:
            return f"{shown.rjust(width_of_cell - 1)} "
        return shown.rjust(width_of_cell - 1) + scale.mark(_size(known))

    heads = [str(place + 1) for place in range(len(labels))]
    head = "".join(
        f"{number.rjust(width_of_cell - 1)} " if with_numbers else number.rjust(width_of_cell)
        for number in heads
    )
    lines = [click.style(f"  {' ' * label_width}{head}".rstrip(), dim=True)]
    for row, label in enumerate(numbered):
        cells = "".join(cell(row, column) for column in range(len(labels)))
        lines.append(f"  {label[:label_width].ljust(label_width)}{cells}".rstrip())
    if not with_numbers:
        lines.append(f"  {scale.legend(lambda bound: f'{bound:g}')}  - below zero")
    return lines


def _size(value: float | None) -> float | None:
    return None if value is None else abs(value)


def matrix_svg(title: str, labels: Sequence[str], value: Cell, note: str = "") -> str:
    """SVG of a square matrix: blue for positive numbers, orange for negative ones, the stronger
    the nearer to one. It follows the reader's choice of light or dark."""
    count = len(labels)
    names = [_shortened(label) for label in labels]
    width = max(_LEFT + _SIDE * count + _MARGIN, 2 * _MARGIN + int(_WORD * len(title)) + 20)
    height = _TOP + _SIDE * count + (48 if note else _MARGIN)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{escape(title)}">',
        f"<style>{_STYLE}</style>",
        f'<rect class="back" width="{width}" height="{height}"/>',
        f'<text class="ink title" x="{_MARGIN}" y="30">{escape(title)}</text>',
    ]
    for place, name in enumerate(names):
        middle = _SIDE * place + _SIDE / 2
        parts.append(
            f'<text class="soft" x="{_LEFT - 10}" y="{_TOP + middle + 4:.0f}" '
            f'text-anchor="end">{escape(name)}</text>'
            f'<text class="soft" text-anchor="start" transform="translate({_LEFT + middle + 4:.0f} '
            f'{_TOP - 8}) rotate(-30)">{escape(name)}</text>'
        )
    for row in range(count):
        for column in range(count):
            parts.append(_square(names, row, column, value(row, column)))
    if note:
        parts.append(f'<text class="soft" x="{_MARGIN}" y="{height - 16}">{escape(note)}</text>')
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def _square(names: Sequence[str], row: int, column: int, value: float | None) -> str:
    x, y = _LEFT + _SIDE * column, _TOP + _SIDE * row
    colour = _POSITIVE if value is None or value >= 0 else _NEGATIVE
    strength = 0.0 if value is None else 0.7 * min(abs(value), 1.0)
    shown = "?" if value is None else f"{value:.2f}"
    return (
        f'<rect x="{x}" y="{y}" width="{_SIDE - 2}" height="{_SIDE - 2}" rx="3" fill="{colour}" '
        f'fill-opacity="{strength:.3f}"><title>{escape(names[row])} and {escape(names[column])}: '
        f"{shown}</title></rect>"
        f'<text class="ink" x="{x + _SIDE / 2 - 1:.0f}" y="{y + _SIDE / 2 + 4:.0f}" '
        f'text-anchor="middle">{shown}</text>'
    )


def _shortened(label: str) -> str:
    most = int((_LEFT - 20) / _WORD)
    return label if len(label) <= most else f"{label[: most - 1]}…"
