"""Numbers and times as people read them."""

from __future__ import annotations

import re
import time
from typing import Final

_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


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


def printable(text: str) -> str:
    """A name or message of foreign origin on one line, with control characters made visible."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def local_time(seconds: int) -> str:
    """A commit's time in the reader's time zone, as Git prints it."""
    return time.strftime("%a %b %d %H:%M:%S %Y %z", time.localtime(seconds))


def percent(part: float, whole: float) -> str:
    """``12.3%`` of a whole."""
    return f"{100 * part / whole:.1f}%" if whole else "0.0%"


def error_number(value: float) -> str:
    """A relative error: ``0`` where there is none at all, three decimals elsewhere."""
    if value == 0:
        return "0"
    return "<0.001" if 0 < value < 0.0005 else f"{value:.3f}"


def plural(count: int, noun: str) -> str:
    """``1 block``, ``1,234 blocks``."""
    return f"{count:,} {noun}{'' if count == 1 else 'es' if noun.endswith('ch') else 's'}"
