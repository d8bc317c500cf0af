"""The element types of safetensors, and which of them mergegit can do arithmetic on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DType:
    """One element type.

    ``code`` is the number that stands for it in pack records, ``bits`` the width of an element.
    ``is_float`` is true where values can be added: experts' deltas exist for these alone. Types
    of which several elements share a scale (F4, F6, F8_E8M0), integers and complex numbers are
    stored and deduplicated like all others, but never merged.
    """

    name: str
    code: int
    bits: int
    is_float: bool = False


_TABLE = (
    DType("BOOL", 1, 8),
    DType("U8", 2, 8),
    DType("I8", 3, 8),
    DType("U16", 4, 16),
    DType("I16", 5, 16),
    DType("U32", 6, 32),
    DType("I32", 7, 32),
    DType("U64", 8, 64),
    DType("I64", 9, 64),
    DType("F16", 10, 16, is_float=True),
    DType("BF16", 11, 16, is_float=True),
    DType("F32", 12, 32, is_float=True),
    DType("F64", 13, 64, is_float=True),
    DType("F8_E4M3", 14, 8, is_float=True),
    DType("F8_E5M2", 15, 8, is_float=True),
    DType("F8_E4M3FNUZ", 16, 8),
    DType("F8_E5M2FNUZ", 17, 8),
    DType("F8_E8M0", 18, 8),
    DType("F6_E2M3", 19, 6),
    DType("F6_E3M2", 20, 6),
    DType("F4", 21, 4),
    DType("C64", 22, 64),
)

DTYPES = {dtype.name: dtype for dtype in _TABLE}
BY_CODE = {dtype.code: dtype for dtype in _TABLE}


def byte_length(dtype: str, elements: int) -> int:
    """Bytes that ``elements`` elements of ``dtype`` take; a count that ends inside a byte fails.

    Raises ``ValueError`` where the bits do not fill whole bytes (F4 and F6 are packed).
    """
    bits = DTYPES[dtype].bits * elements
    if bits % 8:
        raise ValueError(f"{elements} elements of {dtype} do not fill whole bytes")
    return bits // 8
