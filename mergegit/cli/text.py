"""Numbers and times as people read them."""

from __future__ import annotations

import time


def human_bytes(count: float) -> str:
    """``1.46 GiB``: three significant digits, binary units."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            break
        count /= 1024
    if unit == "B":
        return f"{count:.0f} B"
    digits = 2 if count < 10 else 1 if count < 100 else 0
    return f"{count:.{digits}f} {unit}"


def human_seconds(seconds: float) -> str:
    """``0.42 s``, ``12.3 s`` or ``3 min 5 s``."""
    if seconds < 60:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s"


def local_time(seconds: int) -> str:
    """A commit's time in the reader's time zone, as Git prints it."""
    return time.strftime("%a %b %d %H:%M:%S %Y %z", time.localtime(seconds))


def percent(part: float, whole: float) -> str:
    """``12.3%`` of a whole."""
    return f"{100 * part / whole:.1f}%" if whole else "0.0%"


def plural(count: int, noun: str) -> str:
    """``1 block``, ``1,234 blocks``."""
    return f"{count:,} {noun}{'' if count == 1 else 'es' if noun.endswith('ch') else 's'}"
