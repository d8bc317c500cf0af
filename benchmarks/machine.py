"""The machine that numbers were measured on."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path


def describe() -> dict[str, object]:
    """Processor, cores, memory, load and versions."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(memory / 2**30, 1),
        "load": [round(load, 2) for load in os.getloadavg()],
        "python": platform.python_version(),
        **{name: version(name) for name in ("numpy", "numba", "zstandard", "blake3")},
    }


def as_text() -> str:
    """The description on one line."""
    return ", ".join(f"{key} {value}" for key, value in describe().items())


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
