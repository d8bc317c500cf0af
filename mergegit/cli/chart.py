"""A line chart of errors against budgets, as SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Final

Point = tuple[float, float]

WIDTH: Final = 640
HEIGHT: Final = 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 24, 48, 56
_TICKS: Final = (1, 2, 5, 10, 20, 50, 100)
_COLOURS: Final = ("#2a78d6", "#b04a1d", "#1baf7a", "#8a63d2", "#c79a00", "#6b7280")
_STYLE: Final = """
  .back { fill: #ffffff } .ink { fill: #1f2328 } .soft { fill: #59636e }
  .grid { stroke: #d8dee4; stroke-width: 1 }
  text { font: 13px system-ui, sans-serif } .title { font-size: 15px; font-weight: 600 }
  @media (prefers-color-scheme: dark) {
    .back { fill: #0d1117 } .ink { fill: #e6edf3 } .soft { fill: #9198a1 }
    .grid { stroke: #30363d }
  }
"""


def error_chart(title: str, series: Mapping[str, Sequence[Point]]) -> str:
    """SVG of one line per series; a point is (budget in per cent, relative error).

    Budgets are on a logarithmic axis from 1% to 100%, errors on a linear one from 0 to 1, or to
    the largest error. The picture follows the reader's choice of light or dark.
    """
    top = max(1.0, *(error for points in series.values() for _, error in points))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(title)}">',
        f"<style>{_STYLE}</style>",
        f'<rect class="back" width="{WIDTH}" height="{HEIGHT}"/>',
        f'<text class="ink title" x="{_LEFT}" y="26">{escape(title)}</text>',
        *_axes(top),
    ]
    for (name, points), colour in zip(series.items(), _COLOURS, strict=False):
        placed = [(_x(budget), _y(error, top)) for budget, error in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        parts.append(
            f'<polyline fill="none" stroke="{colour}" stroke-width="2.5" points="{path}"/>'
        )
        parts += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}">'
            f"<title>{escape(name)} at {budget:g}%: {error:.3f}</title></circle>"
            for (x, y), (budget, error) in zip(placed, points, strict=True)
        ]
    if len(series) > 1:
        parts += _legend(list(series))
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def _axes(top: float) -> list[str]:
    parts = []
    for tick in _TICKS:
        x = _x(tick)
        parts.append(
            f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}"/>'
            f'<text class="soft" x="{x:.1f}" y="{HEIGHT - _BOTTOM + 20}" text-anchor="middle">'
            f"{tick}%</text>"
        )
    for step in range(6):
        error = step * top / 5
        y = _y(error, top)
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="soft" x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{error:.1f}'
            "</text>"
        )
    middle = (_LEFT + WIDTH - _RIGHT) / 2
    parts.append(
        f'<text class="soft" x="{middle}" y="{HEIGHT - 12}" text-anchor="middle">'
        "budget, of the experts' bytes</text>"
        f'<text class="soft" transform="translate(16 {HEIGHT / 2}) rotate(-90)" '
        'text-anchor="middle">error of the merged delta</text>'
    )
    return parts


def _legend(names: list[str]) -> list[str]:
    parts = []
    for row, (name, colour) in enumerate(zip(names, _COLOURS, strict=False)):
        y = _TOP + 16 + 20 * row
        x = WIDTH - _RIGHT - 150
        parts.append(
            f'<rect x="{x}" y="{y - 10}" width="12" height="12" rx="2" fill="{colour}"/>'
            f'<text class="ink" x="{x + 18}" y="{y}">{escape(name)}</text>'
        )
    return parts


def _x(budget: float) -> float:
    share = math.log10(min(max(budget, 1.0), 100.0)) / 2
    return _LEFT + share * (WIDTH - _LEFT - _RIGHT)


def _y(error: float, top: float) -> float:
    return HEIGHT - _BOTTOM - error / top * (HEIGHT - _TOP - _BOTTOM)
