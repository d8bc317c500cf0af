"""What a merge was made with: versions of programs, and the machine."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

_CPU_INFO: Final = Path("/proc/cpuinfo")
_MODEL: Final = "model name"


def surroundings(threads: int) -> dict[str, Any]:
    """The programs that a merge is computed by, and the machine that it runs on.

    They change no result, but for methods that work on whole matrices: those have the last bits of
    the machine's linear algebra (``blas``). Nothing here names the machine or its user.
    """
    import numba
    import numpy as np

    software = {
        "python": platform.python_version(),
        "numpy": np.__version__,
        "numba": numba.__version__,
    }
    blas = _blas(np.show_config(mode="dicts"))
    return {
        "software": {**software, **({"blas": blas} if blas else {})},
        "machine": {
            "system": f"{platform.system()} {platform.release()}",
            "processor": _processor(),
            "threads": threads,
        },
    }


def _blas(config: Any) -> str:
    """The linear algebra that numpy was built with, as ``scipy-openblas 0.3.27``."""
    found = config
    for key in ("Build Dependencies", "blas"):
        found = found.get(key) if isinstance(found, Mapping) else None
    if not isinstance(found, Mapping):
        return ""
    return " ".join(str(found[key]) for key in ("name", "version") if found.get(key))


def _processor() -> str:
    """The processor by its maker's name where the system tells, else its architecture."""
    try:
        lines = _CPU_INFO.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == _MODEL and value.strip():
            return f"{value.strip()} ({platform.machine()})"
    return platform.machine()


def differences(execution: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """What a merge was made with that is otherwise here: ``numpy 2.1.0, here 2.2.0``."""
    found = []
    for part, keys in (("software", ("python", "numpy", "numba", "blas")),
                       ("machine", ("system", "processor"))):  # fmt: skip
        there, now = execution.get(part), here.get(part)
        if not isinstance(there, Mapping) or not isinstance(now, Mapping):
            continue
        for key in keys:
            if key in there and there[key] != now.get(key):
                found.append(f"{key} {there[key]}, here {now.get(key, 'none')}")
    return found
