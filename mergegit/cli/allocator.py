"""Makes the C library keep freed memory for the next block.

Blocks come and go by the megabyte. glibc hands each back to the kernel, which clears it anew for
the next: a fifth of a merge's time. A command may keep what it had, for it ends soon; a library may
not decide so for its host, so that this is the command line's.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from typing import Final

_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3
_KEPT_BYTES: Final = 1 << 30


def keep_freed_memory() -> None:
    """Set glibc's thresholds for this process; does nothing with another C library."""
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        mallopt(_MMAP_THRESHOLD, _KEPT_BYTES)
        mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)
