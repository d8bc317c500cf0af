"""Element types as float32 and back, in compiled code.

Conversions to float32 are exact but for F64, which is rounded; conversions from it round once, to
nearest even. Overflow gives infinity, or the largest finite value where the type has none
(F8_E4M3), as torch does.
"""

from __future__ import annotations

from typing import Any, Final

import numba
import numpy as np
import numpy.typing as npt

from mergegit.dtypes import DTYPES

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

PIECE: Final = 4096
"""Elements that kernels handle at a time: a few float32 pieces fit the first-level cache."""

_F16 = DTYPES["F16"].code
_BF16 = DTYPES["BF16"].code
_F32 = DTYPES["F32"].code
_F64 = DTYPES["F64"].code
_E4M3 = DTYPES["F8_E4M3"].code
_E5M2 = DTYPES["F8_E5M2"].code


def compiled(function: Any) -> Any:
    """Compile with numba: no GIL held, no reordering of arithmetic, cached on disk."""
    return numba.njit(cache=True, nogil=True, error_model="numpy")(function)


@compiled
def load(code: int, row: Bytes, start: int, stop: int, out: Floats) -> None:
    """Elements ``start`` to ``stop`` of ``row``, of the type with ``code``, as float32.

    ``out`` (float32, at least ``stop - start``) receives them.
    """
    # Slices, here as everywhere in the kernels, are what lets the compiler use vectors: indices
    # that could be negative don't.
    n = stop - start
    bits = out.view(np.uint32)
    if code == _BF16:
        half = row.view(np.uint16)[start:stop]
        for i in range(n):
            bits[i] = np.uint32(half[i]) << np.uint32(16)
    elif code == _F32:
        full = row.view(np.float32)[start:stop]
        for i in range(n):
            out[i] = full[i]
    elif code == _F64:
        double = row.view(np.float64)[start:stop]
        for i in range(n):
            out[i] = np.float32(double[i])
    elif code == _F16:
        half = row.view(np.uint16)[start:stop]
        for i in range(n):
            _expand_f16(np.uint32(half[i]), i, bits, out)
    elif code == _E5M2:
        byte = row[start:stop]
        for i in range(n):
            _expand_f16(np.uint32(byte[i]) << np.uint32(8), i, bits, out)
    else:
        byte = row[start:stop]
        for i in range(n):
            magnitude = np.uint32(byte[i]) & np.uint32(0x7F)
            bits[i] = magnitude << np.uint32(20)
            out[i] *= np.float32(2.0**120)
            if magnitude == 0x7F:
                bits[i] = np.uint32(0x7FC00000)
            bits[i] |= (np.uint32(byte[i]) & np.uint32(0x80)) << np.uint32(24)


@compiled
def _expand_f16(half: Any, i: int, bits: Any, out: Floats) -> None:
    """One F16 as float32: shift its exponent and mantissa into place, then scale by 2^112."""
    magnitude = half & np.uint32(0x7FFF)
    bits[i] = magnitude << np.uint32(13)
    out[i] *= np.float32(2.0**112)
    if magnitude >= 0x7C00:
        bits[i] = (magnitude << np.uint32(13)) | np.uint32(0x7F800000)
    bits[i] |= (half & np.uint32(0x8000)) << np.uint32(16)


@compiled
def round_bf16(values: Floats, out: npt.NDArray[np.uint16]) -> None:
    """float32 values to BF16 bits, to nearest even, as many as ``out`` holds. NaN stays NaN."""
    bits = values.view(np.uint32)
    for i in range(out.size):
        u = bits[i]
        nearest = np.uint32(u + np.uint32(0x7FFF) + ((u >> np.uint32(16)) & np.uint32(1)))
        is_nan = (u & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
        chosen = np.uint32(u | np.uint32(0x400000)) if is_nan else nearest
        out[i] = np.uint16(np.uint32(chosen) >> np.uint32(16))


@compiled
def _load_all(code: int, row: Bytes, n: int, out: Floats) -> None:
    load(code, row, 0, n, out)


def to_float32(data: bytes | memoryview | Bytes, dtype: str) -> Floats:
    """Elements of a float dtype, as little-endian bytes, in float32."""
    row = np.frombuffer(data, np.uint8)
    n = row.size * 8 // DTYPES[dtype].bits
    out = np.empty(n, np.float32)
    _load_all(DTYPES[dtype].code, row, n, out)
    return out


def from_float32(values: Floats, dtype: str) -> bytes:
    """float32 values rounded once to a float dtype, as little-endian bytes."""
    match dtype:
        case "BF16":
            out = np.empty(values.size, np.uint16)
            round_bf16(values, out)
            return out.tobytes()
        case "F32":
            return values.tobytes()
        case "F64":
            return values.astype(np.float64).tobytes()
        case "F16":
            with np.errstate(over="ignore"):
                return values.astype(np.float16).tobytes()
        case "F8_E4M3":
            return _round_small(values, mantissa=3, bias=7, overflow=464.0, limit=0x7E)
        case "F8_E5M2":
            return _round_small(values, mantissa=2, bias=15, overflow=65536.0, limit=0x7C)
    raise ValueError(f"{dtype} is not a type that can be rounded to")


def _round_small(values: Floats, *, mantissa: int, bias: int, overflow: float, limit: int) -> bytes:
    """float32 to an 8-bit float type.

    ``limit`` is the code for magnitudes of ``overflow`` and more, and of those that round up to it.
    """
    bits = values.view(np.uint32)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    shift = np.uint32(23 - mantissa)
    rebased = magnitude - np.uint32((127 - bias) << 23)
    even = np.uint32((1 << (23 - mantissa - 1)) - 1) + ((rebased >> shift) & np.uint32(1))
    normal = (rebased + even) >> shift
    # Adding a power of two whose unit is the type's smallest step rounds subnormals in place.
    anchor = np.float32(2.0 ** (23 + 1 - bias - mantissa))
    is_small = magnitude < np.uint32((127 - bias + 1) << 23)
    small = np.where(is_small, magnitude, 0).astype(np.uint32).view(np.float32)
    subnormal = (small + anchor).view(np.uint32) - anchor.view(np.uint32)
    code = np.minimum(np.where(is_small, subnormal, normal), limit)
    code = np.where(magnitude >= np.float32(overflow).view(np.uint32), limit, code)
    code = np.where(magnitude > np.uint32(0x7F800000), 0x7F, code)
    signed: npt.NDArray[np.uint8] = (code | ((bits >> 24) & np.uint32(0x80))).astype(np.uint8)
    return signed.tobytes()
