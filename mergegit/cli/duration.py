"""Durations as people write them: ``30d``, ``2w``, ``12h``, ``0``."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

import click

_SECONDS: Final = {"s": 1, "m": 60, "h": 60 * 60, "d": 24 * 60 * 60, "w": 7 * 24 * 60 * 60}
_DURATION: Final = re.compile(r"(\d{1,6})([smhdw])")


def duration_option(
    name: str, default: float, text: str
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """An option whose value is a duration, in seconds; the default is a whole number of days."""
    return click.option(
        name,
        metavar="DURATION",
        default=f"{round(default / _SECONDS['d'])}d",
        show_default=True,
        callback=_seconds,
        help=text,
    )


def _seconds(_ctx: click.Context, param: click.Parameter, value: str) -> float:
    match = _DURATION.fullmatch(value)
    if match is None and value != "0":
        raise click.BadParameter(
            f"{value!r} is no duration; write 0, or a number and s, m, h, d or w, like 30d",
            param=param,
        )
    return float(int(match[1]) * _SECONDS[match[2]]) if match else 0.0
