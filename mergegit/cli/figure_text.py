"""Numbers that may be estimates, as people and programs are shown them."""

from __future__ import annotations

from typing import Any

from mergegit.repository.figures import Figure


def number(value: float) -> str:
    """Three significant digits: ``0.0123``, ``12.3``, ``1.23e-05``."""
    return f"{value:.3g}"


def figure_text(figure: Figure | None, *, with_error: bool = False) -> str:
    """``0.0123``; an estimate as ``~0.0123``, or with its standard error as ``~0.0123 ± 0.0004``;
    ``?`` where nothing is known."""
    if figure is None:
        return "?"
    if figure.error is None:
        return number(figure.value)
    if not with_error:
        return f"~{number(figure.value)}"
    return f"~{number(figure.value)} ± {figure.error:.1g}"


def cosine_text(figure: Figure | None) -> str:
    """A cosine with two decimals, an estimate behind ``~``."""
    if figure is None:
        return "?"
    text = f"{figure.value:.2f}"
    return f"{'' if figure.error is None else '~'}{'0.00' if text == '-0.00' else text}"


def figure_json(key: str, figure: Figure | None) -> dict[str, Any]:
    """``key`` and ``key_error``: the number, null where it is not known; and its standard error,
    null where it is exact."""
    return {
        key: figure.value if figure is not None else None,
        f"{key}_error": figure.error if figure is not None else None,
    }
