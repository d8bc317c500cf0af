"""Elements of one float dtype in another."""

from __future__ import annotations

import numpy as np

from mergegit.kernels.floats import from_float32, to_float32


def convert(data: bytes, source: str, target: str) -> tuple[bytes, int]:
    """Little-endian elements of the float dtype ``source`` as those of ``target``.

    Goes through float32 and rounds to nearest even: once, but twice from F64 to anything narrower
    than F32. Also returns how many numbers are lost, being beyond the range of ``target``: finite
    ones that became infinite and, where it has no infinity (F8_E4M3), those that were cut off at
    its largest number. Infinity that stays infinity and NaN are not among them.
    """
    values = to_float32(data, source)
    converted = from_float32(values, target)
    if target == "F8_E4M3":
        # 464 lies half way from the largest number to the next that there would be.
        return converted, int(np.count_nonzero(np.abs(values) > 464))
    before = np.frombuffer(data, np.float64) if source == "F64" else values
    after = to_float32(converted, target) if target not in ("F32", "F64") else values
    return converted, int(np.count_nonzero(np.isinf(after) & ~np.isinf(before)))
