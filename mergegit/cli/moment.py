"""Moments as people write them: ``2025-06-01``, ``2 weeks ago``, ``yesterday``."""

from __future__ import annotations

import re
import time
from datetime import datetime, timedelta
from typing import Final

import click

_UNITS: Final = {
    "second": 1, "minute": 60, "hour": 3600, "day": 86400, "week": 7 * 86400,
    "month": 30 * 86400, "year": 365 * 86400,
}  # fmt: skip
_SHORT: Final = {"s": "second", "min": "minute", "h": "hour", "d": "day", "w": "week"}
_AGO: Final = re.compile(r"(\d{1,6})\s*([a-z]+?)s?(?:\s+ago)?")


def moment(text: str, now: float) -> float | None:
    """Seconds since 1970 of a date (in local time, unless it says otherwise), or of so long before
    ``now``; None for what is neither. Months have 30 days, years 365."""
    words = text.strip().lower()
    if words in ("today", "yesterday"):
        midnight = datetime.fromtimestamp(now).replace(hour=0, minute=0, second=0, microsecond=0)
        return (midnight - timedelta(days=words == "yesterday")).timestamp()
    match = _AGO.fullmatch(words)
    if match is not None:
        unit = _SHORT.get(match[2], match[2])
        return now - int(match[1]) * _UNITS[unit] if unit in _UNITS else None
    try:
        return datetime.fromisoformat(text.strip()).timestamp()
    except (ValueError, OverflowError, OSError):
        return None


def since_option(_ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    if value is None:
        return None
    found = moment(value, time.time())
    if found is None:
        raise click.BadParameter(
            f"{value!r} is neither a date like 2025-06-01 nor a time like '2 weeks'", param=param
        )
    return found
